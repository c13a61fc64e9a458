"""Copies on a CUDA device: every contender at every size, each way."""

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial

import torch

from examples.bench.race import Race
from examples.copy_bench.arena import Arena
from examples.copy_bench.contenders import BackendContender, Contender, ContiguousCopy, PlainTorch
from examples.copy_bench.measure import measure
from examples.copy_bench.plan import Job, make_job, size_text
from examples.copy_bench.results import PEAK, Results, Row
from simple_offload.backends.cuda.backend import CopyPath, CudaBackend

Work = Sequence[tuple[Row, Job]]
"""Of one block size, in each way."""
PATHS: tuple[CopyPath, ...] = ("dma", "kernel", "auto")


def run(results: Results, on_step: Callable[[str], None]) -> None:
    """Fill ``results`` as its plan says, on the current device. ``on_step`` gets the name of every
    step before it begins; ``results`` then holds all measurements so far.

    A contender that fails is not measured any further; the others are.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    # Its own backend pins the pools once for all sizes and paths.
    with closing(CudaBackend("dma")) as memory:
        arena = Arena(results.plan.pool_bytes, device, memory.allocate_host)
        Bench(results, arena, on_step).run()


class Bench:
    """The contenders, and the memory that they copy."""

    def __init__(self, results: Results, arena: Arena, on_step: Callable[[str], None]) -> None:
        ours = [BackendContender(path, partial(CudaBackend, path)) for path in PATHS]
        self._race = Race[Contender]([PlainTorch(), *ours], results, on_step)
        self._arena, self._results, self._plan = arena, results, results.plan

    def run(self) -> None:
        self._race.begin(PEAK)
        peak = self._work(max(self._plan.sizes), scattered=False)
        with self._race.attempt(PEAK):
            self._measure(peak, ContiguousCopy())
        peaks = {row.way: row.contenders for row, _ in peak}
        for size in self._plan.sizes:
            work = self._work(size)
            for row, _ in work:
                row.contenders.update(peaks[row.way])
            self._race.run(size_text(size), partial(self._measure, work))
            self._results.rows += [row for row, _ in work]

    def _work(self, size: int, *, scattered: bool = True) -> Work:
        ways = self._plan.ways(size)
        jobs = [make_job(way, size, self._plan, scattered=scattered) for way in ways]
        return [(Row(job.way, size, job.blocks), job) for job in jobs]

    def _measure(self, work: Work, contender: Contender) -> None:
        """Measure the jobs and add each one's cell to its row."""
        size, name, results = work[0][0].size, contender.name, self._results
        arena, repeats = self._arena, self._plan.repeats
        self._race.step = size_text(size)
        with contender.opened(arena, size):
            for row, job in work:
                self._race.step = f"{size_text(size)}, {job.way}"
                cell, peak = measure(contender, arena, job, repeats), row.contenders.get(PEAK)
                if cell.fault:
                    results.problems[f"{name}, {job.way}, {size_text(size)}"] = cell.fault
                elif peak and not peak.fault:
                    cell = replace(cell, of_peak=cell.gb_per_s / peak.gb_per_s)
                row.contenders[name] = cell
