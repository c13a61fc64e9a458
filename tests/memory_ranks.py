"""Ranks that open host memory at once: ``python -m tests.memory_ranks CGROUP RANKS BYTES``.

Each rank is a process of that cgroup, and opens a tier of that size until it is open or has to
wait. Prints what all of them have opened as JSON. Fails if one of them ends before.
"""

import json
import logging
import logging.handlers
import multiprocessing
import os
import queue
import sys
from collections.abc import Sequence
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import torch

from simple_offload.backends.host import HostBackend
from simple_offload.backends.host_memory import map_memory
from simple_offload.worker.host_pool import HostPool

CHUNK_BYTES = 32 << 20
_BLOCK_BYTES = 1 << 20
_PATIENCE_SECONDS = 60.0


class MappedBackend(HostBackend):
    """Allocates memory as the CUDA backend does, but pins none. The second chunk waits until all
    ranks have their first."""

    chunk_bytes = CHUNK_BYTES

    def __init__(self, started: Barrier) -> None:
        super().__init__()
        self._started = started

    def allocate_host(self, num_bytes: int) -> torch.Tensor:
        return map_memory(num_bytes)

    def add_host_chunk(self, regions: Sequence[torch.Tensor]) -> None:
        if not self._host:
            self._started.wait(_PATIENCE_SECONDS)
        self._host.extend(region.numpy() for region in regions)


def open_tier(group: Path, num_bytes: int, started: Barrier, reports: "Queue[Any]") -> None:
    """One rank. It ends when it is killed."""
    (group / "cgroup.procs").write_text(str(os.getpid()))
    lines: queue.SimpleQueue[logging.LogRecord] = queue.SimpleQueue()
    handler = logging.handlers.QueueHandler(lines)
    logging.getLogger("vllm.simple_offload.worker.host_pool").addHandler(handler)
    pool = HostPool(MappedBackend(started), [_BLOCK_BYTES], num_bytes // _BLOCK_BYTES)
    pool.open()
    message = lines.get().getMessage()
    reports.put({"num_bytes": pool.nbytes, "message": message})
    multiprocessing.Event().wait()


def main(group: Path, num_ranks: int, num_bytes: int) -> None:
    # Forked, so that the group is not charged for the interpreter's own memory.
    context = multiprocessing.get_context("fork")
    started, reports = context.Barrier(num_ranks), context.Queue()
    ranks = [
        context.Process(target=open_tier, args=(group, num_bytes, started, reports))
        for _ in range(num_ranks)
    ]
    for rank in ranks:
        rank.start()
    try:
        opened = [reports.get(timeout=_PATIENCE_SECONDS) for _ in ranks]
        assert all(rank.is_alive() for rank in ranks), "ranks have been killed"
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()
    sys.stdout.write(json.dumps(opened))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
