"""The scheduler benchmark: a tiny run, its counts, and its detection of faults."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("rich")
pytest.importorskip("vllm")

from rich.console import Console

from examples.bench.command import BAD_RESULT, RUN_FAILED
from examples.scheduler_bench import __main__ as command
from examples.scheduler_bench.contenders import CONTENDERS, Contender, OurSide
from examples.scheduler_bench.costs import Serving
from examples.scheduler_bench.engine import Engine, Hit, Shape
from examples.scheduler_bench.footprint import measure_footprint
from examples.scheduler_bench.plan import BLOCK_SIZE, QUICK, FootprintPlan, Mix, Order, Part, Plan
from examples.scheduler_bench.report import cost_table, footprint_table, hit_table, hook_table
from examples.scheduler_bench.results import (
    POOL,
    Footprint,
    HitCount,
    HitRow,
    Kind,
    Results,
    Row,
    goals,
)
from examples.scheduler_bench.stopwatch import Cost, Hook
from examples.scheduler_bench.turns import Workload, run_turns

TINY = replace(
    QUICK,
    cost=replace(QUICK.cost, running=(1, 3), lengths=(64, 256), tiers=(64,), tier_tokens=256),
    hits=replace(QUICK.hits, conversations=6, turns=3, running=2, one_off_tokens=64),
)
ALL = ("ours", "ours-eager", "builtin")
QUICKLY = {Part.COST, Part.HITS}


class DeafSide(OurSide):
    """A connector that never finds anything."""

    def open(self, connector: Any, num_blocks: int, block_bytes: int) -> None:
        super().open(connector, num_blocks, block_bytes)
        connector.scheduler.get_num_new_matched_tokens = lambda request, computed: (0, False)


class BrokenSide(OurSide):
    """A connector that fails when a store has ended."""

    def open(self, connector: Any, num_blocks: int, block_bytes: int) -> None:
        super().open(connector, num_blocks, block_bytes)

        def fail(output: object) -> None:
            raise RuntimeError("lost count")

        connector.scheduler.update_connector_output = fail


def numbers_of(output: Path) -> Any:
    return json.loads((output / "result.json").read_text())


# The program


def test_a_tiny_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.run(TINY, [CONTENDERS[name] for name in ALL], QUICKLY, tmp_path) == 0
    captured = capsys.readouterr()
    assert "decode, 3 running" in captured.err
    assert "\x1b" not in captured.out + captured.err
    numbers = numbers_of(tmp_path)
    assert numbers["problems"] == numbers["failures"] == numbers["left_out"] == {}
    assert [(row["kind"], row["size"]) for row in numbers["rows"]] == [
        *(("decode", 1), ("decode", 3), ("serving", 1), ("serving", 3)),
        *(("conversations", 1), ("conversations", 3)),
        *(("stored", 64), ("loaded", 64), ("stored", 256), ("loaded", 256)),
        *(("stored, tier full", 64), ("loaded, tier full", 64)),
    ]
    for row in numbers["rows"]:
        # Where a tier is full, ours stores no prompt that stays on the device.
        assert (POOL in row["contenders"]) == (row["kind"] in ("stored", "loaded"))
        assert row["contenders"].pop(POOL, {"seconds": 1})["seconds"] > 0
        assert set(row["contenders"]) == set(ALL[row["kind"].endswith("full") :])
        for cost in row["contenders"].values():
            assert cost["slowest_step"] > 0
            assert cost["by_hook"]["metadata"] > 0
        builtin = row["contenders"]["builtin"]["seconds"]
        ours = row["contenders"]["ours-eager"]
        assert ours["of_rival"] == pytest.approx(ours["seconds"] / builtin)
        stores = row["kind"] != "decode"
        loads = row["kind"].split(",")[0] in ("loaded", "serving", "conversations")
        assert (ours["by_hook"]["lookup"] > 0) >= stores
        assert (ours["by_hook"]["completion"] > 0) >= loads
    by_tier = {
        (row["order"], row["one_offs"], row["host_part"]): row["contenders"]
        for row in numbers["hits"]
    }
    assert len(by_tier) == 8
    for name in ALL:
        # The whole working set fits, and nothing else comes in between.
        assert by_tier["round robin", False, 1.0][name]["rate"] == 1
        assert by_tier["round robin", False, 0.5][name]["rate"] < 1
        assert by_tier["round robin", False, 1.0][name]["possible"] > 0
    for plot in ("cost.png", "hits.png"):
        assert (tmp_path / plot).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("answer_tokens", "num_steps"), [(4, TINY.cost.steps), (40, 80)])
def test_a_measurement_lasts_as_long_as_the_longest_answer(
    answer_tokens: int, num_steps: int
) -> None:
    """With fewer steps, the fastest repeat would be one in which no request starts or ends."""
    rig = Serving(CONTENDERS["ours"], Kind.SERVING, Mix(64, answer_tokens), TINY, 3)
    before = rig.engine.num_steps
    rig.measure()
    assert rig.engine.num_steps - before == num_steps


def test_a_connector_that_never_hits_is_found_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    deaf = Contender("ours", DeafSide(), rival="builtin")
    plan = replace(TINY, cost=replace(TINY.cost, running=(), lengths=(64,), tiers=()))
    assert command.run(plan, [deaf], QUICKLY, tmp_path) == BAD_RESULT
    numbers = numbers_of(tmp_path)
    printed = " ".join(capsys.readouterr().out.split())
    assert {row["contenders"]["ours"]["rate"] for row in numbers["hits"]} == {0.0}
    assert numbers["problems"]["ours, one prompt of 64 tokens"] == "96 tokens were not loaded"
    assert "ours, random, tier 100%" in numbers["problems"]
    assert "Proves nothing: ours, one prompt of 64 tokens: 96 tokens" in printed


def test_one_that_fails_or_is_refused_is_out_and_the_others_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refused = Contender("odd", OurSide(), {"copy_path": "odd"})
    broken = Contender("broken", BrokenSide(), rival="builtin")
    plan = replace(TINY, cost=replace(TINY.cost, running=(), lengths=(64, 256), tiers=()))
    contenders = [refused, broken, CONTENDERS["ours"]]
    assert command.run(plan, contenders, {Part.COST}, tmp_path) == RUN_FAILED
    printed = capsys.readouterr().out
    assert "Left out: odd: kv_connector_extra_config: copy_path" in printed
    assert "broken failed: one prompt of 64 tokens: RuntimeError: lost count" in printed
    names = {name for row in numbers_of(tmp_path)["rows"] for name in row["contenders"]}
    assert names == {"ours", POOL}


def test_too_little_memory_is_refused_beforehand(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["--parts", "footprint", "--tier-blocks", "100000000", "--out", str(tmp_path)]
    memory = SimpleNamespace(available=39 << 30)
    monkeypatch.setattr("examples.scheduler_bench.__main__.psutil.virtual_memory", lambda: memory)
    assert command.main(arguments) == 2
    message = "--tier-blocks 100000000 may take 39.3 GiB of memory; 39.0 are available"
    assert message in capsys.readouterr().err


def test_offered_names_are_the_contenders() -> None:
    assert tuple(CONTENDERS) == command.NAMES


# The parts


@pytest.mark.parametrize("name", ALL)
def test_engine_counts_hits_blocks_and_steps(name: str) -> None:
    engine = Engine(CONTENDERS[name], Shape(device_blocks=40, host_blocks=40, delay=3))
    prompt = list(range(100))
    engine.add("cold", prompt, [7, 8])
    engine.drain()
    assert engine.hits["cold"] == Hit(device=0, host=0)
    assert (engine.num_stored, engine.num_loaded) == (6, 0)
    engine.add("warm", prompt, [7])
    engine.drain()
    assert engine.hits["warm"] == Hit(device=96, host=0)
    engine.reset_device()
    before = engine.num_steps
    engine.add("loaded", prompt, [7])
    engine.drain()
    assert engine.hits["loaded"] == Hit(device=0, host=96)
    assert engine.num_loaded == 6
    # Submitted, reported three steps later, and computed in the step after that.
    assert engine.num_steps - before >= 5
    assert engine.side.num_host_blocks(engine.connector) == 40
    cost = engine.stopwatch.drain()
    assert all(cost.by_hook[hook] > 0 for hook in Hook)
    assert cost.slowest_step < cost.seconds
    assert engine.stopwatch.drain().seconds == 0


def test_all_are_asked_the_same() -> None:
    load = Workload(TINY.hits, Order.RANDOM, one_offs=True, seed=3)
    assert list(load.sequence()) == list(load.sequence())
    turns = [turn for turn in load.sequence() if turn is not None]
    assert sorted(turns) == sorted(list(range(6)) * 3)
    assert None in load.sequence()
    assert None not in Workload(TINY.hits, Order.RANDOM, one_offs=False, seed=3).sequence()


@pytest.mark.parametrize("name", ALL)
def test_hit_counts(name: str) -> None:
    plan = replace(TINY.hits, running=1)
    load = Workload(plan, Order.ROUND_ROBIN, one_offs=False, seed=0)
    count, _ = run_turns(CONTENDERS[name], load, host_part=1.0, delay=2)
    lengths = []
    for by_turn in load.user_tokens:
        history = plan.system_tokens
        for turn, user in enumerate(by_turn):
            known = history - (turn > 0)
            lengths.append(known // BLOCK_SIZE * BLOCK_SIZE)
            history += user + plan.answer_tokens
    # The whole history before a turn, except the system prompt of the first request.
    assert count.possible + count.device == sum(lengths) - plan.system_tokens
    assert count.host == count.possible > 0
    assert count.rate == count.overall_rate == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "num_sub_blocks"), [(POOL, 1), *((name, 1) for name in ALL), ("ours-128", 8)]
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


# The report


def results() -> Results:
    found = Results(Plan(), {"processor": "one", "vllm": "0.32.0", "date": "2026-11-21"})

    def cost(milliseconds: float) -> Cost:
        return Cost({Hook.LOOKUP: milliseconds / 4e3, Hook.METADATA: milliseconds * 3 / 4e3}, 0.001)

    found.rows = [
        Row(Kind.DECODE, 1, {"ours": cost(9), "builtin": cost(8)}),
        Row(Kind.DECODE, 256, {"ours": cost(2), "builtin": cost(8)}),
        Row(Kind.LOADED, 131_072, {"ours": cost(4), "builtin": cost(8)}),
    ]
    found.footprints = {
        "ours": Footprint(4_000_000, 2, 100, 250),
        "ours-128": Footprint(4_000_000, 1, 12, 30),
        "builtin": Footprint(4_000_000, 4, 200, None),
    }
    found.hit_rows = [
        HitRow(
            Order.RANDOM,
            one_offs=True,
            host_part=0.5,
            counts={"ours": HitCount(80, 20, 20), "builtin": HitCount(80, 40, 20)},
        )
    ]
    return found


def test_goals_are_of_the_large_end() -> None:
    assert goals(results()) == {
        "decode, 256: ours takes 0.25 of its rival's time (goal: 0.33)": True,
        "loaded, 131072: ours takes 0.50 of its rival's time (goal: 0.33)": False,
        "random, one-offs, tier 50%: ours hits 25.0%, its rival 50.0%": False,
    }


def test_tables() -> None:
    console = Console(width=80, color_system=None)
    with console.capture() as capture:
        for table in (cost_table, hook_table, footprint_table, hit_table):
            console.print(table(results()))
    lines = [" ".join(line.split()) for line in capture.get().splitlines()]
    assert "decode 256 2.000 0.25 1.00 8.000" in lines
    assert "loaded ours 0.001 0.000 0.003 0.000 0.000" not in lines
    assert "loaded ours 1.000 0.000 3.000 0.000 0.000" in lines
    assert "ours 4,000,000 2.00 0.50 100 0.50 250 -" in lines
    assert "ours-128 4,000,000 1.00 0.25 12 0.06 30 -" in lines
    assert "random, one-offs 50% 25.0% (40%) 50.0% (60%)" in lines
    assert "…" not in "\n".join(lines)
