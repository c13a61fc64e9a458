"""The plan of a run: sizes, ways, numbers; and the blocks that each measurement copies."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from simple_offload.backends.base import Direction
from simple_offload.transfer import BlockIds, Transfer

KIB, MIB = 1 << 10, 1 << 20

SIZES = tuple(4 * KIB << step for step in range(10))
"""Block sizes in bytes, 4 KiB to 2 MiB."""


WAYS = ("load", "store", "both")
"""Host to device, device to host as in ``Direction``; both at once, by two threads."""


@dataclass(frozen=True)
class Plan:
    """One run. Sizes are in bytes, ascending."""

    sizes: tuple[int, ...] = SIZES
    repeats: int = 7
    """Timed copies of each kind, whose median counts; slow ones are repeated less often."""
    pool_bytes: int = 1 << 30
    """Memory for blocks on each side; a multiple of every size. No copy has more bytes."""
    most_blocks: int = 16_384
    """Largest number of blocks in one copy."""
    both_from: int = 512 * KIB
    """The smallest size that is copied both ways at once."""

    def ways(self, size: int) -> Sequence[str]:
        """The ways in which blocks of ``size`` bytes are copied."""
        return WAYS if size >= self.both_from else WAYS[:2]

    def scaled(self, factor: int) -> "Plan":
        """The same with copies ``factor`` times as large, whose start weighs less."""
        return replace(
            self, pool_bytes=factor * self.pool_bytes, most_blocks=factor * self.most_blocks
        )


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


def size_text(num_bytes: int) -> str:
    """Such as "64 KiB"."""
    return f"{num_bytes // KIB} KiB" if num_bytes % MIB else f"{num_bytes // MIB} MiB"
