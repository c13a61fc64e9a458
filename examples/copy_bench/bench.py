"""One run: every contender at every size, each way."""

import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from examples.copy_bench.arena import Arena
from examples.copy_bench.bystander import WATCHED, measure_small_copies
from examples.copy_bench.contenders import Contender
from examples.copy_bench.job import Job, contiguous, scattered
from examples.copy_bench.measure import measure
from examples.copy_bench.plan import Way, size_text
from examples.copy_bench.results import AUTO, Cell, Results, Row, paths_by_kernel
from simple_offload.config import ConfigError


@dataclass(frozen=True)
class Rig:
    """What is measured, and where."""

    arena: Arena
    peak: Contender
    contenders: Sequence[Contender]
    machine: dict[str, str]
    """Device, driver, versions, date: part of the results."""


def run(rig: Rig, results: Results, tell: Callable[[str], None]) -> None:
    """Fill ``results`` as its plan says. ``tell`` hears the name of every step before it is
    taken, and "" at the end; ``results`` then holds all that has been measured.

    A contender that fails is not measured any further; the others are.
    """
    start = time.monotonic()
    plan = results.plan

    def step(name: str) -> None:
        results.seconds = time.monotonic() - start
        tell(name)

    step("peak")
    results.peaks = _measure(
        rig.peak, rig, [contiguous(way, plan) for way in plan.all_ways], results
    )
    for size in plan.sizes:
        step(size_text(size))
        jobs = [scattered(way, size, plan) for way in plan.ways(size)]
        rows = {job.way: Row(job.way, size, job.blocks) for job in jobs}
        results.rows += rows.values()
        for contender in rig.contenders:
            for way, cell in _measure(contender, rig, jobs, results).items():
                rows[way].cells[contender.name] = cell
        by_kernel = paths_by_kernel(results.calibration.get(size, ""))
        for row in rows.values():
            directions = [way.value for way in (Way.LOAD, Way.STORE) if row.way in (way, Way.BOTH)]
            row.by_kernel = {
                direction: by_kernel[direction][size]
                for direction in directions
                if size in by_kernel.get(direction, {})
            }
    step("")


def _measure(
    contender: Contender, rig: Rig, jobs: Sequence[Job], results: Results
) -> dict[Way, Cell]:
    """What can be measured of ``jobs``, all of one size; ``results`` hears why something cannot."""
    cells: dict[Way, Cell] = {}
    if contender.name in (*results.left_out, *results.failures):
        return cells
    step = size_text(jobs[0].size)
    try:
        try:
            contender.open(rig.arena, jobs[0].size)
            if contender.name == AUTO:
                results.calibration[jobs[0].size] = contender.calibration()
            for job in jobs:
                step = f"{size_text(job.size)}, {job.way.value}"
                cells[job.way] = measure(contender, rig.arena, job, results.plan.repeats)
            if contender.name in WATCHED and jobs[0].size == max(results.plan.sizes):
                step = f"{size_text(jobs[0].size)}, small copies beside it"
                for job in (job for job in jobs if job.way is not Way.BOTH):
                    results.small_copies += measure_small_copies(
                        contender, rig.arena, job, results.plan.repeats
                    )
        finally:
            contender.close()
    except ConfigError as error:
        results.left_out[contender.name] = str(error)
    except Exception as error:  # noqa: BLE001 - whatever one fails with, the others can be measured
        traceback.print_exc()
        results.failures[contender.name] = f"{step}: {type(error).__name__}: {error}"
    return cells
