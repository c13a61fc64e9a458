"""The plan of a run: sizes, ways, numbers; and the blocks that each measurement copies."""

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


@dataclass(frozen=True)
class Plan:
    """One run."""

    sizes: tuple[int, ...] = option(
        SIZES, "of a block: powers of two", size, metavar="SIZE", nargs="+", choices=SIZES
    )
    repeats: int = option(7, "timed copies of each kind", whole(1, 100))
    scale: int = option(1, "copies N times as large, whose start weighs less", whole(1, 8))
    pool_bytes: int = 1 << 30
    """Memory for blocks on each side, over ``scale``. No copy has more bytes. A multiple of every
    size."""
    most_blocks: int = 16_384
    """Largest number of blocks in one copy, over ``scale``."""


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
    num_blocks = plan.scale * plan.pool_bytes // size
    split = {"load": num_blocks, "store": 0, "both": num_blocks // 2}[way]
    halves = {Direction.LOAD: np.arange(split), Direction.STORE: np.arange(split, num_blocks)}

    def choose(blocks: BlockIds) -> BlockIds:
        if not scattered:
            return blocks
        return random.permutation(blocks)[: plan.scale * plan.most_blocks]

    transfers = {
        direction: Transfer(index, choose(blocks), choose(blocks))
        for index, (direction, blocks) in enumerate(halves.items())
        if len(blocks)
    }
    return Job(way, size, transfers)
