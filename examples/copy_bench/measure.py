"""The time of a job, from its submission to the end of its copies; and of small copies on another
stream, which share the bus with it."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from statistics import median

import torch

from examples.copy_bench.arena import Arena
from examples.copy_bench.contenders import Contender
from examples.copy_bench.plan import SMALL_BYTES, Job
from examples.copy_bench.results import Cell, SmallCopies
from simple_offload.backends.base import Direction
from simple_offload.transfer import Transfer

_FEWEST = 3
_ENOUGH_SECONDS = 0.3
"""After this time the fewest repeats are enough."""
_TOO_MANY_SECONDS = 1.0
"""After this time any number is."""
_STARTING = 0.1
"""Share of a large copy's time in which it may still be planned: the bus is idle so long."""

Span = tuple[float, float]
"""Begin and end, in seconds of time.perf_counter."""


def measure(contender: Contender, arena: Arena, job: Job, repeats: int) -> Cell:
    """Copy ``job`` once to warm up, check every byte of that, and time ``repeats`` more.

    ``contender`` is open for the job's size. Its exceptions pass through.
    """
    arena.prepare()
    with _copy_threads(contender, job.transfers) as threads:
        _copy(contender, job, threads)
        path, fault = contender.path(job.transfers), arena.find_fault(job)
        seconds: list[float] = []
        while not _enough(seconds, repeats):
            start, end = _copy(contender, job, threads)
            seconds.append(end - start)
    bandwidth = job.num_bytes / median(seconds) / 1e9
    return Cell(job.num_bytes, median(seconds), len(seconds), bandwidth, fault, path)


def measure_small_copies(
    contender: Contender, arena: Arena, job: Job, repeats: int
) -> Iterator[SmallCopies]:
    """Small copies of each direction, one after another while ``job``, of one direction, is
    copied; for each at most ``repeats`` times.

    ``contender`` is open for the job's size and has copied it before. Its exceptions pass through.
    """
    with _copy_threads(contender, job.transfers) as threads:
        # Torch hands out 32 streams in turn: one asked for now is none of the contender's.
        bystander = Bystander(arena)
        for small in Direction:
            bystander.copy(small)  # the first one has one-time costs
            seconds: list[float] = []
            waits: list[float] = []
            while not _enough(seconds, repeats):
                made: list[Span] = []

                def copy_small(small: Direction = small, made: list[Span] = made) -> None:
                    begin = time.perf_counter()
                    bystander.copy(small)
                    made.append((begin, time.perf_counter()))

                start, end = _copy(contender, job, threads, copy_small)
                seconds.append(end - start)
                waits += _within((start, end), made)
            yield SmallCopies(
                contender=contender.name,
                way=job.way,
                size=job.size,
                repeats=len(seconds),
                gb_per_s=job.num_bytes / median(seconds) / 1e9,
                small_way=small.value,
                made=len(waits),
                median=median(waits) if waits else None,
                longest=max(waits, default=None),
            )


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
        with torch.cuda.stream(self._stream):
            destination.copy_(source, non_blocking=True)
            if self._stream is not None:
                self._stream.record_event().synchronize()


def _within(large: Span, made: Sequence[Span]) -> list[float]:
    """Seconds of the small copies that overlap the large one, even if only at its end."""
    start, end = large
    running = start + _STARTING * (end - start)
    return [stop - begin for begin, stop in made if begin < end and stop >= running]


def _enough(seconds: Sequence[float], repeats: int) -> bool:
    """True if no more copies are needed after those that took ``seconds``."""
    limit = _ENOUGH_SECONDS if len(seconds) >= _FEWEST else _TOO_MANY_SECONDS
    return len(seconds) >= repeats or sum(seconds) >= limit


@contextmanager
def _copy_threads(
    contender: Contender, transfers: Mapping[Direction, Transfer]
) -> Iterator[dict[Direction, ThreadPoolExecutor]]:
    """A thread for each direction, which has entered."""
    with ExitStack() as stack:
        threads = {}
        for direction in transfers:
            thread = ThreadPoolExecutor(1, thread_name_prefix=f"copy-bench-{direction.value}")
            threads[direction] = stack.enter_context(thread)
            thread.submit(contender.enter_thread, direction).result()
        yield threads


def _copy(
    contender: Contender,
    job: Job,
    threads: Mapping[Direction, ThreadPoolExecutor],
    meanwhile: Callable[[], None] | None = None,
) -> Span:
    """From the first submission to the end of the last copy. ``meanwhile`` is called again and
    again until then."""
    start_line = threading.Barrier(len(threads) + 1)

    def timed(direction: Direction) -> Span:
        start_line.wait()
        start = time.perf_counter()
        contender.copy(direction, job.transfers[direction])
        return start, time.perf_counter()

    runs = [thread.submit(timed, direction) for direction, thread in threads.items()]
    start_line.wait()
    while meanwhile is not None and not all(run.done() for run in runs):
        meanwhile()
    starts, ends = zip(*(run.result() for run in runs), strict=True)
    return min(starts), max(ends)
