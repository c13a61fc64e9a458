"""Segments: blocks that a request has found are protected, and so are their ancestors."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from simple_offload.scheduler.tier import block_pool
from simple_offload.scheduler.tier.eviction import EvictionOrder
from simple_offload.scheduler.tier.segmented_lru import SegmentedQueue
from tests.simulation.mutations.registry import mutation, substitute
from tests.simulation.mutations.scripts import Engine
from tests.simulation.script import Faults, Script

_DRAFTER = Engine({"windows": (0,), "draft": True})


def small_tier(script: Script) -> Script:
    """Requests find more blocks than the tier can protect."""
    shape = replace(
        script.shape,
        num_device_blocks=20 * len(script.shape.groups),
        num_host_blocks=24 * len(script.shape.groups),
        chunk_blocks=None,
        lazy=False,
        store_threshold=1,
    )
    return replace(
        script, shape=shape, copy_speed=0.9, arrivals=0.9, num_requests=60, faults=Faults()
    )


def two_chains(script: Script) -> Script:
    """The hit has two groups. Between the first blocks of one group's chain and the rest, the other
    group's blocks are unpinned."""
    return small_tier(_DRAFTER(script))


@mutation(small_tier)
def lose_the_boundary(stack: ExitStack) -> None:
    """The boundary stays in place when its block is pinned."""

    def careless(self: SegmentedQueue, blocks: Sequence[Any]) -> None:
        block_pool.touch(self._pool, blocks)
        if self.boundary.ref_cnt > 0:
            self.boundary = block_pool.queue_end(self._pool)

    substitute(stack, SegmentedQueue, "pin", careless)


@mutation(small_tier)
def protect_the_end_only(stack: ExitStack) -> None:
    for name in ("protect", "protect_chain"):
        protect = getattr(SegmentedQueue, name)

        def last_only(self: SegmentedQueue, blocks: Any, protect: Any = protect) -> None:
            protect(self, blocks[-1:])

        substitute(stack, SegmentedQueue, name, last_only)


@mutation(two_chains)
def go_back_before_the_rest_is_free(stack: ExitStack) -> None:
    free_chain = EvictionOrder._free_chain

    def hasty(self: EvictionOrder, chain: Sequence[Any]) -> None:
        free_chain(self, chain)
        self._queue.enforce_limit()

    substitute(stack, EvictionOrder, "_free_chain", hasty)
