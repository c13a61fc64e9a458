"""Stores, from the plan to the commit."""

from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

from simple_offload.scheduler.loads import Loads
from simple_offload.scheduler.rank_reports import Ended
from simple_offload.scheduler.stores import Stores
from simple_offload.scheduler.tier import block_pool
from simple_offload.scheduler.tier.cpu_tier import CpuTier
from tests.simulation import integrity
from tests.simulation.integrity import pool_of
from tests.simulation.mutations.registry import mutation, substitute
from tests.simulation.mutations.scripts import failing_stores, shared_loads


@mutation()
def commit_before_completion(stack: ExitStack) -> None:
    submit = Stores.submit

    def eager_commit(self: Stores) -> Any:
        for run in self._planned.runs:
            for key, block in zip(run.keys, run.host_blocks, strict=True):
                block_pool.add_key(pool_of(self._tier), block, key)
        return submit(self)

    substitute(stack, Stores, "submit", eager_commit)
    _do_not_check_stores(stack)

    def unpin(self: CpuTier, runs: Any) -> list[list[int]]:
        for run in runs:
            self.unpin(run.host_blocks)
        return [[]] * len(runs)

    substitute(stack, CpuTier, "commit", unpin)


def _do_not_check_stores(stack: ExitStack) -> None:
    """The wrong bytes must show the bug, not the bookkeeping."""
    stack.enter_context(patch.object(integrity, "check_stores", lambda stores, groups: None))


@mutation(failing_stores)
def keep_a_failed_store(stack: ExitStack) -> None:
    on_ended = Stores.on_ended
    substitute(
        stack, Stores, "on_ended", lambda self, ended: on_ended(self, Ended(ended.id, ok=True))
    )


@mutation()
def release_device_blocks_at_submission(stack: ExitStack) -> None:
    plan, on_ended, reset = Stores.plan, Stores.on_ended, Stores.reset

    def loose(self: Stores, *arguments: Any) -> int:
        with patch.object(block_pool, "touch", lambda pool, blocks: None):
            return plan(self, *arguments)

    def freed(self: Stores, ended: Ended) -> Any:
        return None if on_ended(self, ended) is None else ()

    def dropped(self: Stores) -> Any:
        reset(self)
        return ()

    substitute(stack, Stores, "plan", loose)
    substitute(stack, Stores, "on_ended", freed)
    substitute(stack, Stores, "reset", dropped)
    _do_not_check_stores(stack)


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
    substitute(stack, Stores, "reset", lambda self: ())
