"""The policy of stores, and the KV events of stored blocks."""

from simple_offload.scheduler import event_payload
from simple_offload.scheduler.gate import Gate
from simple_offload.scheduler.kv_events import KVEvents
from simple_offload.scheduler.manager import OffloadScheduler
from simple_offload.scheduler.parked import Parked
from simple_offload.scheduler.policy.admission import Admission
from simple_offload.scheduler.policy.at_once import AtOnce
from simple_offload.scheduler.policy.before_eviction import BeforeEviction
from simple_offload.scheduler.policy.boundaries import Boundaries
from simple_offload.scheduler.policy.free_queue_scan import FreeQueueScan
from simple_offload.scheduler.policy.queue_reservations import QueueReservations
from simple_offload.scheduler.policy.residency import Residency
from simple_offload.scheduler.policy.reuse import Reuse
from simple_offload.scheduler.policy.store_policy import StorePolicy
from simple_offload.scheduler.stores import Stores
from simple_offload.scheduler.tier.cpu_tier import CpuTier
from tests.simulation.mutations.registry import always, mutation
from tests.simulation.mutations.situations import (
    ADAPTERS,
    ASKED_AGAIN,
    AT_ONCE_AND_QUICKLY,
    BOUNDARIES,
    COPIES,
    DEVICE_RESETS,
    EVICTIONS,
    FULL_DEVICE,
    INNER_HITS,
    LONG_HITS,
    NO_ROOM,
    ORDINARY,
    OVERLOAD,
    OVERLOAD_WITH_ROOM,
    PICTURES,
    SAME_PROMPTS,
    SESSIONS,
    VICTIMS,
)

# Blocks leave both caches

forget_no_duplicate = always(CpuTier.device_lost, None, COPIES)
notice_no_allocation = always(Residency.drain_used, ([], {}), COPIES)
never_scan_the_queue = always(FreeQueueScan.on_step, None, OVERLOAD)
never_scan_although_stores_are_lazy = always(FreeQueueScan.on_step, None, EVICTIONS[True])
record_nothing = always(StorePolicy._record, None, EVICTIONS[False])
look_no_further_than_the_front = (
    mutation(
        FreeQueueScan.__init__,
        "min(num_steps * self._per_step, len(device_pool.blocks) // 4)",
        "2",
        EVICTIONS[True],
    )
    .also(FreeQueueScan.__init__, "min(num_running, self._peak_demand)", "num_running")
    .also(FreeQueueScan.withhold, "", "return 0")
)
# A request's last token is sampled, but never computed.
believe_every_known_token_computed = mutation(
    AtOnce._num_complete_blocks,
    "",
    "num_known = len(request.block_hashes) * self._groups.hash_block_size\n"
    "return min(num_known // self._groups.block_sizes[group], num_blocks)",
    AT_ONCE_AND_QUICKLY,
)

# What vLLM is told

# However many get blocks meanwhile.
wait_for_the_loads_of_others_for_ever = mutation(
    Gate._shares_load, "", "return self._loads.will_bring_most(hit)", SAME_PROMPTS
)
load_what_others_load = always(Gate._shares_load, False, SAME_PROMPTS)
# Those behind it may be parked instead, so that there is no room in the next step either.
let_others_pass_a_request_without_room = mutation(
    Gate.ask,
    "",
    "has_room = self._parked.has_room(request)",
    SAME_PROMPTS.beginning_with(58),
).also(Gate.ask, "return num_tokens", "return num_tokens if has_room else None")
keep_what_parked_requests_have = always(Parked.give_back, [], SESSIONS)

# Resets

keep_the_kv_of_old_weights = mutation(
    OffloadScheduler._on_device_reset,
    "if self.config.keep_on_device_reset:",
    "if True:",
    DEVICE_RESETS,
)
hold_blocks_at_a_reset = always(OffloadScheduler._before_device_reset, None, DEVICE_RESETS)
give_blocks_up_although_others_hold_them = mutation(
    OffloadScheduler._before_device_reset,
    "all(pool.blocks[i].ref_cnt == ours[i] for i in ours)",
    "True",
    DEVICE_RESETS.beginning_with(44),
)

