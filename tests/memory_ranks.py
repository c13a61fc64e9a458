"""Ranks that open host memory at once: ``python -m tests.memory_ranks CGROUP RANKS BYTES``.

Each rank is a process of that cgroup. All open a tier of that size. Each prints a line of JSON once
its tier is open or has to wait; it then waits for the end of stdin.
"""

import json
import logging
import multiprocessing
import multiprocessing.connection
import os
import sys
import threading
from collections.abc import Callable, Sequence
from multiprocessing.synchronize import Barrier, Event
from pathlib import Path

import torch

from simple_offload.backends.host import HostBackend
from simple_offload.backends.host_memory import map_memory
from simple_offload.worker.host_pool import HostPool

CHUNK_BYTES = 32 << 20
_BLOCK_BYTES = 1 << 20


class MappedBackend(HostBackend):
    """Allocates memory as the CUDA backend does, but pins none."""

    chunk_bytes = CHUNK_BYTES

    def allocate_host(self, num_bytes: int) -> torch.Tensor:
        return map_memory(num_bytes)

    def __init__(self, first: Callable[[], object]) -> None:
        super().__init__()
        self._first = first

    def add_host_chunk(self, regions: Sequence[torch.Tensor]) -> None:
        if not self._host:
            self._first()
        self._host.extend(region.numpy() for region in regions)


class LogWatcher(logging.Handler):
    """Sets an event when the pool logs that it is open or has to wait."""

    def __init__(self) -> None:
        super().__init__()
        self.event = threading.Event()
        self.message = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.message = record.getMessage()
        self.event.set()


def open_tier(group: Path, num_bytes: int, started: Barrier, stop: Event) -> None:
    """One rank. ``started`` is passed when every rank has its first chunk."""
    (group / "cgroup.procs").write_text(str(os.getpid()))
    watcher = LogWatcher()
    logging.getLogger("vllm.simple_offload.worker.host_pool").addHandler(watcher)
    pool = HostPool(MappedBackend(started.wait), [_BLOCK_BYTES], num_bytes // _BLOCK_BYTES)
    pool.open()
    watcher.event.wait()
    sys.stdout.write(json.dumps({"num_bytes": pool.nbytes, "message": watcher.message}) + "\n")
    sys.stdout.flush()
    stop.wait()


def main(group: Path, num_ranks: int, num_bytes: int) -> int:
    """Returns the number of ranks that did not end by themselves."""
    # Forked, so that the group is not charged for the interpreter's own memory.
    context = multiprocessing.get_context("fork")
    started, stop = context.Barrier(num_ranks), context.Event()
    ranks = [
        context.Process(target=open_tier, args=(group, num_bytes, started, stop))
        for _ in range(num_ranks)
    ]
    for rank in ranks:
        rank.start()
    # The others would wait for a killed rank.
    sentinels = [rank.sentinel for rank in ranks]
    stdin = sys.stdin.fileno()
    if stdin not in multiprocessing.connection.wait([stdin, *sentinels]):
        for rank in ranks:
            rank.kill()
    stop.set()
    for rank in ranks:
        rank.join()
    return sum(rank.exitcode != 0 for rank in ranks)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
