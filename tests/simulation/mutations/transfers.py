"""Stores and loads, from the plan to the end: the order on the device, references, and reports."""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

from simple_offload.backends.base import Direction
from simple_offload.metadata import StepMetadata
from simple_offload.scheduler.loads import Loads
from simple_offload.scheduler.manager import OffloadScheduler
from simple_offload.scheduler.rank_reports import Ended, TransferLedger
from simple_offload.scheduler.stores import Stores
from simple_offload.scheduler.tier import block_pool
from simple_offload.scheduler.tier.cpu_tier import CpuTier
from simple_offload.scheduler.write_hazards import WriteHazards
from simple_offload.worker import overlap
from simple_offload.worker.copy_lane import CopyLane
from simple_offload.worker.early_announcement import EarlyAnnouncement
from simple_offload.worker.layer_groups import NUM_GROUPS
from simple_offload.worker.overlap import Overlap
from simple_offload.worker.worker import OffloadWorker
from tests.simulation import integrity
from tests.simulation.device import ScriptedDevice
from tests.simulation.mutations.registry import Mutation, always, mutation
from tests.simulation.mutations.situations import (
    ANNOUNCED,
    ANNOUNCED_STATES,
    BY_LAYER,
    FAILING_STORES,
    LATE_DRAFTS,
    LOADING,
    ORDINARY,
    SHARED_LOADS,
    WRITE_HAZARDS,
    Situation,
)

# Stores

store_while_loading = always(Loads, "is_loading", False, SHARED_LOADS)
keep_stores_over_a_reset = always(Stores, "reset", ())


@mutation(Stores, "submit")
def commit_before_completion(submit: Any, self: Stores) -> Any:
    for run in self._planned.runs:
        for key, block in zip(run.keys, run.host_blocks, strict=True):
            block_pool.add_key(integrity.pool_of(self._tier), block, key)
    return submit(self)


@commit_before_completion.also(CpuTier, "commit")
def unpin_only(commit: Any, self: CpuTier, runs: Any) -> list[list[int]]:
    for run in runs:
        self.unpin(run.host_blocks)
    return [[]] * len(runs)


@mutation(Stores, "on_ended", FAILING_STORES)
def keep_a_failed_store(on_ended: Any, self: Stores, ended: Ended) -> Any:
    return on_ended(self, Ended(ended.id, ok=True))


@mutation(Stores, "plan")
def release_device_blocks_at_submission(plan: Any, self: Stores, *arguments: Any) -> Any:
    with patch.object(block_pool, "touch", lambda pool, blocks: None):
        return plan(self, *arguments)


@release_device_blocks_at_submission.also(Stores, "on_ended")
def release_nothing_at_the_end(on_ended: Any, self: Stores, ended: Ended) -> Any:
    return None if on_ended(self, ended) is None else ((), None)


@release_device_blocks_at_submission.also(Stores, "reset")
def release_nothing_at_a_reset(reset: Any, self: Stores) -> Any:
    reset(self)
    return ()


@release_device_blocks_at_submission.also(integrity, "check_stores")
@commit_before_completion.also(integrity, "check_stores")
def check_nothing(*arguments: Any) -> None:
    """The wrong bytes must show these two bugs, not the bookkeeping."""


@mutation(Stores, "submit", LOADING)
def store_the_neighbour(submit: Any, self: Stores) -> Any:
    transfers = submit(self)
    for transfer in transfers:
        transfer.device_blocks[:] = transfer.device_blocks[::-1].copy()
    return transfers


# Loads


@mutation(Loads, "on_ended", LOADING)
def skip_unpin_after_load(on_ended: Any, self: Loads, *arguments: Any) -> Any:
    with patch.object(CpuTier, "unpin", lambda self, blocks: None):
        return on_ended(self, *arguments)


@mutation(Loads, "lookup", LOADING)
def skip_pin_of_hit(lookup: Any, self: Loads, request: Any, num_computed_tokens: int) -> Any:
    found = lookup(self, request, num_computed_tokens)
    if (known := self._hits.get(request.request_id)) is not None:
        self._tier.unpin(known.hit.pins)
        self._hits[request.request_id] = known._replace(hit=known.hit._replace(pins=()))
    return found


@mutation(Loads, "submit", LOADING)
def load_into_the_next_block(submit: Any, self: Loads, *arguments: Any) -> Any:
    transfers = submit(self, *arguments)
    for transfer in transfers:
        transfer.host_blocks[:] = transfer.host_blocks[::-1].copy()
    return transfers


# Loads that ranks announce before their end


@mutation(Loads, "drain_admitted", ANNOUNCED)
def admit_silently(drain_admitted: Any, self: Loads) -> list[int]:
    drain_admitted(self)
    return []


