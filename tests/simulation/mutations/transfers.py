"""Stores and loads, from the plan to the end: the order on the device, references, and reports."""

from simple_offload.scheduler.loads import Loads
from simple_offload.scheduler.rank_reports import TransferLedger
from simple_offload.scheduler.stores import Stores
from simple_offload.scheduler.write_hazards import WriteHazards
from simple_offload.worker import overlap
from simple_offload.worker.copy_lane import CopyLane
from simple_offload.worker.early_announcement import EarlyAnnouncement
from simple_offload.worker.overlap import Overlap
from simple_offload.worker.worker import OffloadWorker
from tests.simulation import integrity
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
)

# Stores. The wrong bytes must show some bugs, not the bookkeeping.

store_while_loading = always(Loads.is_loading, False, SHARED_LOADS)
keep_stores_over_a_reset = always(Stores.reset, ())
commit_before_completion = (
    mutation(
        Stores.submit,
        "store.transfer = ",
        "for run in store.runs:\n"
        "    for pair in zip(run.host_blocks, run.keys):\n"
        "        block_pool.add_key(self._tier._pool, *pair)\n"
        "store.transfer = ",
    )
    .also(Stores.on_ended, "[self._tier.commit(run)", "[self._tier.unpin(run.host_blocks) or ()")
    .also(integrity.check_stores, "", "return")
)
keep_a_failed_store = mutation(
    Stores.on_ended, "if not (ended.ok and store.keys)", "if not store.keys", FAILING_STORES
)
release_device_blocks_at_submission = (
    mutation(Stores.plan, "block_pool.touch(device_pool, run.device_blocks)", "pass")
    .also(Stores.on_ended, "if store is None:", "if store: store.device_blocks = []\nelse:")
    .also(Stores.reset, "return device_blocks", "return ()")
    .also(integrity.check_stores, "", "return")
)
store_the_neighbour = mutation(
    Stores.submit, "in store.device_blocks]", "in store.device_blocks[::-1]]", LOADING
)

# Loads

skip_unpin_after_load = mutation(Loads.on_ended, "self._tier.unpin(load.pins)", "pass", LOADING)
skip_pin_of_hit = mutation(Loads.lookup, "self._tier.pin(hit.pins)", "pass", LOADING).also(
    Loads.lookup, "hit, self._tier.version", "hit._replace(pins=()), self._tier.version"
)
load_into_the_next_block = mutation(Loads.submit, "load.slots,", "load.slots[::-1],", LOADING)

# Loads that ranks announce before their end

admit_silently = mutation(Loads.drain_admitted, "return admitted", "return []", ANNOUNCED)


def _hold_late(direction: str) -> Mutation:
    """The worker holds compute when it has submitted a step's copies of ``direction``, and not in
    ``bind``."""
    submit = f"self._submit(Direction.{direction}, self._metadata.{direction.lower()}s)"
    hold = "self.lanes[Direction.LOAD].hold_compute({*self._metadata.admitted}, 4)"
    hook = OffloadWorker.submit_loads if direction == "LOAD" else OffloadWorker.submit_stores
    return (
        mutation(OffloadWorker.bind, "metadata.admitted:", "False:", ANNOUNCED)
        .also(
            OffloadWorker.bind,
            "self.submit_loads()",
            "self._submit(Direction.LOAD, metadata.loads)",
        )
        .also(hook, submit, f"{submit}; {hold}")
    )


hold_compute_after_the_forward = _hold_late("LOAD")
hold_compute_after_the_stores = _hold_late("STORE")
release_pins_at_the_announcement = mutation(
    Loads.admit,
    "load.admitted = True",
    "load.admitted = True; self._tier.unpin(load.pins); load.pins = []",
    ANNOUNCED,
)
release_device_blocks_at_the_announcement = mutation(
    Loads.admit,
    "load.trusted = []",
    "load.trusted = []; device_pool.free_blocks(load.held[::-1]); load.held = []",
    ANNOUNCED.beginning_with(12),
)
# vLLM moves a state before it calls a step's hooks, so no hook can delay the move.
announce_loads_of_states = mutation(
    OffloadWorker.__init__, " if can_wait else 0.0", "", ANNOUNCED_STATES
)
announce_twice = mutation(
    EarlyAnnouncement.announce, "if load_id in self._under_way:", "if False:", ANNOUNCED
)

# Loads that layers wait for one by one

think_full_graphs_call_hooks = always(overlap._waits_by_layer, True, BY_LAYER)
wait_for_the_layers_before = mutation(
    Overlap.on_layer,
    "self._groups.num_needed.get(name, self._groups.num)",
    "[0, *self._groups.num_needed.values()][[*self._groups.num_needed].index(name)]",
    BY_LAYER,
)

# The order of compute, stores and loads

drop_store_barrier = mutation(
    OffloadWorker._submit,
    "barrier if transfer.after_compute",
    "barrier if direction is Direction.LOAD and transfer.after_compute",
    ORDINARY.beginning_with(13),
)
drop_load_barrier = mutation(
    OffloadWorker._submit,
    "barrier if transfer.after_compute",
    "barrier if direction is Direction.STORE",
    WRITE_HAZARDS,
)
think_free_blocks_untouched = always(WriteHazards.may_touch, False, WRITE_HAZARDS)
# As if each of these steps showed that an earlier step was over.
let_steps_without_tokens_count = mutation(
    WriteHazards.on_step, "if computes:", "if True:", LATE_DRAFTS
)

# Every transfer is submitted once, and ends once on every rank

submit_twice = mutation(OffloadWorker._submit, " if t.id > self._last_submitted[direction]", "")
lose_a_completion = mutation(OffloadWorker._note, "", "if completion.transfer.id % 5 == 4: return")
# A flush does not wait for the thread either.
submit_to_a_dead_thread = mutation(CopyLane._on_death, "", "self._num_queued = -(10**9); return")
skip_one_rank = mutation(
    TransferLedger.begin, "self.num_ranks", "max(1, self.num_ranks - 1)", LOADING
)
believe_the_last_rank = mutation(
    TransferLedger.on_report, "", "self._failed.clear()", FAILING_STORES
)
