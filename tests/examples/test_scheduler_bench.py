"""The scheduler benchmark: a tiny run, its counts, and its detection of faults."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from examples.bench.command import BAD_RESULT, RUN_FAILED
from examples.bench.traces import read_trace
from examples.scheduler_bench import __main__ as command
from examples.scheduler_bench import report
from examples.scheduler_bench.agents import run_agents
from examples.scheduler_bench.contenders import CONTENDERS, Contender, HostMemory, OurSide
from examples.scheduler_bench.costs import Serving
from examples.scheduler_bench.engine import Engine, Hit, Shape, Wait
from examples.scheduler_bench.footprint import measure_footprint
from examples.scheduler_bench.hybrids import MODELS
from examples.scheduler_bench.plan import (
    QUICK,
    AgentPlan,
    ChatPlan,
    FootprintPlan,
    Mix,
    Part,
    Plan,
)
from examples.scheduler_bench.planned import plan_models
from examples.scheduler_bench.replay import replay
from examples.scheduler_bench.results import (
    POOL,
    Footprint,
    Kind,
    Outcome,
    Play,
    Results,
    Row,
)
from simple_offload.replicas import Replicas

CHAT = ChatPlan(4, 2, 3, 32, (100, 200), device_tokens=1024, host_factors=(2.0,))
TINY = replace(
    QUICK,
    cost=replace(QUICK.cost, running=(1, 3), lengths=(64, 256)),
    chat=CHAT,
)


class Faulty(OurSide):
    """A connector whose scheduler side has another member."""

    def __init__(self, name: str, member: object) -> None:
        self._name, self._member = name, member

    def open(self, connector: Any, memory: HostMemory) -> None:
        super().open(connector, memory)
        setattr(connector.scheduler, self._name, self._member)


def numbers_of(output: Path) -> Any:
    return json.loads((output / "result.json").read_text())


# The program


def test_a_tiny_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["ours", "builtin", "builtin-lazy"]
    contenders = [CONTENDERS[name] for name in names]
    assert command.run(TINY, contenders, {Part.COST, Part.CHAT}, tmp_path) == 0
    captured = capsys.readouterr()
    assert "decode, 3 running" in captured.err
    assert "host 2 x device, one-offs" in captured.out
    assert "\x1b" not in captured.out + captured.err
    numbers = numbers_of(tmp_path)
    assert numbers["problems"] == numbers["failures"] == numbers["left_out"] == {}
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
    rig = Serving(CONTENDERS["ours"], Kind.SERVING, Mix(64, answer_tokens), TINY.cost, 3)
    before = rig.engine.num_steps
    rig.measure()
    assert rig.engine.num_steps - before == num_steps


def test_a_connector_that_never_hits_is_found_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    deaf = Faulty("get_num_new_matched_tokens", lambda request, computed: (0, False))
    plan = replace(TINY, cost=replace(TINY.cost, running=(), lengths=(64,)))
    assert command.run(plan, [Contender("ours", deaf)], {Part.COST}, tmp_path) == BAD_RESULT
    printed = " ".join(capsys.readouterr().out.split())
    problems = numbers_of(tmp_path)["problems"]
    assert problems["ours, one prompt of 64 tokens"] == "96 tokens were not loaded"
    assert "Proves nothing: ours, one prompt of 64 tokens: 96 tokens" in printed


def test_one_that_fails_or_is_refused_is_out_and_the_others_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refused = Contender("odd", OurSide(), {"copy_path": "odd"})
    broken = Contender("broken", Faulty("update_connector_output", "lost"))
    plan = replace(TINY, cost=replace(TINY.cost, running=()))
    contenders = [refused, broken, CONTENDERS["ours"]]
    assert command.run(plan, contenders, {Part.COST}, tmp_path) == RUN_FAILED
    printed = capsys.readouterr().out
    assert "Left out: odd: kv_connector_extra_config: copy_path" in printed
    assert "broken failed: one prompt of 64 tokens: TypeError: 'str' object" in printed
    names = {name for row in numbers_of(tmp_path)["rows"] for name in row["cells"]}
    assert names == {"ours", POOL}


def save_agents(folder: Path) -> Path:
    """A trace of eight agents with 12 turns each."""
    rows = [[60 * turn, 0, 64, 0, 1, 16 * turn, [[16 * turn, 16]]] for turn in range(12)]
    sessions = [{"rows": [[row[0], agent, *row[2:]] for row in rows]} for agent in range(8)]
    trace = folder / "agents.json"
    trace.write_text(json.dumps({"block_size": 64, "traces": sessions}))
    return trace


def test_other_agents_come_and_the_last_count(tmp_path: Path) -> None:
    trace = read_trace(save_agents(tmp_path))
    plan = replace(TINY.traces, agents=2, working_sets=3, requests=10, warm_up=0.0)
    outcome = replay(CONTENDERS["ours"], trace, plan, (0.5, 0.5), seed=0)
    [first], [later] = outcome.first_turns, outcome.later_turns
    assert (len(first), len(later)) == (2, 8)
    assert outcome.unstored == outcome.evicted == 0


def test_sizes_of_host_memory_are_predicted_and_replayed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Four of the agents are at work, more than the caches hold, unless the host has four times the
    memory."""
    trace = save_agents(tmp_path)
    traces = replace(
        TINY.traces, files=(trace,), memories=((0.015, 0.01),), agents=4, requests=60, warm_up=0.2
    )
    plan = replace(TINY, traces=traces, seeds=1)
    contenders = [CONTENDERS[name] for name in ("ours", "builtin")]
    assert command.run(plan, contenders, {Part.SIZES}, tmp_path) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "agents, 0.015M / 0.01M tokens 0.5 x" in printed
    [run] = numbers_of(tmp_path)["sizes"]["agents, 0.015M / 0.01M tokens"]
    assert [*run] == ["0.5", "1.0", "2.0", "4.0"]
    assert run["1.0"]["in_loop"] == run["1.0"]["replayed"] < run["4.0"]["replayed"]
    assert run["1.0"]["predicted"] == pytest.approx(run["1.0"]["replayed"], abs=0.03)
    assert run["4.0"]["lru"] == pytest.approx(run["4.0"]["replayed"], abs=0.03)
    # Answers that come earlier change the order, and what is predicted from it.
    assert run["2.0"]["of_order"] < run["2.0"]["predicted"]
    assert run["4.0"]["of_order"] == pytest.approx(run["4.0"]["in_loop"], abs=0.03)


