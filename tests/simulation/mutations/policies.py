"""Lazy stores, and stores of what is asked for again."""

from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from simple_offload.scheduler.policies import lazy
from simple_offload.scheduler.policies.admission import Admission
from simple_offload.scheduler.policies.free_queue_walk import Lookahead
from simple_offload.scheduler.stores import Stores
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
    substitute(stack, Lookahead, "num_blocks", lambda self, num_empty: 2)


@mutation(lazy_evictions())
def return_stored_blocks_to_the_back(stack: ExitStack) -> None:
    release = Stores._release

    def careless(self: Stores, store: Any, device_pool: Any) -> None:
        for block in store.device_blocks:
            self.first_to_go.pop(block.block_id, None)
        release(self, store, device_pool)

    substitute(stack, Stores, "_release", careless)


@mutation(lazy_evictions())
def refuse_what_comes_before_its_parent(stack: ExitStack) -> None:
    commit_all = CpuTier.commit_all

    def strict(self: CpuTier, filled: Any) -> list[list[int]]:
        return commit_all(self, [(replace(run, early=False), blocks) for run, blocks in filled])

    substitute(stack, CpuTier, "commit_all", strict)


@mutation(lazy_evictions_in_time)
def let_a_block_outlive_the_parent_that_came_later(stack: ExitStack) -> None:
    substitute(stack, EvictionOrder, "renew", lambda self, block, found=False: None)


@mutation(lazily_and_quickly)
def believe_every_known_token_computed(stack: ExitStack) -> None:
    """The last token of a request has been said, and never been computed."""

    def known(groups: Groups, request: Any, group: int, num_blocks: int) -> int:
        num_tokens = len(request.block_hashes) * groups.hash_block_size
        return min(num_tokens // groups.block_sizes[group], num_blocks)

    stack.enter_context(patch.object(lazy, "num_complete_blocks", known))


@mutation(asked_again)
def admit_everything(stack: ExitStack) -> None:
    substitute(stack, Admission, "admits", lambda self, key: True)


@mutation(asked_again)
def count_a_request_in_each_step(stack: ExitStack) -> None:
    note = Admission.note

    def forgetful(self: Admission, request: Any) -> None:
        self.forget(request.request_id)
        note(self, request)

    substitute(stack, Admission, "note", forgetful)
