"""Stores, from the plan to the commit."""

from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

from simple_offload.scheduler.cpu_tier import CpuTier
from simple_offload.scheduler.in_flight import Ended
from simple_offload.scheduler.loads import Loads
from simple_offload.scheduler.stores import Stores
from tests.simulation.mutations.registry import mutation, substitute
from tests.simulation.mutations.scripts import shared_loads


@mutation()
def commit_before_completion(stack: ExitStack) -> None:
    submit = Stores.submit

    def eager_commit(self: Stores) -> Any:
        for block, host_block in self._planned.pairs:
            self.tier.pool._insert_block_hash(block.key, host_block, block.num_tokens)
        return submit(self)

    substitute(stack, Stores, "submit", eager_commit)
    substitute(stack, Stores, "check_integrity", lambda self: None)

    def unpin(self: CpuTier, filled: Any) -> list[bool]:
        self.unpin([block for _, block in filled])
        return [True] * len(filled)

    substitute(stack, CpuTier, "commit_all", unpin)


@mutation()
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
    plan = Stores.plan

    def loose(self: Stores, blocks: Any, keep: Any, pool: Any) -> int:
        with patch.object(type(pool), "touch", lambda self, blocks: None):
            return plan(self, blocks, keep, pool)

    substitute(stack, Stores, "plan", loose)
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
