"""The policies of stores, and the KV events of stored blocks."""

from dataclasses import replace
from typing import Any
from unittest.mock import patch

from simple_offload.scheduler.kv_events import KVEvents
from simple_offload.scheduler.policies import lazy
from simple_offload.scheduler.policies.admission import Admission
from simple_offload.scheduler.policies.device_contents import DeviceContents
from simple_offload.scheduler.policies.free_queue_walk import EvictionHorizon, QueueWalk
from simple_offload.scheduler.stores import Stores
from simple_offload.scheduler.tier.cpu_tier import CpuTier
from simple_offload.scheduler.tier.eviction import EvictionOrder
from simple_offload.scheduler.tier.groups import Groups
from tests.simulation.mutations.registry import always, mutation
from tests.simulation.mutations.situations import (
    ASKED_AGAIN,
    INNER_HITS,
    LAZILY_AND_QUICKLY,
    LAZY_EVICTIONS,
    LAZY_EVICTIONS_IN_TIME,
)

# Lazy stores

look_no_further_than_the_front = always(EvictionHorizon, "num_blocks", 2, LAZY_EVICTIONS)
let_a_block_outlive_the_parent_that_came_later = always(
    EvictionOrder, "renew", None, LAZY_EVICTIONS_IN_TIME
)


@mutation(QueueWalk, "free_blocks", LAZY_EVICTIONS)
def return_stored_blocks_to_the_back(free_blocks: Any, self: QueueWalk, blocks: Any) -> None:
    for block in blocks:
        self._pinned.pop(block.block_id, None)
    free_blocks(self, blocks)


@mutation(CpuTier, "commit", LAZY_EVICTIONS)
def refuse_what_comes_before_its_parent(commit: Any, self: CpuTier, runs: Any) -> Any:
    return commit(self, [replace(run, early=False) for run in runs])


@mutation(lazy, "num_complete_blocks", LAZILY_AND_QUICKLY)
def believe_every_known_token_computed(
    original: Any, groups: Groups, request: Any, group: int, num_blocks: int
) -> int:
    """A request's last token is sampled, but never computed."""
    num_tokens = len(request.block_hashes) * groups.hash_block_size
    return min(num_tokens // groups.block_sizes[group], num_blocks)


# Admission

admit_everything = always(Admission, "admits", True, ASKED_AGAIN)


@mutation(Admission, "count", ASKED_AGAIN)
def count_a_request_in_each_step(count: Any, self: Admission, request: Any) -> None:
    self.on_request_finished(request.request_id)
    count(self, request)


# KV events

say_nothing_of_evictions = always(KVEvents, "_on_removed", None)


_AT_SUBMISSION: list[int] = []


@mutation(Stores, "submit")
def say_stored_at_submission(submit: Any, self: Stores) -> Any:
    assert self._events is not None
    for run in self._planned.runs:
        self._events.on_committed(run, _AT_SUBMISSION)
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


@mutation(Stores, "plan")
def name_the_request_before(plan: Any, self: Any, run: Any, *arguments: Any) -> Any:
    before = vars(self).get("request_before")
    self.request_before, run.request = run.request, before
    return plan(self, run, *arguments)


@mutation(DeviceContents, "record", LAZY_EVICTIONS)
def keep_the_payload_of_the_contents_before(
    record: Any, self: DeviceContents, *arguments: Any
) -> None:
    before = dict(self._payloads)
    record(self, *arguments)
    self._payloads.update(before)


@keep_the_payload_of_the_contents_before.also(DeviceContents, "on_allocated")
def forget_no_payload(on_allocated: Any, self: DeviceContents, *arguments: Any) -> Any:
    with patch.object(self, "_payloads", dict(self._payloads)):
        return on_allocated(self, *arguments)
