"""Loads that ranks announce before their end."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from simple_offload.backends.base import Direction
from simple_offload.metadata import StepMetadata
from simple_offload.scheduler.loads import Loads
from simple_offload.scheduler.manager import OffloadScheduler
from simple_offload.worker.early_announcement import EarlyAnnouncement
from simple_offload.worker.worker import OffloadWorker
from tests.simulation.mutations.registry import mutation, substitute
from tests.simulation.mutations.scripts import announced, announced_states


@mutation(announced)
def admit_silently(stack: ExitStack) -> None:
    substitute(stack, Loads, "drain_admitted", lambda self: self._newly_admitted.clear() or [])


def _hold_when(stack: ExitStack, hook: str, when: Callable[[StepMetadata], bool]) -> None:
    """Make ``bind`` hold no compute in steps where ``when`` is true. The worker's ``hook`` holds it
    at its end instead."""
    bind, late = OffloadWorker.bind, getattr(OffloadWorker, hook)

    def hasty(self: OffloadWorker, metadata: StepMetadata) -> None:
        admitted, metadata.admitted = metadata.admitted, []
        bind(self, metadata)
        metadata.admitted = admitted
        if not when(metadata):
            _hold(self)

    def belated(self: OffloadWorker) -> None:
        late(self)
        if when(self._metadata):
            _hold(self)

    substitute(stack, OffloadWorker, "bind", hasty)
    substitute(stack, OffloadWorker, hook, belated)


def _hold(worker: OffloadWorker) -> None:
    worker.lanes[Direction.LOAD].hold_compute(set(worker._metadata.admitted))


@mutation(announced)
def hold_compute_after_the_forward(stack: ExitStack) -> None:
    _hold_when(stack, "submit_loads", lambda metadata: True)


@mutation(announced)
def hold_compute_after_the_stores(stack: ExitStack) -> None:
    _hold_when(stack, "submit_stores", lambda metadata: True)


@contextmanager
def no_hold_before_stores_alone() -> Iterator[None]:
    """In a step without compute, stores do not wait for the loads that the step admits. Random
    scripts never show this: see test_announced."""
    with ExitStack() as stack:
        _hold_when(stack, "submit_stores", lambda metadata: not metadata.computes)
        yield


@mutation(announced)
def release_pins_at_the_announcement(stack: ExitStack) -> None:
    admit = Loads.admit

    def hasty(self: Loads, request_ids: Any, device_pool: Any) -> None:
        admit(self, request_ids, device_pool)
        for load in self._in_flight.values():
            if load.admitted:
                self._tier.unpin(load.pins)
                load.pins = []

    substitute(stack, Loads, "admit", hasty)


@mutation(announced)
def release_device_blocks_at_the_announcement(stack: ExitStack) -> None:
    update = OffloadScheduler.update_connector_output

    def hasty(self: OffloadScheduler, output: Any) -> None:
        update(self, output)
        for load in self._loads._in_flight.values():
            if load.admitted:
                self._device_pool.free_blocks(reversed(load.held))
                load.held = []

    substitute(stack, OffloadScheduler, "update_connector_output", hasty)


@mutation(announced_states)
def announce_loads_of_states(stack: ExitStack) -> None:
    """vLLM moves a state before it calls a step's hooks, so no hook can delay the move."""
    register = OffloadWorker.register_kv_caches

    def hasty(self: OffloadWorker, kv_caches: Any) -> None:
        self._announcements = EarlyAnnouncement(self.config.sync_load_ms / 1e3)
        register(self, kv_caches)

    substitute(stack, OffloadWorker, "register_kv_caches", hasty)


@mutation(announced)
def announce_twice(stack: ExitStack) -> None:
    poll = OffloadWorker.poll

    def repeating(self: OffloadWorker) -> Any:
        self._announcements._under_way.clear()
        return poll(self)

    substitute(stack, OffloadWorker, "poll", repeating)