# What a request gets

# Also where the tier has no room for what is withheld.
withhold_for_ever = mutation(
    BeforeEviction.before_allocation, "num_times == MAX_WITHHELD or ", "", NO_ROOM
)
store_what_was_withheld_without_giving_it_back = mutation(
    FreeQueueScan._store_withheld,
    "block_pool.return_blocks(self._device_pool, free, None)",
    "pass",
    VICTIMS,
).also(FreeQueueScan._store_withheld, "block_pool.free_blocks(self._device_pool, used)", "pass")
# Requests that run have to wait for these stores.
store_the_last_free_block = mutation(
    FreeQueueScan.__init__, "min(num_running, self._peak_demand)", "0", FULL_DEVICE
)

# vLLM's queue

reserve_for_ever = always(QueueReservations.remove, None, FULL_DEVICE)

# Admission

admit_everything = mutation(Admission.admitted, "", "return keys", ASKED_AGAIN)
count_a_request_in_each_step = mutation(
    Admission.count, "", "self._num_seen.pop(request.request_id, None)", ASKED_AGAIN
)
admit_few_requests_although_blocks_are_empty = mutation(
    Reuse.admits_next, "", "return not self._keeps_old", OVERLOAD_WITH_ROOM
)
# Even if a request has hit it.
never_store_what_was_bypassed = mutation(
    Residency.on_hit, "_pop_all(self._bypassed, block_ids)", "pass", OVERLOAD
).also(
    Residency.on_hit,
    "if block.block_hash is not None:",
    "if block.block_hash is not None and block.block_id not in self._bypassed:",
)

# Boundaries

release_what_two_went_on_from = mutation(Boundaries.hit, "each.num_hits <= 1 and ", "", BOUNDARIES)
# The answer that the request before got, although this one has gone on at its prompt.
release_other_branches = mutation(
    Boundaries.hit, " if get_block_hash(key) in before", "", BOUNDARIES
)
# All of them continue the request that has gone on last.
count_branches_of_one_request_as_one = mutation(
    Boundaries.hit, "boundary.gone_on = None", "pass", LONG_HITS
)
# It may never get into the tier.
release_before_the_successor_is_hit = mutation(
    Boundaries.add,
    "if earlier:",
    "for each in earlier: self._tier.release(each.keys)\nif earlier:",
    BOUNDARIES,
)

# KV events

say_nothing_of_evictions = always(KVEvents._on_removed, None)
say_stored_at_submission = mutation(
    Stores.submit,
    "store.transfer = ",
    "for callback in self.on_committed:\n"
    "    for run in store.runs: callback(run, ())\n"
    "store.transfer = ",
).also(Stores.on_ended, "in self.on_committed:", "in ():")
say_nothing_of_a_reset = mutation(
    CpuTier.reset, "self._on_lost(", "self._removed.clear(); self._on_lost("
)
say_nothing_of_inner_keys = mutation(KVEvents._on_cached, "", "inner_keys = ()", INNER_HITS)
say_nothing_of_adapters = mutation(
    event_payload._payload, "lora.name if lora is not None else None", "None", ADAPTERS
)
give_pictures_the_place_in_their_prompt = mutation(
    event_payload._payload, "request, start, end, 0", "request, 0, end, 0", PICTURES
)
give_a_block_the_payload_of_its_parent = mutation(
    Stores.plan,
    "",
    "run.payloads = [*run.payloads[-1:], *run.payloads[:-1]]",
    ORDINARY.beginning_with(27),
)
keep_the_payload_of_the_contents_before = mutation(
    Residency._add_payloads,
    "if block.block_hash == key ",
    "if block.block_id not in self._payloads and block.block_hash == key ",
    EVICTIONS[True],
).also(Residency.on_lost, "self._payloads.pop(block_id, None)", "pass")