def hold_late(hook: str, when: Callable[[StepMetadata], bool]) -> Mutation:
    """In steps where ``when`` is true, the worker holds compute at the end of ``hook``, not in
    ``bind``."""

    @mutation(OffloadWorker, "bind", ANNOUNCED)
    def late(bind: Any, self: OffloadWorker, metadata: StepMetadata) -> None:
        admitted, metadata.admitted = metadata.admitted, []
        bind(self, metadata)
        metadata.admitted = admitted
        if not when(metadata):
            _hold(self)

    @late.also(OffloadWorker, hook)
    def hold_at_the_end(original: Any, self: OffloadWorker) -> None:
        original(self)
        if when(self._metadata):
            _hold(self)

    return late


def _hold(worker: OffloadWorker) -> None:
    worker.lanes[Direction.LOAD].hold_compute(set(worker._metadata.admitted), NUM_GROUPS)


hold_compute_after_the_forward = hold_late("submit_loads", lambda metadata: True)
hold_compute_after_the_stores = hold_late("submit_stores", lambda metadata: True)


@mutation(Loads, "admit", ANNOUNCED)
def release_pins_at_the_announcement(admit: Any, self: Loads, *arguments: Any) -> None:
    admit(self, *arguments)
    for load in self._in_flight.values():
        if load.admitted:
            self._tier.unpin(load.pins)
            load.pins = []


@mutation(OffloadScheduler, "update_connector_output", ANNOUNCED.beginning_with(12))
def release_device_blocks_at_the_announcement(
    update: Any, self: OffloadScheduler, output: Any
) -> None:
    update(self, output)
    for load in self._loads._in_flight.values():
        if load.admitted:
            self._device_pool.free_blocks(reversed(load.held))
            load.held = []


@mutation(OffloadWorker, "register_kv_caches", ANNOUNCED_STATES)
def announce_loads_of_states(register: Any, self: OffloadWorker, kv_caches: Any) -> None:
    """vLLM moves a state before it calls a step's hooks, so no hook can delay the move."""
    self._announcements = EarlyAnnouncement(self.config.sync_load_ms / 1e3)
    register(self, kv_caches)


@mutation(OffloadWorker, "poll", ANNOUNCED)
def announce_twice(poll: Any, self: OffloadWorker) -> Any:
    self._announcements._under_way.clear()
    return poll(self)


# Loads that layers wait for one by one

think_full_graphs_call_hooks = always(overlap, "_waits_by_layer", True, BY_LAYER)


@mutation(Overlap, "on_layer", BY_LAYER)
def wait_for_the_layers_before(on_layer: Any, self: Overlap, name: str) -> None:
    layers = list(self._groups.num_needed)
    before = layers.index(name) - 1
    if before >= 0:
        on_layer(self, layers[before])


# The order of compute, stores and loads


def _drop_barrier(direction: Direction, shown_by: Situation) -> Mutation:
    @mutation(ScriptedDevice, "__init__", shown_by)
    def ignore(init: Any, self: ScriptedDevice, *arguments: Any) -> None:
        init(self, *arguments)
        self.ignore_barriers.add(direction)

    return ignore


drop_store_barrier = _drop_barrier(Direction.STORE, ORDINARY.beginning_with(13))
drop_load_barrier = _drop_barrier(Direction.LOAD, WRITE_HAZARDS)
think_free_blocks_untouched = always(WriteHazards, "may_touch", False, WRITE_HAZARDS)


@mutation(WriteHazards, "on_step", LATE_DRAFTS)
def let_steps_without_tokens_count(
    on_step: Any, self: WriteHazards, zeroed: Any = (), *, computes: bool = True
) -> None:
    """As if each of these steps showed that an earlier step was over."""
    on_step(self, zeroed)


# Every transfer is submitted once, and ends once on every rank


@mutation(OffloadWorker, "_submit")
def submit_twice(
    submit: Any, self: OffloadWorker, direction: Direction, transfers: list[Any]
) -> None:
    for transfer in transfers:
        self.lanes[direction].submit(transfer, self._backend.barrier())


@mutation(OffloadWorker, "_note")
def lose_a_completion(
    note: Any, self: OffloadWorker, direction: Direction, completion: Any
) -> None:
    if completion.transfer.id % 5 != 4:
        note(self, direction, completion)


@mutation(CopyLane, "_on_death")
def submit_to_a_dead_thread(on_death: Any, self: CopyLane) -> None:
    self._num_queued = -(10**9)  # a flush does not wait for the thread either


@mutation(TransferLedger, "begin", LOADING)
def skip_one_rank(begin: Any, self: TransferLedger) -> int:
    transfer_id: int = begin(self)
    self._num_ranks_left[transfer_id] = max(1, self.num_ranks - 1)
    return transfer_id


@mutation(TransferLedger, "on_report", FAILING_STORES)
def believe_the_last_rank(on_report: Any, self: TransferLedger, report: Any) -> Any:
    self._failed.clear()
    return on_report(self, report)