def test_too_little_memory_is_refused_beforehand(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["--parts", "footprint", "--out", str(tmp_path)]
    memory = SimpleNamespace(available=3 << 30)
    monkeypatch.setattr("examples.scheduler_bench.__main__.psutil.virtual_memory", lambda: memory)
    assert command.main(arguments) == 2
    message = "A tier of 4000000 blocks may take 3.5 GiB of memory; 3.0 are available. --quick"
    assert message in capsys.readouterr().err


def test_offered_names_are_the_contenders() -> None:
    assert tuple(CONTENDERS) == command.NAMES


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
    assert engine.side.num_host_blocks(engine.connector) == 80
    assert engine.stopwatch.drain() > 0
    assert engine.stopwatch.drain() == 0


def test_who_gets_blocks_first_is_counted() -> None:
    """The first request is told to ask again, three times."""
    engine = Engine(CONTENDERS["ours"], SHAPE)
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "num_sub_blocks"), [(POOL, 1), ("ours", 1), ("builtin", 1), ("ours-128", 8)]
)
def test_footprint(name: str, num_sub_blocks: int) -> None:
    # So large that the engine's fixed 6 MB hardly count.
    filled_blocks = 0 if name == POOL else 240_000
    plan = FootprintPlan(tier_blocks=400_000, filled_blocks=filled_blocks, repeats=1)
    found = measure_footprint(name, plan)
    assert found.tier_blocks == 400_000
    assert found.seconds_to_start > 0
    # A block is a Python object of eight slots, and a place in a list.
    assert 72 <= found.bytes_per_block * num_sub_blocks <= 400
    if name == POOL:
        assert found.bytes_per_filled_block is None
    else:
        assert found.bytes_per_filled_block is not None
        assert 32 <= found.bytes_per_filled_block * num_sub_blocks <= 1000


# Hybrid models


AGENTS = AgentPlan(
    agents=3, turns=18, least_longest=20_000, answer_tokens=(5, 10), device_part=0.4, seeds=2
)


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


def test_agents_of_a_hybrid_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Kimi-K3: 8 ranks share a copy of the latents. Each has states of its own."""
    plan = replace(TINY, models=(replace(MODELS["kimi-k3"], host_gib=(8,)),), agents=AGENTS)
    contenders = [CONTENDERS[name] for name in ("ours", "ours-unlimited", "builtin", "offloading")]
    parts = {Part.BYTES, Part.MODELS}
    assert command.run(plan, contenders, parts, tmp_path) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "Kimi-K3 on 8, 8 GiB" in printed
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


# The report


def results() -> Results:
    found = Results(Plan(), {"processor": "one", "vllm": "0.32.0", "date": "2026-11-21"})
    found.rows = [
        Row(Kind.DECODE, 256, {"ours": 0.002, "builtin": 0.008}),
        Row(Kind.LOADED, 131_072, {"ours": 0.004, "builtin": 0.008, POOL: 0.002}),
    ]
    found.footprints = {
        "ours": Footprint(4_000_000, 2, 100, 250),
        "ours-128": Footprint(4_000_000, 1, 12, 30),
        "builtin": Footprint(4_000_000, 4, 200, None),
    }
    counts: dict[str, Any] = dict.fromkeys(Outcome.__dataclass_fields__, 0)
    counts |= {"prompt": 100, "device": 10, "seconds": 4.5, "later_turns": ((),)}
    runs = (Wait(0, 1, 3, 4, 2), Wait(0, 1, 1, 2)), (Wait(10, 10, 10, 16, 1),)
    outcomes = [
        Outcome(**counts | {"host": host, "first_turns": (run,)})
        for host, run in zip((30, 50), runs, strict=True)
    ]
    with_bounds = [replace(outcomes[0], unstored=7, evicted=3, lru=60, optimal=80)]
    found.plays = [Play("chat", {"ours": outcomes, "builtin": with_bounds})]
    return found


def test_tables() -> None:
    console = Console(width=160, color_system=None)
    found = results()
    with console.capture() as capture:
        console.print(report.cost_table(found), report.footprint_table(found))
        console.print(report.found_table(found.plays), report.wait_table(found.plays))
    lines = [" ".join(line.split()) for line in capture.get().splitlines()]
    assert "decode 256 2.000 0.25 8.000 - -" in lines
    assert "loaded 131,072 4.000 0.50 8.000 2.000 0.25" in lines
    assert "ours 4,000,000 2.00 0.50 100 0.50 250 -" in lines
    assert "ours-128 4,000,000 1.00 0.25 12 0.06 30 -" in lines
    assert "ours 10.0 40.0 50.0 40.0 - 60.0 - - - - 0.0 0" in lines
    assert "builtin 10.0 30.0 40.0 40.0 - 40.0 7.0 3.0 60.0 80.0 0.0 0" in lines
    waits = "3 4,000 3,000 - 6,000 4,000 6,000 6,000 4,000 - 6,000 667 667 2,667 2 3 9.0"
    assert f"ours first {waits}" in lines
    assert "…" not in "\n".join(lines)
