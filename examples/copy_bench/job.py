"""Job: which blocks one measurement copies."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from examples.copy_bench.plan import Plan, Way
from simple_offload.backends.base import Direction
from simple_offload.metadata import BlockIds, Transfer


@dataclass(frozen=True)
class Job:
    """Transfers that run at once, between pools of ``num_blocks`` blocks on each side.

    Loads are among the blocks below ``split``, stores among the others, on both sides.
    """

    way: Way
    size: int
    """Bytes of a block."""
    num_blocks: int
    split: int
    transfers: dict[Direction, Transfer]

    @property
    def blocks(self) -> int:
        """Number of blocks copied."""
        return sum(len(transfer.device_blocks) for transfer in self.transfers.values())

    @property
    def num_bytes(self) -> int:
        return self.blocks * self.size


def scattered(way: Way, size: int, plan: Plan) -> Job:
    """Random blocks to random places, as many as ``plan`` allows."""
    random = np.random.default_rng(0)

    def choose(blocks: BlockIds) -> BlockIds:
        return random.permutation(blocks)[: plan.most_blocks]

    return _job(way, size, plan, choose)


def contiguous(way: Way, plan: Plan) -> Job:
    """All blocks of the largest size, each to its own place."""
    return _job(way, max(plan.sizes), plan, lambda blocks: blocks)


def _job(way: Way, size: int, plan: Plan, choose: Callable[[BlockIds], BlockIds]) -> Job:
    """``choose`` picks the blocks of each side of each transfer."""
    num_blocks = plan.pool_bytes // size
    split = {Way.LOAD: num_blocks, Way.STORE: 0, Way.BOTH: num_blocks // 2}[way]
    halves = {Direction.LOAD: np.arange(split), Direction.STORE: np.arange(split, num_blocks)}
    transfers = {
        direction: Transfer(index, choose(blocks), choose(blocks))
        for index, (direction, blocks) in enumerate(halves.items())
        if len(blocks)
    }
    return Job(way, size, num_blocks, split, transfers)
