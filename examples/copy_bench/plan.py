"""The plan of a run: sizes, ways, numbers; and the blocks that each measurement copies."""

from argparse import ArgumentTypeError
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from examples.bench.arguments import option, size, whole
from simple_offload.backends.base import Direction
from simple_offload.transfer import BlockIds, Transfer

KIB, MIB = 1 << 10, 1 << 20

SIZES = tuple(4 * KIB << step for step in range(10))
"""Block sizes in bytes, 4 KiB to 2 MiB."""

WAYS = ("load", "store", "both")
"""Host to device, device to host as in ``Direction``; both at once, by two threads."""


def size_text(num_bytes: int) -> str:
    """Such as "64 KiB"."""
    return f"{num_bytes // KIB} KiB" if num_bytes % MIB else f"{num_bytes // MIB} MiB"


def _block_size(text: str) -> int:
    if (found := size(text)) not in SIZES:
        limits = f"{size_text(SIZES[0])} to {size_text(SIZES[-1])}"
        raise ArgumentTypeError(f"{text!r} is not a power of two from {limits}")
    return found


@dataclass(frozen=True)
class Plan:
    """One run."""

    sizes: tuple[int, ...] = option(
        SIZES, "of a block, ascending", _block_size, metavar="SIZE", nargs="+"
    )
    repeats: int = option(7, "timed copies of each kind, fewer of slow ones", whole(1, 100))
    scale: int = option(1, "copies N times as large, whose start weighs less", whole(1, 8))
    least_pool: int = 1 << 30
    """``pool_bytes`` and ``most_blocks`` without a scale. A multiple of every size."""
    least_blocks: int = 16_384
    both_from: int = 512 * KIB
    """The smallest size that is copied both ways at once."""

    def ways(self, size: int) -> Sequence[str]:
        """The ways in which blocks of ``size`` bytes are copied."""
        return WAYS if size >= self.both_from else WAYS[:2]

    @property
    def pool_bytes(self) -> int:
        """Memory for blocks on each side. No copy has more bytes."""
        return self.scale * self.least_pool

    @property
    def most_blocks(self) -> int:
        """Largest number of blocks in one copy."""
        return self.scale * self.least_blocks


@dataclass(frozen=True)
class Job:
    """Transfers that run at once and share no block, between pools on each side."""

    way: str
    size: int
    """Bytes of a block."""
    transfers: dict[Direction, Transfer]

    @property
    def blocks(self) -> int:
        """Number of blocks copied."""
        return sum(len(transfer.device_blocks) for transfer in self.transfers.values())

    @property
    def num_bytes(self) -> int:
        return self.blocks * self.size


def make_job(way: str, size: int, plan: Plan, *, scattered: bool = True) -> Job:
    """Random blocks to random places, as many as ``plan`` allows; or all blocks, each to its own
    place."""
    random = np.random.default_rng(0)
    num_blocks = plan.pool_bytes // size
    split = {"load": num_blocks, "store": 0, "both": num_blocks // 2}[way]
    halves = {Direction.LOAD: np.arange(split), Direction.STORE: np.arange(split, num_blocks)}

    def choose(blocks: BlockIds) -> BlockIds:
        return random.permutation(blocks)[: plan.most_blocks] if scattered else blocks

    transfers = {
        direction: Transfer(index, choose(blocks), choose(blocks))
        for index, (direction, blocks) in enumerate(halves.items())
        if len(blocks)
    }
    return Job(way, size, transfers)
