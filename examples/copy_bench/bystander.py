"""Bystander: small copies on another stream, which share the bus with large ones."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from functools import partial
from statistics import median

import torch

from examples.copy_bench.arena import Arena
from examples.copy_bench.contenders import Contender
from examples.copy_bench.job import Job
from examples.copy_bench.measure import copy_threads, enough
from examples.copy_bench.plan import KIB, Way
from examples.copy_bench.results import AUTO, PEAK, SmallCopies
from simple_offload.backends.base import Direction

SMALL_BYTES = 4 * KIB

WATCHED = (PEAK, "dma", "kernel", AUTO)
"""Contenders beside which small copies are made. Plain torch spends most of its time on the host;
the peak shows the effect of one large copy of torch."""

_STARTING = 0.1
"""Share of a large copy's time in which it may still be planned: the bus is idle so long."""

Span = tuple[float, float]
"""Begin and end, in seconds of time.perf_counter."""


class Bystander:
    """Makes small copies between the staging memories of both sides, on a CUDA stream of its
    own, as vLLM copies the tokens that a step has sampled. Without a CUDA device there is no
    stream, and they are plain copies in host memory."""

    def __init__(self, arena: Arena) -> None:
        self._device = arena.device_staging[:SMALL_BYTES]
        self._host = arena.host_staging[:SMALL_BYTES]
        self._stream = torch.cuda.Stream(self._device.device) if self._device.is_cuda else None

    def copy(self, direction: Direction) -> None:
        """Make one copy; return when it has ended."""
        source, destination = self._device, self._host
        if direction is Direction.LOAD:
            source, destination = destination, source
        if self._stream is None:
            destination.copy_(source)
            return
        event = torch.cuda.Event()
        with torch.cuda.stream(self._stream):
            destination.copy_(source, non_blocking=True)
            event.record(self._stream)
        event.synchronize()


def measure_small_copies(
    contender: Contender, arena: Arena, job: Job, repeats: int
) -> Iterator[SmallCopies]:
    """Small copies of each direction, one after another while ``job``, of one direction, is
    copied; for each at most ``repeats`` times.

    ``contender`` is open for the job's size and has copied it before. Its exceptions pass through.
    """
    ((direction, transfer),) = job.transfers.items()
    with copy_threads(contender, job.transfers) as threads:
        # Torch hands out 32 streams in turn: one asked for now is none of the contender's.
        bystander = Bystander(arena)
        large_copy = partial(contender.copy, direction, transfer)
        for small in Direction:
            small_copy = partial(bystander.copy, small)
            small_copy()  # the first one has one-time costs
            seconds: list[float] = []
            waits: list[float] = []
            while not enough(seconds, repeats):
                (start, end), made = _copy_beside(threads[direction], large_copy, small_copy)
                seconds.append(end - start)
                waits += _within((start, end), made)
            yield SmallCopies(
                contender=contender.name,
                way=job.way,
                size=job.size,
                repeats=len(seconds),
                gb_per_s=job.num_bytes / median(seconds) / 1e9,
                small_way=Way(small.value),
                small_bytes=SMALL_BYTES,
                made=len(waits),
                median=median(waits) if waits else None,
                longest=max(waits, default=None),
            )


def _copy_beside(
    thread: Executor, large_copy: Callable[[], None], small_copy: Callable[[], None]
) -> tuple[Span, list[Span]]:
    """The times of the large copy, on ``thread``, and of each small one, on the calling thread."""
    started = threading.Event()

    def copy() -> Span:
        start = time.perf_counter()
        started.set()
        large_copy()
        return start, time.perf_counter()

    large = thread.submit(copy)
    started.wait()
    made = []
    while not large.done():
        start = time.perf_counter()
        small_copy()
        made.append((start, time.perf_counter()))
    return large.result(), made


def _within(large: Span, made: Sequence[Span]) -> list[float]:
    """Seconds of the small copies that overlap the large one, even if only at its end."""
    start, end = large
    running = start + _STARTING * (end - start)
    return [stop - begin for begin, stop in made if begin < end and stop >= running]
