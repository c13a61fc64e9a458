"""Demotion: with lazy stores, loaded blocks are the first to leave the tier."""

from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from simple_offload.scheduler.tier.eviction import EvictionOrder
from tests.simulation.mutations.registry import mutation, substitute
from tests.simulation.mutations.scripts import lazily
from tests.simulation.script import Faults, Script


def small_tier(script: Script) -> Script:
    """Lazy stores fill a tier soon, and requests load from it."""
    script = lazily(script)
    shape = replace(
        script.shape,
        num_device_blocks=30 * len(script.shape.groups),
        num_host_blocks=40 * len(script.shape.groups),
        chunk_blocks=None,
    )
    return replace(
        script, shape=shape, copy_speed=0.9, arrivals=0.9, num_requests=60, faults=Faults()
    )


@mutation(small_tier)
def demote_a_parent(stack: ExitStack) -> None:
    demote = EvictionOrder.demote

    def careless(self: EvictionOrder, blocks: Any) -> None:
        children, self.num_children = self.num_children, {}
        for block in blocks:
            if (parent := self.parents[block.block_id]) is not None:
                self.num_children[parent] = 1
        demote(self, blocks)
        self.num_children = children

    substitute(stack, EvictionOrder, "demote", careless)


@mutation(small_tier)
def demote_the_head_first(stack: ExitStack) -> None:
    demote = EvictionOrder.demote

    def upside_down(self: EvictionOrder, blocks: Any) -> None:
        demote(self, blocks)
        queue = self._pool.free_block_queue
        for block in reversed(blocks):
            if block.block_id in self._queue.demoted:
                queue.remove(block)
                queue.prepend_n([block])

    substitute(stack, EvictionOrder, "demote", upside_down)
