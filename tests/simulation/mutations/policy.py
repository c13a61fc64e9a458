"""The policy of stores, and the KV events of stored blocks."""

from typing import Any
from unittest.mock import patch

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
    ASKED_AGAIN,
    AT_ONCE_AND_QUICKLY,
    BOUNDARIES,
    COPIES,
    DEVICE_RESETS,
    EVICTIONS,
    FULL_DEVICE,
    INNER_HITS,
    NO_ROOM,
    ORDINARY,
    OVERLOAD,
    OVERLOAD_WITH_ROOM,
    SAME_PROMPTS,
    SESSIONS,
    VICTIMS,
)

# Blocks leave both caches

forget_no_duplicate = always(CpuTier, "device_lost", None, COPIES)
notice_no_allocation = always(Residency, "drain_used", ([], {}), COPIES)


never_scan_the_queue = always(FreeQueueScan, "on_step", None, OVERLOAD)
never_scan_although_stores_are_lazy = always(FreeQueueScan, "on_step", None, EVICTIONS[True])
record_nothing = always(StorePolicy, "_record", None, EVICTIONS[False])


@mutation(FreeQueueScan, "__init__", EVICTIONS[True])
def look_no_further_than_the_front(init: Any, self: FreeQueueScan, *arguments: Any) -> None:
    init(self, *arguments)
    self.min_ahead = 2


@look_no_further_than_the_front.also(FreeQueueScan, "on_step")
def store_nothing_for_the_next_requests(
    on_step: Any, self: FreeQueueScan, demand: int, may_store_early: bool
) -> None:
    on_step(self, 0, may_store_early)


@look_no_further_than_the_front.also(FreeQueueScan, "withhold")
def withhold_nothing(withhold: Any, self: FreeQueueScan, *arguments: Any) -> int:
    return 0


