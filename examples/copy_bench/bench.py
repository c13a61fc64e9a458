"""One run on a CUDA device: every contender at every size, each way."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from examples.bench.race import Race
from examples.bench.results_file import gpu_driver, machine
from examples.copy_bench.arena import Arena
from examples.copy_bench.contenders import BackendContender, Contender, ContiguousCopy, PlainTorch
from examples.copy_bench.measure import measure, measure_small_copies
from examples.copy_bench.plan import Job, Plan, Way, make_job, size_text
from examples.copy_bench.results import AUTO, PEAK, Cell, Results, Row, paths_by_kernel
from simple_offload.backends.cuda.backend import CopyPath, CudaBackend

WATCHED = (PEAK, "dma", "kernel", AUTO)
"""Contenders beside which small copies are made. Plain torch spends most of its time on the host;
the peak shows the effect of one large copy of torch."""


@dataclass(frozen=True)
class Rig:
    """The contenders and the memory that they copy."""

    arena: Arena
    peak: Contender
    contenders: Sequence[Contender]
    machine: dict[str, Any]
    """Device, driver, versions, date: part of the results."""


@contextmanager
def cuda_rig(plan: Plan) -> Iterator[Rig]:
    """The current device, and pinned memory until the end."""
    device = torch.device("cuda", torch.cuda.current_device())
    # Its own backend pins the pools once for all sizes and paths.
    memory = CudaBackend("dma")
    try:
        arena = Arena(plan.pool_bytes, device, memory.allocate_host)
        paths: tuple[CopyPath, ...] = ("dma", "kernel", "auto")
        facts = {
            "device": torch.cuda.get_device_name(device),
            "driver": gpu_driver(),
            "cuda": str(torch.version.cuda),
            **machine(),
        }
        ours = [BackendContender(path, partial(CudaBackend, path)) for path in paths]
        yield Rig(arena, ContiguousCopy(), [PlainTorch(), *ours], facts)
    finally:
        memory.close()


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
    largest = max(plan.sizes)
    jobs = [make_job(way, largest, plan, scattered=False) for way in plan.ways(largest)]
    with race.attempt(rig.peak.name):
        _measure(rig.peak, race, rig.arena, jobs, results, results.peak.__setitem__)
    for size in plan.sizes:
        begin(size_text(size))
        _measure_size(size, race, rig.arena, results)
    begin("done")


def _measure_size(size: int, race: Race[Contender], arena: Arena, results: Results) -> None:
    """Add the rows of one block size."""
    plan = results.plan
    jobs = [make_job(way, size, plan) for way in plan.ways(size)]
    rows = {job.way: Row(job.way, size, job.blocks) for job in jobs}
    results.rows += rows.values()

    def measure_one(contender: Contender) -> None:
        def keep(way: Way, cell: Cell) -> None:
            rows[way].contenders[contender.name] = cell

        _measure(contender, race, arena, jobs, results, keep)

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
    with contender.opened(arena, size):
        if contender.name == AUTO:
            results.calibration[size] = contender.calibration()
        for job in jobs:
            race.step = f"{size_text(size)}, {job.way.value}"
            keep(job.way, measure(contender, arena, job, repeats))
        if contender.name in WATCHED and size == max(results.plan.sizes):
            race.step = f"{size_text(size)}, small copies beside it"
            for job in (job for job in jobs if job.way is not Way.BOTH):
                results.small_copies += measure_small_copies(contender, arena, job, repeats)
