"""The scheduler benchmark: a tiny run, its counts, and its detection of faults."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from examples.bench.command import BAD_RESULT, CANNOT_START
from examples.bench.connectors import OURS, Contender
from examples.bench.traces import read_trace
from examples.scheduler_bench import __main__ as command
from examples.scheduler_bench.agents import run_agents
from examples.scheduler_bench.bounds import Access, lru_hits, optimal_hits
from examples.scheduler_bench.contenders import Transfer
from examples.scheduler_bench.costs import Serving
from examples.scheduler_bench.engine import Bus, Engine, Hit, Shape, Wait
from examples.scheduler_bench.hybrids import MODELS
from examples.scheduler_bench.plan import (
    CONTENDERS,
    QUICK,
    AgentPlan,
    ChatPlan,
    Mix,
    TracePlan,
)
from examples.scheduler_bench.planned import plan_models
from examples.scheduler_bench.replay import replay
from examples.scheduler_bench.results import POOL, Outcome, figures
from simple_offload.connector import SimpleCPUOffloadConnector
from simple_offload.replicas import Replicas
from simple_offload.sizing.traces import Request, Trace
from tests.examples.sessions import save_sessions

CHAT = ChatPlan(4, 2, 3, 32, (100, 200), device_tokens=1024, host_factors=(2.0,))
TINY = replace(
    QUICK,
    cost=replace(QUICK.cost, running=(1, 3), lengths=(64, 256)),
    chat=CHAT,
)


def numbers_of(output: Path) -> Any:
    return json.loads((output / "result.json").read_text())


# The program


def test_a_tiny_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["ours", "builtin", "builtin-lazy"]
    contenders = [CONTENDERS[name] for name in names]
    assert command.run(TINY, contenders, {"cost", "chat"}, tmp_path) == 0
    captured = capsys.readouterr()
    assert "decode, 3 running" in captured.err
    assert "host 2 x device, one-offs" in captured.out
    numbers = numbers_of(tmp_path)
    assert numbers["problems"] == numbers["failures"] == {}
    assert [(row["kind"], row["size"]) for row in numbers["rows"]] == [
        *(("decode", 1), ("decode", 3), ("serving", 1), ("serving", 3)),
        *(("conversations", 1), ("conversations", 3)),
        *((kind, size) for size in (64, 256) for kind in ("stored", "loaded", "on the device")),
    ]
    for row in numbers["rows"]:
        its = {"ours", "builtin"} | ({POOL} if row["kind"] in ("stored", "loaded") else set())
        assert row["cells"].keys() == its
        assert all(seconds > 0 for seconds in row["cells"].values())
    # A chat counts its last working set.
    num_later, num_one_offs = CHAT.users * (CHAT.turns - 1), CHAT.users * CHAT.turns // 4
    for play, num_first in zip(
        numbers["plays"], (CHAT.users, CHAT.users + num_one_offs), strict=True
    ):
        assert [*play["contenders"]] == names
        prompts = {each["prompt"] for each in play["contenders"].values()}
        assert len(prompts) == 1, "all are asked the same"
        for name, outcome in play["contenders"].items():
            first, later = outcome["first_turns"], outcome["later_turns"]
            assert (first["requests"], later["requests"]) == (num_first, num_later)
            assert outcome["host"] > 0
            assert outcome["unstored"] > 0 or name != "builtin-lazy"
            assert later["passed_sum"] == 0
            assert outcome["seconds"] > 0


@pytest.mark.parametrize(("answer_tokens", "num_steps"), [(4, TINY.cost.steps), (40, 80)])
def test_a_measurement_lasts_as_long_as_the_longest_answer(
    answer_tokens: int, num_steps: int
) -> None:
    """With fewer steps, the fastest repeat would be one in which no request starts or ends."""
    rig = Serving(OURS, "serving", Mix(64, answer_tokens), TINY.cost, 3)
    before = rig.engine.num_steps
    rig.measure()
    assert rig.engine.num_steps - before == num_steps


def test_a_connector_that_never_hits_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deaf = Mock(return_value=(0, False))
    monkeypatch.setattr(SimpleCPUOffloadConnector, "get_num_new_matched_tokens", deaf)
    plan = replace(TINY, cost=replace(TINY.cost, running=(), lengths=(64,)))
    assert command.run(plan, [OURS], {"cost"}, tmp_path) == BAD_RESULT
    problems = numbers_of(tmp_path)["problems"]
    assert problems["ours, one prompt of 64 tokens"] == "96 tokens were not loaded"


def save_agents(folder: Path) -> Path:
    """Eight agents with 12 turns each."""
    sizes = {"sessions": 8, "first_ids": 16, "more_ids": 16, "requests": 12, "answer_tokens": 64}
    return save_sessions(folder, **sizes, every=60.0)


def test_other_agents_come_and_the_last_count(tmp_path: Path) -> None:
    trace = read_trace(save_agents(tmp_path))
    plan = replace(TINY.traces, agents=2, working_sets=3, requests=10, warm_up=0.0)
    outcome = replay(OURS, trace, plan, (0.5, 0.5), seed=0)
    [first], [later] = outcome.first_turns, outcome.later_turns
    assert (len(first), len(later)) == (2, 8)
    assert outcome.unstored == outcome.evicted == 0


def test_a_trace_is_replayed_with_sizes_of_host_memory_predicted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Four of the agents are at work, more than the caches hold, unless the host has four times the
    memory."""
    options = "--parts traces,sizes --memory 0.015/0.01 --agents 4 --requests 60 --seeds 1 "
    options += "--step-ms 60 --max-pause 290 --contenders ours,builtin"
    trace = str(save_agents(tmp_path))
    arguments = ["--traces", trace, "--output", str(tmp_path), *options.split()]
    assert command.main(arguments) == 0
    name = "agents, 0.015M / 0.01M tokens"
    assert f"{name} 0.5 x" in " ".join(capsys.readouterr().out.split())
    numbers = numbers_of(tmp_path)
    (play,) = numbers["plays"]
    assert [*play["contenders"]] == ["ours", "builtin"]
    assert len({each["prompt"] for each in play["contenders"].values()}) == 1, "asked the same"
    [run] = numbers["sizes"][name]
    assert [*run] == ["0.5", "1.0", "2.0", "4.0"]
    assert run["1.0"]["in_loop"] == run["1.0"]["replayed"] < run["4.0"]["replayed"]
    assert run["1.0"]["predicted"] == pytest.approx(run["1.0"]["replayed"], abs=0.03)
    assert run["4.0"]["lru"] == pytest.approx(run["4.0"]["replayed"], abs=0.03)
    # Answers that come earlier change the order, and what is predicted from it.
    assert run["2.0"]["of_order"] != run["2.0"]["predicted"]
    assert run["4.0"]["of_order"] == pytest.approx(run["4.0"]["in_loop"], abs=0.03)


