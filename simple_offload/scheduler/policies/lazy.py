"""LazyPolicy: blocks are stored when the device is about to evict them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, KVCacheBlock

from simple_offload import metrics
from simple_offload.scheduler.policies.admission import Admission
from simple_offload.scheduler.policies.base import (
    BoundaryState,
    confirmed_tokens,
    first_own_block,
    num_complete_blocks,
)
from simple_offload.scheduler.policies.device_contents import GivenOut, Residents
from simple_offload.scheduler.policies.free_queue_walk import QueueWalk, StepLimits
from simple_offload.scheduler.policies.pacing import Due, Waits
from simple_offload.scheduler.stores import Storable, Stores
from simple_offload.scheduler.tier.cpu_tier import CpuTier

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


@dataclass(slots=True, eq=False)
class _Followed:
    request: "Request"
    num_hashed: list[int]
    """By group, blocks of its table that have been recorded as far as they have a hash."""
    num_ahead: list[int]
    """By group, blocks of its table that have been stored ahead of time, or need not be."""
    loads: bool
    """Whether the tier fills blocks of it before it runs."""
    kept: set[BlockHashWithGroupId] = field(default_factory=set)
    """Of those: these must not leave the tier to make room for the rest."""


class _Ended(NamedTuple):
    """What a request has left behind that would not live to the next step."""

    followed: _Followed
    storable: list[Storable]


class LazyPolicy:
    """Keeps the front of the device's free queue, which is evicted first, free of blocks that
    only the device has.

    Those are stored by a walk along the queue (``queue_walk.py``). When there are fewer free blocks
    than it is to keep safe, what running requests give up may be evicted before anyone sees it in
    the queue: then their blocks are stored as they fill up.
    """

    def __init__(
        self,
        tier: CpuTier,
        stores: Stores,
        kv_cache_manager: "KVCacheManager",
        admission: Admission,
        limits: StepLimits,
    ) -> None:
        self.tier = tier
        self.groups = tier.groups
        self.stores = stores
        self.admission = admission
        self.limits = limits
        self._managers = kv_cache_manager.coordinator.single_type_managers
        self._device_pool: BlockPool = kv_cache_manager.block_pool
        self._residents = Residents(stores, admission, self._device_pool)
        self._followed: dict[str, _Followed] = {}
        self._behind: dict[str, _Followed] = {}
        """Those of which something has been recorded since it was last stored ahead of time."""
        self._states: Mapping[str, Sequence[BoundaryState]] = {}
        """Those that the step completes which is being scheduled."""
        self._given_out = GivenOut(kv_cache_manager)
        self._due = Due(ahead=True)
        self._waits = Waits(tier.groups)
        self._ended: list[_Ended] = []
        self._walk = QueueWalk(tier, stores, self._residents, limits, self._device_pool)

    @property
    def num_requests(self) -> int:
        return len(self._followed) + len(self._ended)

    @property
    def idle(self) -> bool:
        return not self._ended

    @property
    def num_held_blocks(self) -> int:
        return sum(len(ended.storable) for ended in self._ended)

    def on_allocated(self, request: "Request", *, loads: bool) -> None:
        self.admission.note(request)
        zeros = [0] * len(self._managers)
        followed = _Followed(request, zeros.copy(), zeros.copy(), loads)
        self._followed[request.request_id] = followed
        self._given_out.follow(request.request_id)
        self._behind.pop(request.request_id, None)
        self._due.follow(request.request_id)

    def on_states(self, states: Mapping[str, Sequence[BoundaryState]]) -> None:
        self._states = states  # they may be in blocks that this step has given out

    def _take_states(self) -> None:
        states, self._states = self._states, {}
        for request_id, of_request in states.items():
            followed = self._followed.get(request_id)
            if followed is not None:
                self.admission.note(followed.request)
                blocks = [self._record_state(followed.request, state) for state in of_request]
                if self._is_short_of_blocks():
                    self._store(followed, blocks)

    def on_step(self, scheduled: "SchedulerOutput") -> None:
        ended, self._ended = self._ended, []
        for each in ended:
            self._finish(each)
        self._take_notice(scheduled)
        self._take_states()
        for request_id in self._due.step(scheduled.num_scheduled_tokens):
            followed = self._followed[request_id]
            request = followed.request
            self.admission.note(request)
            self._record(followed)
            past_prompt = self._waits.are_past(request.num_prompt_tokens, followed.num_hashed)
            next_at = self._waits.next_at(followed.num_hashed, may_wait=past_prompt)
            self._due.put_off(request_id, next_at - confirmed_tokens(request))
        if self._behind and self._is_short_of_blocks():
            self._store_ahead(self._walk.num_ahead)
        self._walk.go_on()

    def on_finished(self, request: "Request", loading: bool) -> None:
        followed = self._followed.pop(request.request_id, None)
        has_run = self._given_out.has_run(request.request_id)
        if followed is not None:
            self._given_out.forget(request.request_id)
            self._behind.pop(request.request_id, None)
            self._due.forget(request.request_id)
            self.admission.note(request)
        self.admission.forget(request.request_id)
        # Where no step has run it, another connector (MultiConnector) may still be filling its
        # blocks, unless the tier does.
        if followed is None or loading or not (has_run or followed.loads):
            return
        self._record(followed)  # the last step's output may have given a block its hash
        storable = [*reversed(self._unhashed(request)), *self._at_risk(followed)]
        self._device_pool.touch([block for each in storable for block in each.device_blocks])
        self._ended.append(_Ended(followed, storable))

    def on_reset(self) -> None:
        self._followed.clear()
        self._given_out.clear()
        self._behind.clear()
        self._due.clear()
        self._residents.forget()
        ended, self._ended = self._ended, []
        for each in ended:
            self._release(each)

    # Following requests

    def _take_notice(self, scheduled: "SchedulerOutput") -> None:
        """What this step has added to block tables has left the free queue."""
        if blocks := self._given_out.step(scheduled):
            filled_anew = self._residents.take(blocks, self._walk.drop_reason)
            self._walk.take([block.block_id for block in blocks], filled_anew)

    def _record(self, followed: _Followed) -> None:
        """Note what the blocks hold that have got a hash. Their bytes are complete by the end of
        the step that is being scheduled, if the request is part of it."""
        request = followed.request
        for group in self.groups.ids:
            manager, first = self._managers[group], followed.num_hashed[group]
            stop = manager.num_cached_block.get(request.request_id, 0)
            if first < stop:
                blocks = manager.req_to_blocks[request.request_id][first:stop]
                keys = self._keys(request, group, blocks, stop)
                num_tokens = first * self.groups.block_sizes[group]
                key_at = self.groups.key_at
                parent = key_at(request.block_hashes, group, num_tokens) if first else None
                self._residents.record(blocks, keys, parent)
                followed.num_hashed[group] = stop
                self._behind[request.request_id] = followed

    def _keys(
        self, request: "Request", group: int, blocks: Sequence[KVCacheBlock], stop: int
    ) -> list[BlockHashWithGroupId]:
        """Those of a request's last ``blocks`` before block ``stop``: the very objects by which
        vLLM knows them, where all of a chain has one."""
        if group in self.groups.chained_ids:
            keys = [key for block in blocks if (key := block._block_hash) is not None]
            last = self.groups.key_at(
                request.block_hashes, group, stop * self.groups.block_sizes[group]
            )
            if len(keys) == len(blocks) and keys[-1] == last:
                return keys
        return self.groups.keys(request.block_hashes, group, stop - len(blocks), stop)

    def _record_state(self, request: "Request", state: BoundaryState) -> KVCacheBlock:
        group, size = state.group, self.groups.block_sizes[state.group]
        block = self._device_pool.blocks[state.block_id]
        if group in self.groups.ids:
            key_at, hashes = self.groups.key_at, request.block_hashes
            key = key_at(hashes, group, state.num_tokens)
            before = (state.num_tokens - 1) // size * size
            parent = key_at(hashes, group, before) if before else None
            self._residents.record([block], [key], parent)
        return block

    # Storing what running requests have

    def _is_short_of_blocks(self) -> bool:
        return self._device_pool.get_num_free_blocks() < self._walk.num_ahead

    def _store_ahead(self, budget: int) -> None:
        """Store what is behind, up to ``budget`` blocks."""
        for request_id, followed in list(self._behind.items()):
            blocks: list[KVCacheBlock] = []
            for group in self.groups.ids:
                first = followed.num_ahead[group]
                stop = min(followed.num_hashed[group], first + budget)
                if first < stop:
                    table = self._managers[group].req_to_blocks.get(request_id, [])
                    blocks += table[first:stop]
                    followed.num_ahead[group] = stop
            self._store(followed, blocks)
            budget -= len(blocks)
            if budget <= 0:
                return
            del self._behind[request_id]

    def _store(self, followed: _Followed, blocks: Sequence[KVCacheBlock]) -> None:
        """Store those of ``blocks``, parents before children, that the tier lacks."""
        in_tier = self.tier.pool.cached_block_hash_to_block._cache
        storable = {
            s.key: s
            for block in reversed(blocks)
            if block._block_hash not in in_tier
            and (s := self._residents.storable(block)) is not None
        }
        self._plan(followed, storable)

    def _plan(
        self, followed: _Followed, storable: dict[BlockHashWithGroupId, Storable]
    ) -> list[Storable]:
        """Plan stores, children before parents; those that there is no room for are returned."""
        left = self._residents.plan(list(storable.values()), followed.kept)
        followed.kept.update(storable.keys() - {block.key for block in left})
        return left

    # What a request leaves behind

    def _unhashed(self, request: "Request") -> list[Storable]:
        """Blocks that vLLM gives no hash any more, and will hand out first: those that became full
        in the last step, and a window that the next turn needs."""
        found = []
        for group in self.groups.ids:
            manager = self._managers[group]
            table = manager.req_to_blocks.get(request.request_id, [])
            stop = num_complete_blocks(self.groups, request, group, len(table))
            if group in self.groups.chained_ids:
                first = manager.num_cached_block.get(request.request_id, 0)
            else:
                first = first_own_block(self.groups, request, group, table, stop)
            start = max(first - 1, 0)
            keys = self.groups.keys(request.block_hashes, group, start, stop)
            for index in range(first, stop):
                block, key = table[index], keys[index - start]
                if block.is_null or block.block_hash is not None or self.stores.has(key):
                    continue
                if self.admission.admits(key):
                    parent = keys[index - start - 1] if index else None
                    num_tokens = (index + 1) * self.groups.block_sizes[group]
                    found.append(Storable((block,), key, parent, num_tokens, early=True))
        return found

    def _at_risk(self, followed: _Followed) -> list[Storable]:
        """Blocks that join a queue so short that they may be evicted before the next walk."""
        num_free = self._device_pool.get_num_free_blocks()
        num_at_risk = min(self.limits.per_step, self._walk.num_ahead) - num_free
        found: list[Storable] = []
        for group in reversed(self.groups.ids):
            table = self._managers[group].req_to_blocks.get(followed.request.request_id, [])
            unstored = table[followed.num_ahead[group] : followed.num_hashed[group]]
            for block in reversed(unstored):  # as vLLM will free them
                if len(found) >= num_at_risk:
                    return found
                if block.ref_cnt == 1 and (storable := self._residents.storable(block)) is not None:
                    found.append(storable)
        return found

    def _finish(self, ended: _Ended) -> None:
        """Make what the request has in the tier the most recently used, and store what is
        held."""
        followed = ended.followed
        for group in self.groups.chained_ids:
            num_hashed = followed.num_hashed[group]
            self.tier.refresh(followed.request.block_hashes, group, num_hashed)
        storable = {s.key: s for s in ended.storable if not self.stores.has(s.key)}
        left = self._plan(followed, storable)
        # Nothing will find those on the device.
        num_lost = sum(block.device_blocks[0].block_hash is None for block in left)
        self.tier.meter.add(metrics.DROPPED, num_lost, "tier_full")
        self._release(ended)

    def _release(self, ended: _Ended) -> None:
        self._device_pool.free_blocks(
            [block for each in ended.storable for block in each.device_blocks]
        )
