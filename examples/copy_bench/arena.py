"""Arena: the memory to copy, and the check of the bytes that arrive."""

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import torch

from examples.copy_bench.plan import Job
from simple_offload.backends.base import Direction
from simple_offload.transfer import BlockIds

_POISON = 0x5A5A5A5A5A5A5A5A
_CHECKED_AT_ONCE = 64 << 20  # bytes


class Arena:
    """Pools of ``pool_bytes`` on both sides, and as much again on each for staging.

    With the bytes that everything is checked against, that is three times ``pool_bytes`` on the
    device and twice on the host. Contenders may write all tensors but ``truth``
    between ``prepare`` and ``find_fault``.
    """

    def __init__(
        self,
        pool_bytes: int,
        device: torch.device,
        allocate_host: Callable[[int], torch.Tensor],
    ) -> None:
        """``allocate_host(n)`` gives host memory that the device can reach, int8 ``[n]``."""
        self.device, self.device_staging, self.truth = (
            torch.empty(pool_bytes, dtype=torch.int8, device=device) for _ in range(3)
        )
        self.host, self.host_staging = (allocate_host(pool_bytes) for _ in range(2))
        generator = torch.Generator(device).manual_seed(0)
        self.truth.random_(-128, 128, generator=generator)

    def prepare(self, job: Job) -> None:
        """Copy ``truth`` to the blocks that ``job`` reads, and poison those that it may write.
        Returns when the device has done so."""
        truth, device = rows(self.truth, job.size), rows(self.device, job.size)
        staging, host = rows(self.device_staging, job.size), rows(self.host, job.size)
        split = job.split
        staging[:split] = truth[:split]
        staging[split:] = _POISON
        host.copy_(staging)
        device[:split] = _POISON
        device[split:] = truth[split:]
        self._synchronize()

    def find_fault(self, job: Job) -> str | None:
        """Describe the first fault after a copy of ``job``: a destination without its source's
        bytes, or a written block that is no destination. Reads every byte of both pools;
        overwrites the device's staging memory."""
        loads, stores = (job.transfers.get(direction) for direction in Direction)
        on_device, on_host = (np.arange(job.num_blocks) for _ in range(2))
        on_device[: job.split] = -1
        on_host[job.split :] = -1
        if loads is not None:
            on_device[loads.device_blocks] = loads.host_blocks
        if stores is not None:
            on_host[stores.host_blocks] = stores.device_blocks
        device, staging = rows(self.device, job.size), rows(self.device_staging, job.size)
        fault = self._find_wrong_block("device", device, on_device)
        staging.copy_(rows(self.host, job.size))
        fault = fault or self._find_wrong_block("host", staging, on_host)
        self._synchronize()
        return fault

    def _find_wrong_block(self, side: str, blocks: torch.Tensor, wanted: BlockIds) -> str | None:
        """Block b has to hold block ``wanted[b]`` of ``truth``; -1: poison."""
        num_blocks, words = blocks.shape
        truth = rows(self.truth, 8 * words)
        step = max(1, _CHECKED_AT_ONCE // (8 * words))
        bounds = [*range(0, num_blocks, step), num_blocks]
        wrong: list[int] = []
        for start, stop in pairwise(bounds):
            sources = torch.from_numpy(wanted[start:stop]).to(blocks.device)
            expected = truth.index_select(0, sources.clamp(min=0))
            expected[sources < 0] = _POISON
            differs = (blocks[start:stop] != expected).any(dim=1)
            wrong += (start + differs.nonzero().flatten()).tolist()
        if not wrong:
            return None
        source = wanted[wrong[0]]
        fault = "was to stay as it was" if source < 0 else f"has not the bytes of block {source}"
        return (
            f"{len(wrong)} of {num_blocks} {side} blocks are wrong; the first, {wrong[0]}, {fault}"
        )

    def _synchronize(self) -> None:
        if self.device.is_cuda:
            torch.cuda.synchronize(self.device.device)


def rows(pool: torch.Tensor, size: int) -> torch.Tensor:
    """``pool`` as blocks of ``size`` bytes, int64 ``[num_blocks, size / 8]``: torch moves words
    several times as fast as bytes."""
    return pool.view(torch.int64).view(-1, size // 8)
