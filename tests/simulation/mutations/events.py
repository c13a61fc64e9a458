"""KV events, as a router receives them."""

from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

from simple_offload.scheduler.kv_events import KVEvents
from simple_offload.scheduler.policies.device_contents import DeviceContents
from simple_offload.scheduler.stores import Stores
from simple_offload.scheduler.tier.cpu_tier import CpuTier
from tests.simulation.mutations.registry import mutation, substitute
from tests.simulation.mutations.scripts import INNER_HITS, lazy_evictions


@mutation()
def say_stored_at_submission(stack: ExitStack) -> None:
    submit, on_committed = Stores.submit, KVEvents.on_committed

    def hasty(self: Stores) -> Any:
        for run in self._planned.runs:
            assert self._events is not None
            on_committed(self._events, run, ())
        return submit(self)

    substitute(stack, Stores, "submit", hasty)
    substitute(stack, KVEvents, "on_committed", lambda self, *_: None)


@mutation()
def say_nothing_of_evictions(stack: ExitStack) -> None:
    substitute(stack, KVEvents, "_on_removed", lambda self, keys: None)


@mutation()
def say_nothing_of_a_reset(stack: ExitStack) -> None:
    reset = CpuTier.reset

    def silent(self: CpuTier) -> None:
        with patch.object(self._pool, "_emit_block_removed_events", lambda keys: None):
            reset(self)

    substitute(stack, CpuTier, "reset", silent)


@mutation(INNER_HITS)
def say_nothing_of_inner_keys(stack: ExitStack) -> None:
    on_cached = KVEvents._on_cached
    substitute(
        stack,
        KVEvents,
        "_on_cached",
        lambda self, key, inner, *rest: on_cached(self, key, (), *rest),
    )


@mutation()
def name_the_request_before(stack: ExitStack) -> None:
    plan = Stores.plan
    before: list[Any] = [None]

    def late(self: Stores, run: Any, *arguments: Any) -> int:
        before.append(run.request)
        run.request = before.pop(0)
        return plan(self, run, *arguments)

    substitute(stack, Stores, "plan", late)


@mutation(lazy_evictions())
def keep_the_payload_of_the_contents_before(stack: ExitStack) -> None:
    record = DeviceContents.record

    def first_come(self: DeviceContents, *arguments: Any) -> None:
        before = dict(self._payloads)
        record(self, *arguments)
        self._payloads.update(before)

    def keep(self: DeviceContents, *arguments: Any) -> Any:
        with patch.object(self, "_payloads", dict(self._payloads)):
            return on_allocated(self, *arguments)

    on_allocated = DeviceContents.on_allocated
    substitute(stack, DeviceContents, "record", first_come)
    substitute(stack, DeviceContents, "on_allocated", keep)
