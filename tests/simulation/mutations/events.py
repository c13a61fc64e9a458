"""What a router is told."""

from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

from simple_offload.scheduler.event_payload import Origins
from simple_offload.scheduler.kv_events import KVEvents
from simple_offload.scheduler.stores import Stores
from simple_offload.scheduler.tier.cpu_tier import CpuTier
from tests.simulation.mutations.registry import mutation, substitute
from tests.simulation.mutations.scripts import INNER_HITS


@mutation()
def say_stored_at_submission(stack: ExitStack) -> None:
    submit, stored = Stores.submit, KVEvents.stored_run

    def hasty(self: Stores) -> Any:
        for run, _ in self._planned.runs:
            assert self.events is not None
            stored(self.events, run, ())
        return submit(self)

    substitute(stack, Stores, "submit", hasty)
    substitute(stack, KVEvents, "stored_run", lambda self, *_: None)


@mutation()
def say_nothing_of_evictions(stack: ExitStack) -> None:
    substitute(stack, KVEvents, "_queue_removed", lambda self, keys: None)


@mutation()
def say_nothing_of_a_reset(stack: ExitStack) -> None:
    reset = CpuTier.reset

    def silent(self: CpuTier) -> None:
        with patch.object(self.pool, "_emit_block_removed_events", lambda keys: None):
            reset(self)

    substitute(stack, CpuTier, "reset", silent)


@mutation(INNER_HITS)
def say_nothing_of_inner_keys(stack: ExitStack) -> None:
    stored = KVEvents.stored
    substitute(
        stack, KVEvents, "stored", lambda self, key, inner, *rest: stored(self, key, (), *rest)
    )


@mutation()
def name_a_request_that_had_the_block_before(stack: ExitStack) -> None:
    on_step = Origins.on_step

    def first_come(self: Origins, *arguments: Any) -> None:
        before = dict(self._by_block)
        on_step(self, *arguments)
        self._by_block.update(before)

    substitute(stack, Origins, "on_step", first_come)
