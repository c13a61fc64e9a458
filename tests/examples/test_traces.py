"""The scheduler benchmark's replay of traces: files, counts and bounds."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from examples.bench.command import CANNOT_START, CannotStart
from examples.bench.traces import read_trace, sessions_in_order
from examples.scheduler_bench import __main__ as command
from examples.scheduler_bench.bounds import Access, lru_hits, optimal_hits
from examples.scheduler_bench.contenders import CONTENDERS, Contender, OurSide, Transfer
from examples.scheduler_bench.engine import Bus
from examples.scheduler_bench.plan import TracePlan
from examples.scheduler_bench.replay import replay
from examples.scheduler_bench.results import Outcome
from simple_offload.sizing.traces import Request, Trace

SESSION = [
    [0.0, 200, 30, 0.0, 2.5, 0, [[1, 3]]],
    [10.0, 330, 40, None, None, 2, [[7, 2], [12, 1]]],
]
CLAUDE_CODE: dict[str, Any] = {
    "block_size": 64,
    "traces": [
        {"rows": SESSION},
        {"rows": [[0.0, 70, 1, 0.0, 1.0, 0, [[1, 1]]]]},
        {"rows": [*SESSION, [30.0, 400, 1, 0.0, 1.0, 5, []]][:2]},  # a fork of the first
    ],
}

# Files


def test_sessions_come_in_an_order_of_the_seed(tmp_path: Path) -> None:
    path = tmp_path / "agents.json"
    path.write_text(json.dumps(CLAUDE_CODE))
    trace = read_trace(path)
    orders = [sessions_in_order(trace, seed) for seed in range(8)]
    assert all(
        len(order) == 2 and set(map(id, order)) == set(map(id, trace.sessions)) for order in orders
    )
    assert orders == [sessions_in_order(trace, seed) for seed in range(8)]
    assert any(order != trace.sessions for order in orders)
    alone = Trace("talks", 512, [[session[0]] for session in trace.sessions])
    assert sessions_in_order(alone, 0) == alone.sessions


def test_a_file_that_is_no_trace_stops_the_benches(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 0}')
    with pytest.raises(CannotStart, match=f"--traces: {path}, line 1 is no request"):
        read_trace(path)


def test_ids_that_do_not_scale_are_refused_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(CLAUDE_CODE | {"block_size": 16}))
    assert command.main(["--traces", str(path), "--out", str(tmp_path)]) == CANNOT_START
    assert "ids of 16 tokens. Allowed: a multiple of 32" in capsys.readouterr().err


# Bounds


def accesses(*prompts: str) -> list[Access]:
    return [Access([letter.encode() for letter in prompt], 0) for prompt in prompts]


def test_a_cycle_that_is_too_long() -> None:
    cycle = accesses(*"abcd" * 3)
    assert lru_hits(cycle, 3, first=4) == 0
    assert lru_hits(cycle, 4, first=4) == 8
    # Of each cycle of four, three can stay.
    assert optimal_hits(cycle, 3, first=4) == 6
    assert optimal_hits(cycle, 4, first=4) == 8


def test_a_tail_leaves_before_its_head() -> None:
    prompts = accesses("abc", "x", "abc")
    assert lru_hits(prompts, 3, first=2) == 2
    assert lru_hits([prompts[0], Access([b"x"], 1), prompts[2]], 3, first=2) == 1
    assert optimal_hits(prompts, 2, first=2) == 2


# Replay


def test_copies_of_one_direction_follow_each_other() -> None:
    bus = Bus(delay=2, blocks_per_second=10)
    load, small, store = Transfer(1, True, 35), Transfer(2, True, 1), Transfer(1, False, 5)
    bus.submit([load, small, store], step=1, now=1.0)
    ended = {step: bus.drain_ended(step, now=float(step)) for step in range(1, 7)}
    assert ended == {1: [], 2: [], 3: [store], 4: [], 5: [load, small], 6: []}
    assert bus.idle


PLAN = TracePlan(agents=2, requests=8, warm_up=0.5, scale=4, max_pause=1.0, bus_tokens=100_000)


def talk(first_id: int) -> list[Request]:
    """Four requests, each a block longer than the one before."""
    return [
        Request(0.0, 0.5, tuple(range(first_id, first_id + num_blocks)), 64 * num_blocks, 4)
        for num_blocks in range(4, 8)
    ]


TRACE = Trace("talks", 64, [talk(0), talk(100)])


STORES_NOTHING = Contender("nothing", OurSide(), {"store_threshold": 9})
OURS, BUILTIN, LAZY, OFFLOADING = (
    CONTENDERS[name] for name in ("ours", "builtin", "builtin-lazy", "offloading")
)


def play(contender: Contender, device: int, host: int, **changes: Any) -> Outcome:
    """Replay ``TRACE`` with memory for these numbers of blocks."""
    memory = (64 * device / 1e6, 64 * host / 1e6)
    return replay(contender, TRACE, replace(PLAN, **changes), memory, seed=0)


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
    if contender is STORES_NOTHING:
        assert small.unstored > 0
        assert small.host == small.stored == 0
    else:
        assert small.host > 0
        assert small.unstored == small.evicted == 0


def test_a_small_tier_loses_hits_itself() -> None:
    count, roomy = play(BUILTIN, 12, 8), play(BUILTIN, 12, 80)
    assert count.evicted > roomy.evicted == 0


def test_a_step_takes_time_for_each_token_that_it_computes() -> None:
    slow, fast = (
        play(OURS, 12, 160, step_seconds=0.001, tokens_per_second=speed)
        for speed in (10, 1_000_000)
    )
    num_tokens = 16 * PLAN.scale  # of one block, at least
    assert slow.seconds > fast.seconds + num_tokens / 10


def test_requests_come_at_the_times_of_the_trace() -> None:
    turns = [turn._replace(at=at) for at, turn in enumerate(talk(0))]
    trace = Trace("requests", 64, [[turn] for turn in turns])
    plan = replace(PLAN, warm_up=0.0)
    count = replay(CONTENDERS["ours"], trace, plan, (0.01, 0.01), seed=0)
    assert (count.prompt, count.device) == (16 * (4 + 5 + 6 + 7), 16 * (4 + 5 + 6))


def test_a_run_reports_its_replays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "agents.json"
    path.write_text(json.dumps(CLAUDE_CODE | {"block_size": 512}))
    options = "--memory 0.1/0.2 --requests 3 --seeds 2 --step-ms 80 --max-pause 40 --contenders"
    arguments = ["--parts", "traces", "--traces", f"{path}", "--out", f"{tmp_path}"]
    assert command.main([*arguments, *options.split(), "ours,builtin"]) == 0
    assert "agents, 0.1M / 0.2M tokens" in capsys.readouterr().out
    numbers = json.loads((tmp_path / "result.json").read_text())
    plan = numbers["plan"]["traces"]
    assert (plan["step_seconds"], plan["max_pause"], plan["requests"]) == (0.08, 40, 3)
    (row,) = numbers["plays"]
    assert row["name"] == "agents, 0.1M / 0.2M tokens"
    # Two orders of the sessions, with prompts of 3, 5 and 1 ids of 16 tokens.
    prompts = {name: count["prompt"] for name, count in row["contenders"].items()}
    assert prompts == dict.fromkeys(("ours", "builtin"), 2 * 16 * 9)
