"""What a request has found is protected, and of a chain, what comes before it."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from simple_offload.scheduler.tier import block_pool
from simple_offload.scheduler.tier.eviction import EvictionOrder
from simple_offload.scheduler.tier.segmented_lru import Segments
from tests.simulation.mutations.registry import mutation, substitute
from tests.simulation.mutations.scripts import Engine
from tests.simulation.script import Faults, Script

_DRAFTER = Engine({"windows": (0,), "draft": True})


def small_tier(script: Script) -> Script:
    """Much is found in a tier that cannot protect it all."""
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
    """Of what a request has found, another group's blocks are let go of between the first ones
    of a chain and the rest."""
    return small_tier(_DRAFTER(script))


@mutation(small_tier)
def lose_the_boundary(stack: ExitStack) -> None:
    """It stays where it is when what stands there is held."""

    def careless(self: Segments, blocks: Sequence[Any]) -> None:
        block_pool.hold(self.pool, blocks)
        if self.boundary.ref_cnt > 0:
            self.boundary = self.pool.free_block_queue.fake_free_list_tail

    substitute(stack, Segments, "hold", careless)


@mutation(small_tier)
def protect_the_end_only(stack: ExitStack) -> None:
    protect = Segments.protect
    substitute(stack, Segments, "protect", lambda self, blocks: protect(self, blocks[-1:]))


@mutation(two_chains)
def go_back_before_the_rest_is_free(stack: ExitStack) -> None:
    release = EvictionOrder._release

    def hasty(self: EvictionOrder, chain: Sequence[Any]) -> None:
        release(self, chain)
        self.segments.keep_limit()

    substitute(stack, EvictionOrder, "_release", hasty)
