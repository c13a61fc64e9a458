"""The time of a job, from its submission to the end of its copies."""

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from statistics import median

from examples.copy_bench.arena import Arena
from examples.copy_bench.contenders import Contender
from examples.copy_bench.plan import Job
from examples.copy_bench.results import Cell
from simple_offload.backends.base import Direction
from simple_offload.transfer import Transfer

_FEWEST = 3
_ENOUGH_SECONDS = 0.3
"""After this time the fewest repeats are enough."""
_TOO_MANY_SECONDS = 1.0
"""After this time any number is."""


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
            seconds.append(_copy(contender, job, threads))
    bandwidth = job.num_bytes / median(seconds) / 1e9
    return Cell(job.num_bytes, median(seconds), len(seconds), bandwidth, fault, path)


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
