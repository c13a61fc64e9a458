"""One run: every part, every contender."""

import platform
import time
from collections.abc import Callable, Collection, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import vllm

from examples.scheduler_bench.contenders import CONTENDERS, Contender
from examples.scheduler_bench.costs import run_costs
from examples.scheduler_bench.footprint import run_footprints
from examples.scheduler_bench.plan import Order, Part
from examples.scheduler_bench.race import Race
from examples.scheduler_bench.results import HitCount, HitRow, Results, hit_row_name
from examples.scheduler_bench.turns import Workload, run_turns


def machine() -> dict[str, str]:
    """What the numbers were taken on."""
    return {
        "processor": _processor(),
        "python": platform.python_version(),
        "vllm": vllm.__version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def run(
    contenders: Sequence[Contender],
    parts: Collection[Part],
    results: Results,
    tell: Callable[[str], None],
) -> None:
    """Fill ``results`` as its plan says. ``tell`` hears the name of every step before it is
    taken, and "" at the end; ``results`` then holds all that has been measured."""
    start = time.monotonic()

    def step(name: str) -> None:
        results.seconds = time.monotonic() - start
        tell(name)

    step("start")
    race = Race(contenders)
    results.left_out, results.failures = race.left_out, race.failures
    if Part.COST in parts:
        run_costs(race, results, step)
    if Part.FOOTPRINT in parts:
        step(f"a tier of {results.plan.footprint.tier_blocks} blocks")
        run_footprints(race, results)
    if Part.HITS in parts:
        run_hits(race, results, step)
    step("")


def run_hits(race: Race, results: Results, tell: Callable[[str], None]) -> None:
    """Add hit rates to ``results``."""
    plan = results.plan.hits
    for one_offs in (False, True):
        for order in Order:
            for part in plan.host_parts:
                row = HitRow(order, one_offs, part)
                tell(f"hit rate, {hit_row_name(row)}")
                _count_hits(race, results, row)
                results.hit_rows.append(row)
                for name, count in row.counts.items():
                    if part >= 1 and count.possible and not count.host:
                        results.problems[f"{name}, {hit_row_name(row)}"] = (
                            f"of {count.possible} tokens that a tier of this size holds, none hit"
                        )


def _count_hits(race: Race, results: Results, row: HitRow) -> None:
    plan, delay = results.plan, results.plan.delay
    for seed in range(plan.seed, plan.seed + plan.hits.seeds):
        load = Workload(plan.hits, row.order, row.one_offs, seed)
        counts = race.each(
            hit_row_name(row),
            partial(run_turns, load=load, host_part=row.host_part, delay=delay),
            lambda contender: row.one_offs or not contender.for_one_offs,
        )
        for name, count in counts.items():
            row.counts[name] = row.counts.get(name, HitCount(0, 0, 0)) + count


def named(names: Collection[str]) -> list[Contender]:
    """Contenders by name, in their own order."""
    return [contender for name, contender in CONTENDERS.items() if name in names]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if "model name" in line)
    except (OSError, StopIteration):
        return platform.machine()
