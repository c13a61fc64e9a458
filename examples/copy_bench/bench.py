"""One run: every contender at every size, each way."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from examples.bench.race import Race
from examples.copy_bench.arena import Arena
from examples.copy_bench.bystander import WATCHED, measure_small_copies
from examples.copy_bench.contenders import Contender
from examples.copy_bench.job import Job, contiguous, scattered
from examples.copy_bench.measure import measure
from examples.copy_bench.plan import Way, size_text
from examples.copy_bench.results import AUTO, Cell, Results, Row, paths_by_kernel


@dataclass(frozen=True)
class Rig:
    """The contenders and the memory that they copy."""

    arena: Arena
    peak: Contender
    contenders: Sequence[Contender]
    machine: dict[str, Any]
    """Device, driver, versions, date: part of the results."""


def run(rig: Rig, results: Results, on_step: Callable[[str], None]) -> None:
    """Fill ``results`` as its plan says. ``on_step`` gets the name of every step before it begins,
    and "done" at the end; ``results`` then holds all measurements so far.

    A contender that fails is not measured any further; the others are.
    """
    start = time.monotonic()
    plan = results.plan
    race = Race(rig.contenders)
    results.left_out, results.failures = race.left_out, race.failures

    def begin(step: str) -> None:
        results.seconds = time.monotonic() - start
        on_step(step)

    begin("peak")
    jobs = [contiguous(way, plan) for way in plan.all_ways]
    with race.attempt(rig.peak.name):
        _measure(rig.peak, race, rig.arena, jobs, results, results.peaks.__setitem__)
    for size in plan.sizes:
        begin(size_text(size))
        _measure_size(size, race, rig, results)
    begin("done")


def _measure_size(size: int, race: Race[Contender], rig: Rig, results: Results) -> None:
    """Add the rows of one block size."""
    plan = results.plan
    jobs = [scattered(way, size, plan) for way in plan.ways(size)]
    rows = {job.way: Row(job.way, size, job.blocks) for job in jobs}
    results.rows += rows.values()

    def measure_one(contender: Contender) -> None:
        def keep(way: Way, cell: Cell) -> None:
            rows[way].cells[contender.name] = cell

        _measure(contender, race, rig.arena, jobs, results, keep)

    race.run(size_text(size), measure_one)
    by_kernel = paths_by_kernel(results.calibration.get(size, ""))
    for row in rows.values():
        row.by_kernel = {
            direction: sizes[size]
            for direction, sizes in by_kernel.items()
            if size in sizes and row.way in (Way(direction), Way.BOTH)
        }


def _measure(
    contender: Contender,
    race: Race[Contender],
    arena: Arena,
    jobs: Sequence[Job],
    results: Results,
    keep: Callable[[Way, Cell], None],
) -> None:
    """Measure ``jobs``, all of one size; ``keep`` gets each job's cell as soon as it is there."""
    size, repeats = jobs[0].size, results.plan.repeats
    race.step = size_text(size)
    try:
        contender.open(arena, size)
        if contender.name == AUTO:
            results.calibration[size] = contender.calibration()
        for job in jobs:
            race.step = f"{size_text(size)}, {job.way.value}"
            keep(job.way, measure(contender, arena, job, repeats))
        if contender.name in WATCHED and size == max(results.plan.sizes):
            race.step = f"{size_text(size)}, small copies beside it"
            for job in (job for job in jobs if job.way is not Way.BOTH):
                results.small_copies += measure_small_copies(contender, arena, job, repeats)
    finally:
        contender.close()
