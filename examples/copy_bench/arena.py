"""Arena: the memory to copy, and the check of the bytes that arrive."""

from collections.abc import Callable

import torch

from examples.copy_bench.plan import Job
from simple_offload.backends.base import Direction


class Arena:
    """Pools of ``pool_bytes`` on both sides, and as much again on each for staging.

    With the bytes that everything is checked against, that is three times ``pool_bytes`` on the
    device, twice that during a check, and twice ``pool_bytes`` on the host. Contenders may write
    all tensors but ``truth`` between ``prepare`` and ``find_fault``.
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

    def prepare(self) -> None:
        """Fill the device's pool with ``truth`` and the host's with its complement. Returns when
        the device has done so."""
        self.device.copy_(self.truth)
        self.host.copy_(torch.bitwise_not(self.truth, out=self.device_staging))
        if self.device.is_cuda:
            torch.cuda.synchronize(self.device.device)

    def find_fault(self, job: Job) -> str | None:
        """Describe the first fault after a copy of ``job``: a destination without its source's
        bytes, or a written block that is no destination. Reads every byte of both pools;
        overwrites the device's staging memory."""
        truth = rows(self.truth, job.size)
        host = rows(self.device_staging, job.size).copy_(rows(self.host, job.size))
        for direction, side, found, expected in (
            (Direction.LOAD, "device", rows(self.device, job.size), truth.clone()),
            (Direction.STORE, "host", host, ~truth),
        ):
            sources: dict[int, int] = {}
            if (transfer := job.transfers.get(direction)) is not None:
                pairs = [transfer.device_blocks, transfer.host_blocks]
                ends, starts = pairs if direction is Direction.LOAD else pairs[::-1]
                copied = truth[torch.from_numpy(starts)]
                expected[torch.from_numpy(ends)] = ~copied if side == "device" else copied
                sources = dict(zip(ends.tolist(), starts.tolist(), strict=True))
            wrong = (found != expected).any(dim=1).nonzero().flatten().tolist()
            if wrong:
                count, first = f"{len(wrong)} of {len(found)} {side} blocks", wrong[0]
                source = sources.get(first)
                what = f"has not the bytes of block {source}"
                if source is None:
                    what = "was to stay as it was"
                return f"{count} are wrong; the first, {first}, {what}"
        return None


def rows(pool: torch.Tensor, size: int) -> torch.Tensor:
    """``pool`` as blocks of ``size`` bytes, int64 ``[num_blocks, size / 8]``: torch moves words
    several times as fast as bytes."""
    return pool.view(torch.int64).view(-1, size // 8)
