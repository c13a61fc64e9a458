"""Copies on a CUDA device: every contender at every size, each way."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from statistics import median

import torch

from examples.bench.race import Race
from examples.copy_bench.arena import Arena
from examples.copy_bench.contenders import BackendContender, Contender, ContiguousCopy, PlainTorch
from examples.copy_bench.plan import WAYS, Job, make_job, size_text
from examples.copy_bench.results import PEAK, Cell, Results, Row
from simple_offload.backends.base import Direction
from simple_offload.backends.cuda.backend import CopyPath, CudaBackend
from simple_offload.transfer import Transfer

PATHS: tuple[CopyPath, ...] = ("dma", "kernel", "auto")


def run(results: Results, on_step: Callable[[str], None]) -> None:
    """Fill ``results`` as its plan says, on the current device. ``on_step`` gets the name of every
    step before it begins; ``results`` then holds all measurements so far.

    A contender that fails is not measured any further; the others are.
    """
    plan, device = results.plan, torch.device("cuda", torch.cuda.current_device())

    def measure_all(jobs: Mapping[str, Job], rows: Mapping[str, Row], contender: Contender) -> None:
        """Add the contender's cell of each way."""
        size = next(iter(jobs.values())).size
        with contender.opened(arena, size):
            for way, job in jobs.items():
                cell = measure(contender, arena, job, plan.repeats)
                rows[way].contenders[contender.name] = cell
                if cell.fault:
                    results.problems[f"{contender.name}, {way}, {size_text(size)}"] = cell.fault

    # Its own backend pins the pools once for all sizes and paths.
    with closing(CudaBackend("dma")) as memory:
        arena = Arena(plan.scale * plan.pool_bytes, device, memory.allocate_host)
        peaks = {way: Row(way, 0, 0) for way in WAYS}
        jobs = {way: make_job(way, max(plan.sizes), plan, scattered=False) for way in WAYS}
        peak = Race[Contender]([ContiguousCopy()], results, on_step)
        peak.run(PEAK, partial(measure_all, jobs, peaks))
        ours = [BackendContender(path, partial(CudaBackend, path)) for path in PATHS]
        race = Race[Contender]([PlainTorch(), *ours], results, on_step)
        for size in plan.sizes:
            jobs = {way: make_job(way, size, plan) for way in WAYS}
            rows = {
                way: Row(way, size, job.blocks, dict(peaks[way].contenders))
                for way, job in jobs.items()
            }
            race.run(size_text(size), partial(measure_all, jobs, rows))
            results.rows += rows.values()


def measure(contender: Contender, arena: Arena, job: Job, repeats: int) -> Cell:
    """Copy ``job`` once to warm up, check every byte of that, and time ``repeats`` more.

    ``contender`` is open for the job's size. Its exceptions pass through.
    """
    arena.prepare()
    with _copy_threads(contender, job.transfers) as threads:
        _copy(contender, job, threads)
        path, fault = contender.path(job.transfers), arena.find_fault(job)
        seconds = median(_copy(contender, job, threads) for _ in range(repeats))
    return Cell(job.num_bytes, seconds, job.num_bytes / seconds / 1e9, fault, path)


@contextmanager
def _copy_threads(
    contender: Contender, transfers: Mapping[Direction, Transfer]
) -> Iterator[dict[Direction, ThreadPoolExecutor]]:
    """A thread for each direction, which has entered."""
    with ExitStack() as stack:
        threads = {}
        for direction in transfers:
            threads[direction] = stack.enter_context(ThreadPoolExecutor(1))
            threads[direction].submit(contender.enter_thread, direction).result()
        yield threads


def _copy(contender: Contender, job: Job, threads: Mapping[Direction, ThreadPoolExecutor]) -> float:
    """Seconds from the first submission to the end of the last copy."""
    start_line = threading.Barrier(len(threads))

    def timed(direction: Direction) -> tuple[float, float]:
        start_line.wait()
        start = time.perf_counter()
        contender.copy(direction, job.transfers[direction])
        return start, time.perf_counter()

    runs = [thread.submit(timed, direction) for direction, thread in threads.items()]
    spans = [run.result() for run in runs]
    return max(end for _, end in spans) - min(start for start, _ in spans)
