"""Lazy stores, and stores of blocks that several requests have."""

from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from simple_offload.scheduler.policies import lazy
from simple_offload.scheduler.policies.admission import Admission
from simple_offload.scheduler.policies.free_queue_walk import EvictionHorizon, QueueWalk
from simple_offload.scheduler.tier.cpu_tier import CpuTier
from simple_offload.scheduler.tier.eviction import EvictionOrder
from simple_offload.scheduler.tier.groups import Groups
from tests.simulation.mutations.registry import mutation, substitute
from tests.simulation.mutations.scripts import (
    asked_again,
    lazily_and_quickly,
    lazy_evictions,
    lazy_evictions_in_time,
)


@mutation(lazy_evictions())
def look_no_further_than_the_front(stack: ExitStack) -> None:
    substitute(stack, EvictionHorizon, "num_blocks", lambda self, num_empty: 2)


@mutation(lazy_evictions())
def return_stored_blocks_to_the_back(stack: ExitStack) -> None:
    free_blocks = QueueWalk.free_blocks

    def careless(self: QueueWalk, blocks: Any) -> None:
        for block in blocks:
            self._pinned.pop(block.block_id, None)
        free_blocks(self, blocks)

    substitute(stack, QueueWalk, "free_blocks", careless)


@mutation(lazy_evictions())
def refuse_what_comes_before_its_parent(stack: ExitStack) -> None:
    commit = CpuTier.commit

    def strict(self: CpuTier, runs: Any) -> list[list[int]]:
        return commit(self, [replace(run, early=False) for run in runs])

    substitute(stack, CpuTier, "commit", strict)


@mutation(lazy_evictions_in_time)
def let_a_block_outlive_the_parent_that_came_later(stack: ExitStack) -> None:
    substitute(stack, EvictionOrder, "renew", lambda self, block, protect=False: None)


@mutation(lazily_and_quickly)
def believe_every_known_token_computed(stack: ExitStack) -> None:
    """A request's last token is sampled, but never computed."""

    def known(groups: Groups, request: Any, group: int, num_blocks: int) -> int:
        num_tokens = len(request.block_hashes) * groups.hash_block_size
        return min(num_tokens // groups.block_sizes[group], num_blocks)

    stack.enter_context(patch.object(lazy, "num_complete_blocks", known))


@mutation(asked_again)
def admit_everything(stack: ExitStack) -> None:
    substitute(stack, Admission, "admits", lambda self, key: True)


@mutation(asked_again)
def count_a_request_in_each_step(stack: ExitStack) -> None:
    count = Admission.count

    def recount(self: Admission, request: Any) -> None:
        self.on_request_finished(request.request_id)
        count(self, request)

    substitute(stack, Admission, "count", recount)
