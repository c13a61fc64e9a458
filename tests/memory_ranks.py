"""A rank that opens host memory in a cgroup: ``python -m tests.memory_ranks CGROUP BYTES``.

It prints a line after its first chunk and waits for one. It prints a report as JSON when its tier
is open or has to wait, and then keeps the memory until it is killed."""

import json
import logging
import logging.handlers
import os
import queue
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from simple_offload.backends.host import HostBackend
from simple_offload.backends.host_memory import map_memory
from simple_offload.worker.host_pool import HostPool

CHUNK_BYTES = 32 << 20
_BLOCK_BYTES = 1 << 20
_PATIENCE_SECONDS = 60.0


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


class MappedBackend(HostBackend):
    """Allocates memory as the CUDA backend does, but pins none."""

    chunk_bytes = CHUNK_BYTES

    def allocate_host(self, num_bytes: int) -> torch.Tensor:
        return map_memory(num_bytes)

    def add_host_chunk(self, regions: Sequence[torch.Tensor]) -> None:
        if not self._host:
            _say("the first chunk")
            sys.stdin.readline()
        self._host.extend(region.numpy() for region in regions)


def main(group: Path, num_bytes: int) -> None:
    (group / "cgroup.procs").write_text(str(os.getpid()))
    lines: queue.SimpleQueue[logging.LogRecord] = queue.SimpleQueue()
    handler = logging.handlers.QueueHandler(lines)
    logging.getLogger("vllm.simple_offload.worker.host_pool").addHandler(handler)
    pool = HostPool(MappedBackend(), [_BLOCK_BYTES], num_bytes // _BLOCK_BYTES)
    pool.open()
    message = lines.get(timeout=_PATIENCE_SECONDS).getMessage()
    _say(json.dumps({"num_bytes": pool.nbytes, "message": message}))
    sys.stdin.readline()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
