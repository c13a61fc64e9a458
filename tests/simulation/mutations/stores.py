"""Stores, from the plan to the commit."""

from contextlib import ExitStack
from itertools import count
from typing import Any
from unittest.mock import patch

from simple_offload.scheduler.loads import Loads
from simple_offload.scheduler.rank_reports import Ended
from simple_offload.scheduler.stores import Stores
from simple_offload.scheduler.tier import block_pool
from simple_offload.scheduler.tier.cpu_tier import CpuTier
from tests.simulation.mutations.registry import mutation, substitute
from tests.simulation.mutations.scripts import failing_stores, shared_loads


@mutation()
def commit_before_completion(stack: ExitStack) -> None:
    submit = Stores.submit

    def eager_commit(self: Stores) -> Any:
        for run, blocks in self._planned.runs:
            ends = count(run.num_tokens, run.size)
            for key, block, num_tokens in zip(run.keys, blocks, ends, strict=False):
                self.tier.pool._insert_block_hash(key, block, num_tokens)
        return submit(self)

    substitute(stack, Stores, "submit", eager_commit)
    substitute(stack, Stores, "check_integrity", lambda self: None)

    def unpin(self: CpuTier, filled: Any) -> list[list[int]]:
        for _, blocks in filled:
            self.unpin(blocks)
        return [[]] * len(filled)

    substitute(stack, CpuTier, "commit_all", unpin)


@mutation(failing_stores)
def keep_a_failed_store(stack: ExitStack) -> None:
    finish = Stores.finish
    substitute(
        stack,
        Stores,
        "finish",
        lambda self, ended, pool: finish(self, Ended(ended.id, ok=True), pool),
    )


@mutation()
def release_device_blocks_at_submission(stack: ExitStack) -> None:
    add = Stores._add

    def loose(self: Stores, *arguments: Any) -> None:
        with patch.object(block_pool, "hold", lambda pool, blocks: None):
            add(self, *arguments)

    substitute(stack, Stores, "_add", loose)
    substitute(stack, Stores, "_release", lambda self, store, device_pool: None)
    substitute(stack, Stores, "check_integrity", lambda self: None)


@mutation(shared_loads)
def store_while_loading(stack: ExitStack) -> None:
    substitute(stack, Loads, "is_loading", lambda self, request_id: False)


@mutation()
def store_the_neighbour(stack: ExitStack) -> None:
    submit = Stores.submit

    def shifted(self: Stores) -> Any:
        transfers = submit(self)
        for transfer in transfers:
            transfer.device_blocks[:] = transfer.device_blocks[::-1].copy()
        return transfers

    substitute(stack, Stores, "submit", shifted)


@mutation()
def keep_stores_over_a_reset(stack: ExitStack) -> None:
    substitute(stack, Stores, "abandon", lambda self, device_pool: None)