@mutation(AtOnce, "_num_complete_blocks", AT_ONCE_AND_QUICKLY)
def believe_every_known_token_computed(
    original: Any, self: AtOnce, request: Any, group: int, num_blocks: int
) -> int:
    """A request's last token is sampled, but never computed."""
    num_tokens = len(request.block_hashes) * self._groups.hash_block_size
    return int(min(num_tokens // self._groups.block_sizes[group], num_blocks))


# What vLLM is told


@mutation(Gate, "_shares_load", SAME_PROMPTS)
def wait_for_the_loads_of_others_for_ever(
    original: Any, self: Gate, request_id: str, hit: Any
) -> Any:
    """However many get blocks meanwhile."""
    return self._loads.will_bring_most(hit)


load_what_others_load = always(Gate, "_shares_load", False, SAME_PROMPTS)


@mutation(Gate, "ask", SAME_PROMPTS.beginning_with(58))
def let_others_pass_a_request_without_room(ask: Any, self: Gate, request: Any, *rest: Any) -> Any:
    """Those behind it may be parked instead, so that there is no room in the next step either."""
    has_room = self._parked.has_room(request)
    answer = ask(self, request, *rest)
    return answer if has_room else None


keep_what_parked_requests_have = always(Parked, "give_back", [], SESSIONS)

# Resets


@mutation(OffloadScheduler, "_on_device_reset", DEVICE_RESETS)
def keep_the_kv_of_old_weights(_: Any, self: OffloadScheduler) -> None:
    self._policy.on_device_reset()


hold_blocks_at_a_reset = always(OffloadScheduler, "_before_device_reset", None, DEVICE_RESETS)

# What a request gets


@mutation(BeforeEviction, "before_allocation", NO_ROOM)
def withhold_for_ever(before_allocation: Any, self: BeforeEviction, *arguments: Any) -> None:
    """Also where the tier has no room for what is withheld."""
    self._num_withheld.clear()
    before_allocation(self, *arguments)


@mutation(FreeQueueScan, "_store_withheld", VICTIMS)
def store_what_was_withheld_without_giving_it_back(store: Any, self: FreeQueueScan) -> None:
    withheld, self._withheld = self._withheld, []
    if chosen := self._residency.choose(withheld):
        self._store(chosen)


@mutation(FreeQueueScan, "__init__", FULL_DEVICE)
def store_the_last_free_block(init: Any, self: FreeQueueScan, *arguments: Any) -> None:
    """Requests that run have to wait for these stores."""
    init(self, *arguments)
    self._reserve = 0


# vLLM's queue

reserve_for_ever = always(QueueReservations, "remove", None, FULL_DEVICE)

# Admission


@mutation(Admission, "admitted", ASKED_AGAIN)
def admit_everything(admitted: Any, self: Admission, keys: Any) -> Any:
    return keys


@mutation(Admission, "count", ASKED_AGAIN)
def count_a_request_in_each_step(count: Any, self: Admission, request: Any) -> None:
    self.on_request_finished(request.request_id)
    count(self, request)


@mutation(Reuse, "admits_next", OVERLOAD_WITH_ROOM)
def admit_few_requests_although_blocks_are_empty(admits_next: Any, self: Reuse) -> bool:
    return not self._keeps_old


@mutation(Residency, "on_hit", OVERLOAD)
def never_store_what_was_bypassed(
    on_hit: Any, self: Residency, block_ids: Any, *arguments: Any
) -> Any:
    """Even if a request has hit it."""
    bypassed = {i: self._bypassed[i] for i in self._bypassed.keys() & block_ids}
    answer = on_hit(self, block_ids, *arguments)
    self._bypassed.update(bypassed)
    for block_id in bypassed:
        self._to_store.pop(block_id, None)
    return answer


# Boundaries


@mutation(Boundaries, "hit", BOUNDARIES)
def release_what_two_went_on_from(hit: Any, self: Boundaries, *arguments: Any) -> Any:
    for boundary in self._at.values():
        boundary.num_hits = 0
    return hit(self, *arguments)


@mutation(Boundaries, "hit", BOUNDARIES)
def release_other_branches(hit: Any, self: Boundaries, *arguments: Any) -> Any:
    """The answer that the request before got, although this one has gone on at its prompt."""
    ends = hit(self, *arguments)
    return [*ends[-1].beside, ends[-1]] if ends else ends


@mutation(Boundaries, "add", BOUNDARIES)
def release_before_the_successor_is_hit(
    add: Any, self: Boundaries, request: Any, ends: Any, earlier: Any
) -> None:
    """It may never get into the tier."""
    add(self, request, ends, earlier)
    for each in earlier:
        self._tier.release(each.keys)


# KV events

say_nothing_of_evictions = always(KVEvents, "_on_removed", None)


_AT_SUBMISSION: list[int] = []


@mutation(Stores, "submit")
def say_stored_at_submission(submit: Any, self: Stores) -> Any:
    for run in self._planned.runs:
        for callback in self.on_committed:
            callback(run, _AT_SUBMISSION)
    return submit(self)


@say_stored_at_submission.also(KVEvents, "on_committed")
def say_nothing_at_the_end(on_committed: Any, self: KVEvents, run: Any, useless: Any) -> None:
    if useless is _AT_SUBMISSION:
        on_committed(self, run, useless)


@mutation(CpuTier, "reset")
def say_nothing_of_a_reset(reset: Any, self: CpuTier) -> None:
    with patch.object(self._pool, "_emit_block_removed_events", lambda keys: None):
        reset(self)


@mutation(KVEvents, "_on_cached", INNER_HITS)
def say_nothing_of_inner_keys(
    on_cached: Any, self: KVEvents, key: Any, inner: Any, *rest: Any
) -> None:
    on_cached(self, key, (), *rest)


@mutation(Stores, "plan", ORDINARY.beginning_with(27))
def give_a_block_the_payload_of_its_parent(
    plan: Any, self: Stores, run: Any, *arguments: Any
) -> Any:
    run.payloads = [*run.payloads[-1:], *run.payloads[:-1]]
    return plan(self, run, *arguments)


@mutation(Residency, "on_computed", EVICTIONS[True])
def keep_the_payload_of_the_contents_before(
    on_computed: Any, self: Residency, *arguments: Any
) -> None:
    before = dict(self._payloads)
    on_computed(self, *arguments)
    self._payloads.update(before)


@keep_the_payload_of_the_contents_before.also(Residency, "on_lost")
def forget_no_payload(on_lost: Any, self: Residency, *arguments: Any) -> None:
    with patch.object(self, "_payloads", dict(self._payloads)):
        on_lost(self, *arguments)