def test_a_trace_that_does_not_fit_is_refused_beforehand(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    request = {"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [1]}
    (tmp_path / "talks.jsonl").write_text(json.dumps(request) + "\n")
    save_sessions(tmp_path, id_tokens=16)
    for trace, options, complaint in (
        ("agents.json", [], "ids of 16 tokens. Allowed: a multiple of 32"),
        ("talks.jsonl", ["--working-sets", "2"], "has no sessions, but requests at their times"),
    ):
        arguments = ["--traces", str(tmp_path / trace), "--output", str(tmp_path), *options]
        assert command.main(arguments) == CANNOT_START
        assert complaint in capsys.readouterr().err


@pytest.mark.parametrize("part", ["chat", "traces", "sizes"])
def test_a_part_that_no_contender_takes_part_in_is_refused(
    part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It would measure nothing, and end well."""
    trace = str(save_agents(tmp_path))
    arguments = ["--parts", part, "--traces", trace, "--contenders", "ours-128"]
    with pytest.raises(SystemExit) as end:
        command.main([*arguments, "--quick", "--output", str(tmp_path / "out")])
    assert end.value.code == CANNOT_START
    assert f"{part} needs one or more of " in capsys.readouterr().err


# The parts


SHAPE = Shape(40, 80, max_running=8, delay=3, chunk_tokens=64, tokens_per_second=64.0)


@pytest.mark.parametrize("name", ["ours", "builtin"])
def test_engine_counts_hits_blocks_steps_and_waits(name: str) -> None:
    """A prompt of 97 tokens takes two steps, of 64 and 33 tokens. Its load is reported three steps
    later, and computed with the next."""
    engine = Engine(CONTENDERS[name], SHAPE)
    prompt = list(range(97))
    engine.add("cold", prompt, [7, 8], came=-1.0)
    engine.drain()
    assert engine.hits["cold"] == Hit(device=0, host=0)
    assert engine.waits["cold"] == Wait(-1.0, 0.0, 0.0, 2.0 + 97 / 64)
    assert (engine.num_stored, engine.num_loaded) == (6, 0)
    engine.add("warm", prompt, [7])
    engine.drain()
    assert engine.hits["warm"] == Hit(device=96, host=0)
    engine.reset_device()
    before = engine.now
    engine.add("loaded", prompt, [7, 8])
    engine.drain()
    assert engine.hits["loaded"] == Hit(device=0, host=96)
    assert engine.num_loaded == 6
    began = before + 4.0
    assert engine.waits["loaded"] == Wait(before, before, began, began + 1.0 + 1 / 64)
    assert engine.stopwatch.drain() > 0
    assert engine.stopwatch.drain() == 0


def test_who_gets_blocks_first_is_counted() -> None:
    """The first request is told to ask again, three times."""
    engine = Engine(OURS, SHAPE)
    lookup, again = engine.connector.get_num_new_matched_tokens, ["0", "0", "0"]

    def ask(request: Any, computed: int) -> Any:
        if request.request_id in again:
            return again.pop() and None, False
        return lookup(request, computed)

    engine.connector.get_num_new_matched_tokens = ask
    for number in range(3):
        engine.add(f"{number}", list(range(100 * number, 100 * number + 20)), [7])
    engine.drain()
    assert [wait.num_passed for wait in engine.waits.values()] == [2, 0, 0]
    assert engine.waits["0"].got_blocks > engine.waits["2"].got_blocks


# Bounds


def accesses(*prompts: str) -> list[Access]:
    return [Access([letter.encode() for letter in prompt], 0) for prompt in prompts]


def test_bounds() -> None:
    cycle = accesses(*"abcd" * 3)
    assert [lru_hits(cycle, size, first=4) for size in (3, 4)] == [0, 8]
    # Of each cycle of four, three can stay.
    assert [optimal_hits(cycle, size, first=4) for size in (3, 4)] == [6, 8]
    # A tail leaves before its head.
    prompts = accesses("abc", "x", "abc")
    assert lru_hits(prompts, 3, first=2) == optimal_hits(prompts, 2, first=2) == 2
    assert lru_hits([prompts[0], Access([b"x"], 1), prompts[2]], 3, first=2) == 1


# Replay


def test_copies_of_one_direction_follow_each_other() -> None:
    bus = Bus(delay=2, blocks_per_second=10)
    load, small, store = Transfer(1, True, 35), Transfer(2, True, 1), Transfer(1, False, 5)
    bus.submit([load, small, store], step=1, now=1.0)
    ended = {step: bus.drain_ended(step, now=float(step)) for step in range(1, 7)}
    assert ended == {1: [], 2: [], 3: [store], 4: [], 5: [load, small], 6: []}
    assert bus.idle


TALKS = TracePlan(agents=2, requests=8, warm_up=0.5, scale=4, max_pause=1, bus_tokens=100_000)


def talk(first_id: int) -> list[Request]:
    """Four requests, each a block longer than the one before."""
    return [
        Request(0.0, 0.5, tuple(range(first_id, first_id + num_blocks)), 64 * num_blocks, 4)
        for num_blocks in range(4, 8)
    ]


TRACE = Trace("talks", 64, [talk(0), talk(100)])


STORES_NOTHING = replace(OURS, extra={"store_threshold": 9})
BUILTIN, LAZY, OFFLOADING = (CONTENDERS[name] for name in ("builtin", "builtin-lazy", "offloading"))


def play(contender: Contender, device: int, host: int, **changes: Any) -> Outcome:
    """Replay ``TRACE`` with memory for these numbers of blocks."""
    memory = (64 * device / 1e6, 64 * host / 1e6)
    return replay(contender, TRACE, replace(TALKS, **changes), memory, seed=0)


@pytest.mark.parametrize(
    "contender", [STORES_NOTHING, OURS, BUILTIN, LAZY, OFFLOADING], ids=lambda each: each.name
)
def test_the_counts_of_a_replay(contender: Contender) -> None:
    """Of each prompt after the first, all but one block were computed before."""
    reusable = 16 * 2 * (5 + 6)
    large, small = play(contender, 40, 160), play(contender, 12, 160)
    for count in (large, small):
        assert count.prompt == 16 * 2 * (6 + 7)
        assert count.found + count.unstored + count.evicted == reusable
        assert count.lru == count.optimal == reusable
    assert (large.device, large.host) == (reusable, 0)
    if contender is BUILTIN:
        assert play(BUILTIN, 12, 8).evicted > 0, "a small tier loses hits itself"
    if contender is STORES_NOTHING:
        assert small.unstored > 0
        assert small.host == small.stored == 0
    else:
        assert small.host > 0
        assert small.unstored == small.evicted == 0


def test_a_step_takes_time_for_each_token_that_it_computes() -> None:
    slow, fast = (
        play(OURS, 12, 160, step_ms=1, tokens_per_second=speed) for speed in (10, 1_000_000)
    )
    num_tokens = 16 * TALKS.scale  # of one block, at least
    assert slow.seconds > fast.seconds + num_tokens / 10


def test_requests_come_at_the_times_of_the_trace() -> None:
    turns = [turn._replace(at=at) for at, turn in enumerate(talk(0))]
    trace = Trace("requests", 64, [[turn] for turn in turns])
    plan = replace(TALKS, warm_up=0.0)
    count = replay(OURS, trace, plan, (0.01, 0.01), seed=0)
    assert (count.prompt, count.device) == (16 * (4 + 5 + 6 + 7), 16 * (4 + 5 + 6))
    with pytest.raises(ValueError, match="no request came after the warm-up"):
        replay(OURS, trace, replace(TALKS, requests=9), (0.01, 0.01), seed=0)


# Hybrid models


AGENTS = AgentPlan(agents=3, turns=18, least_longest=20_000, answer_tokens=(5, 10), device_part=0.4)


def test_models_are_planned_as_published() -> None:
    """The drafter's window and keys are groups, or layers, that end hits a block earlier."""
    names = ("kimi-linear", "deepseek-v4-flash", "deepseek-v4-flash-mtp", "qwen3.5-mtp")
    kimi, flash, drafted, qwen = plan_models(MODELS[name] for name in names)
    assert kimi.block_bytes == 1920 * 7 * (512 + 64) * 2
    # 21 layers have an entry for 4 tokens and its index, 20 have one for 128, all have a window.
    layers = [
        [len(group.layer_names) for group in p.kv_cache.kv_cache_groups] for p in (flash, drafted)
    ]
    assert layers == [[22, 21, 62, 42, 20], [22, 22, 62, 42, 20]]
    assert flash.is_replicated
    assert flash.replicas.count == 4
    marked = [each.is_eagle_group for each in drafted.kv_cache.kv_cache_groups]
    assert marked == [False, True, False, False, False]
    assert qwen.replicas == Replicas(4, frozenset({0, 1, 2}))
    assert not qwen.is_replicated
    assert len(qwen.kv_cache.kv_cache_groups[3].layer_names) == 15 + 1


def test_agents_of_a_hybrid_model(tmp_path: Path) -> None:
    """Kimi-K3: 8 ranks share a copy of the latents. Each has states of its own."""
    plan = replace(
        TINY, models=(replace(MODELS["kimi-k3"], host_gib=(8,)),), agents=AGENTS, seeds=2
    )
    contenders = [CONTENDERS[name] for name in ("ours", "ours-unlimited", "builtin", "offloading")]
    parts = {"bytes", "models"}
    assert command.run(plan, contenders, parts, tmp_path) == 0
    numbers = numbers_of(tmp_path)
    (sizes,) = numbers["bytes"].values()
    # A block has 768 tokens of the 24 layers of latents, or a third of the 69 states.
    block, state = 24 * 768 * 576 * 2, 3 * 3 * (96 // 8) * 128 * 2 + 96 // 8 * 128 * 128 * 4
    assert sizes["least"] * 65_536 == 85 * block + 69 * state * 8
    assert sizes["builtin"] * 65_536 == pytest.approx(8 * block * (85 + 3), rel=1e-4)
    assert sizes["ours"] <= 1.15 * sizes["least"]
    (play,) = numbers["plays"]
    found = play["contenders"]
    assert len({each["prompt"] for each in found.values()}) == 1, "all are asked the same"
    for name, outcome in found.items():
        first, later = outcome["first_turns"], outcome["later_turns"]
        assert first["requests"] + later["requests"] == 2 * (18 - 5)
        assert first["requests"] > 0
        assert outcome["host"] > 0, name
        assert later["mean"] > 0
    ours = found["ours"]["device"] + found["ours"]["host"]
    assert found["ours-unlimited"]["device"] + found["ours-unlimited"]["host"] >= ours
    assert ours > found["builtin"]["device"] + found["builtin"]["host"]


def test_an_agent_waits_for_its_answers() -> None:
    """Alone it never waits for blocks, although four turns may run."""
    model = MODELS["kimi-linear"]
    (planned,) = plan_models([model])
    plan = replace(AGENTS, agents=1, running=4, warm_up=0.0, device_part=2.0)
    outcome = run_agents(CONTENDERS["builtin"], model, planned, 10.0, plan, seed=0)
    (waits,) = outcome.later_turns
    assert waits
    assert all(wait.got_blocks == wait.came for wait in waits)


# Figures


def test_figures() -> None:
    """Of all runs together; and of single ones, the least and the greatest."""
    runs = (Wait(0, 1, 3, 4, 2), Wait(0, 1, 1, 2)), (Wait(10, 10, 10, 16, 1),)
    found = figures(runs)
    assert [found[key] for key in ("requests", "mean", "p50", "p99", "worst")] == [3, 4, 4, 6, 6]
    assert (found["until_blocks"], found["load"]) == (2 / 3, 2 / 3)
    assert found["compute"] == pytest.approx(8 / 3)
    assert (found["least_mean"], found["greatest_mean"]) == (3, 6)
    assert (found["least_worst"], found["greatest_worst"]) == (4, 6)
    assert (found["passed_most"], found["passed_sum"]) == (2, 3)
    assert figures(((),)) == {}
