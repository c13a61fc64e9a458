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
    first_unhashed_block,
    num_complete_blocks,
)
from simple_offload.scheduler.policies.device_contents import DeviceContents, NewlyAllocated
from simple_offload.scheduler.policies.free_queue_walk import QueueWalk, StepLimits
from simple_offload.scheduler.policies.pacing import Pacer, StoreBatches
from simple_offload.scheduler.stores import Stores
from simple_offload.scheduler.tier import block_pool
from simple_offload.scheduler.tier.cpu_tier import CpuTier
from simple_offload.scheduler.tier.groups import Groups
from simple_offload.scheduler.tier.run import Run, stretches

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


@dataclass(slots=True, eq=False)
class _Progress:
    request: "Request"
    num_hashed: list[int]
    """By group, blocks of its table with a hash, which are recorded."""
    num_ahead: list[int]
    """By group, blocks of its table that have been stored ahead of time, or need not be."""
    loads: bool
    """Whether the tier fills blocks of it before it runs."""
    keep: set[BlockHashWithGroupId] = field(default_factory=set)
    """Its blocks that must not leave the tier to make room for the rest."""


class _Ended(NamedTuple):
    """Blocks of a request that has ended which would not live to the next step."""

    progress: _Progress
    unhashed: list[Run]
    at_risk: list[KVCacheBlock]
    """Children before parents."""
    held: list[KVCacheBlock]
    """All of them, in the order in which vLLM would free them."""


class LazyPolicy:
    """Keeps the front of the device's free queue, which is evicted first, free of blocks that only
    the device has.

    A walk along the queue stores those (``free_queue_walk.py``). If fewer blocks are free than it
    should keep safe, blocks that running requests give up may be evicted before the walk meets
    them: then blocks are stored as they fill up.
    """

    def __init__(
        self,
        tier: CpuTier,
        groups: Groups,
        stores: Stores,
        kv_cache_manager: "KVCacheManager",
        admission: Admission,
        meter: metrics.Meter,
        limits: StepLimits,
        wants_events: bool = False,
    ) -> None:
        self._tier = tier
        self._groups = groups
        self._stores = stores
        self._admission = admission
        self._meter = meter
        self._limits = limits
        self._wants_events = wants_events
        self._managers = kv_cache_manager.coordinator.single_type_managers
        self._device_pool: BlockPool = kv_cache_manager.block_pool
        self._contents = DeviceContents(
            groups, stores, admission, self._device_pool, meter, wants_events
        )
        self._progress: dict[str, _Progress] = {}
        self._behind: dict[str, _Progress] = {}
        """Requests with blocks recorded since they were last stored ahead of time."""
        self._states: Mapping[str, Sequence[BoundaryState]] = {}
        """States that the step being scheduled completes."""
        self._newly_allocated = NewlyAllocated(kv_cache_manager)
        self._pacer = Pacer(ahead=True)
        self._batches = StoreBatches(groups)
        self._ended: list[_Ended] = []
        self._walk = QueueWalk(tier, stores, self._contents, limits, self._device_pool, meter)

    @property
    def idle(self) -> bool:
        return not self._ended

    @property
    def num_held_blocks(self) -> int:
        return sum(len(ended.held) for ended in self._ended)

    def on_allocated(self, request: "Request", *, loads: bool) -> None:
        self._admission.count(request)
        zeros = [0] * len(self._managers)
        self._progress[request.request_id] = _Progress(request, zeros.copy(), zeros, loads)
        self._newly_allocated.on_allocated(request.request_id)
        self._behind.pop(request.request_id, None)
        self._pacer.add(request.request_id)

    def on_states(self, states: Mapping[str, Sequence[BoundaryState]]) -> None:
        self._states = states  # they may be in blocks that this step has allocated

    def on_step(self, scheduled: "SchedulerOutput") -> None:
        ended, self._ended = self._ended, []
        for each in ended:
            self._store_rest(each)
        if blocks := self._newly_allocated.on_step(scheduled):
            filled_anew = self._contents.on_allocated(blocks, self._walk.drop_reason)
            self._walk.on_allocated([block.block_id for block in blocks], filled_anew)
        self._record_states()
        for request_id in self._pacer.on_step(scheduled.num_scheduled_tokens):
            progress = self._progress[request_id]
            request = progress.request
            self._admission.count(request)
            self._record(progress)
            past_prompt = self._batches.are_past(request.num_prompt_tokens, progress.num_hashed)
            next_at = self._batches.next_at(progress.num_hashed, may_wait=past_prompt)
            self._pacer.postpone(request_id, next_at - confirmed_tokens(request))
        if self._behind and self._is_short_of_blocks():
            self._store_ahead(self._walk.num_ahead)
        self._walk.on_step()

    def on_request_finished(self, request: "Request", loading: bool) -> None:
        request_id = request.request_id
        progress = self._progress.pop(request_id, None)
        has_run = self._newly_allocated.has_run(request_id)
        if progress is not None:
            self._newly_allocated.on_request_finished(request_id)
            self._behind.pop(request_id, None)
            self._pacer.remove(request_id)
            self._admission.count(request)
        self._admission.on_request_finished(request_id)
        # Until a step has run it, another connector (MultiConnector) may still be filling its
        # blocks, unless the tier does.
        if progress is None or loading or not (has_run or progress.loads):
            return
        self._record(progress)  # the last step's output may have given a block its hash
        unhashed, at_risk = self._unhashed(request), self._at_risk(progress)
        held = [block for run in reversed(unhashed) for block in reversed(run.device_blocks)]
        held += at_risk
        block_pool.touch(self._device_pool, held)
        self._ended.append(_Ended(progress, unhashed, at_risk, held))

    def free_blocks(self, blocks: Sequence[KVCacheBlock]) -> None:
        self._walk.free_blocks(blocks)

    def on_reset(self) -> None:
        self._progress.clear()
        self._newly_allocated.clear()
        self._behind.clear()
        self._pacer.clear()
        self._contents.clear()
        ended, self._ended = self._ended, []
        for each in ended:
            block_pool.free_blocks(self._device_pool, each.held)

    # Recording

    def _record(self, progress: _Progress) -> None:
        """Record the blocks that have got a hash. Their bytes are complete by the end of the step
        that is being scheduled, if the request is part of it."""
        request = progress.request
        for group in self._groups.ids:
            manager, first = self._managers[group], progress.num_hashed[group]
            stop = manager.num_cached_block.get(request.request_id, 0)
            if first < stop:
                blocks = manager.req_to_blocks[request.request_id][first:stop]
                keys = self._keys(request, group, blocks, stop)
                num_tokens = first * self._groups.block_sizes[group]
                key_at = self._groups.key_at
                parent = key_at(request.block_hashes, group, num_tokens) if first else None
                self._contents.record(blocks, keys, parent, request)
                progress.num_hashed[group] = stop
                self._behind[request.request_id] = progress

    def _keys(
        self, request: "Request", group: int, blocks: Sequence[KVCacheBlock], stop: int
    ) -> list[BlockHashWithGroupId]:
        """Keys of a request's last ``blocks`` before block ``stop``: vLLM's own objects, which are
        faster to compare, if each block of a chain has one."""
        if group in self._groups.chained_ids:
            keys = [key for key in block_pool.keys_of(blocks) if key is not None]
            last = self._groups.key_at(
                request.block_hashes, group, stop * self._groups.block_sizes[group]
            )
            if len(keys) == len(blocks) and keys[-1] == last:
                return keys
        return self._groups.keys(request.block_hashes, group, stop - len(blocks), stop)

    def _record_states(self) -> None:
        states, self._states = self._states, {}
        for request_id, of_request in states.items():
            progress = self._progress.get(request_id)
            if progress is not None:
                self._admission.count(progress.request)
                blocks = [self._record_state(progress.request, state) for state in of_request]
                if self._is_short_of_blocks():
                    self._store(progress, blocks)

    def _record_state(self, request: "Request", state: BoundaryState) -> KVCacheBlock:
        group, size = state.group, self._groups.block_sizes[state.group]
        block = self._device_pool.blocks[state.block_id]
        if group in self._groups.ids:
            key_at, hashes = self._groups.key_at, request.block_hashes
            key = key_at(hashes, group, state.num_tokens)
            before = (state.num_tokens - 1) // size * size
            parent = key_at(hashes, group, before) if before else None
            self._contents.record([block], [key], parent, request)
        return block

    # Storing blocks of running requests

    def _is_short_of_blocks(self) -> bool:
        return self._device_pool.get_num_free_blocks() < self._walk.num_ahead

    def _store_ahead(self, budget: int) -> None:
        """Store recorded blocks ahead of time, up to ``budget`` blocks."""
        for request_id, progress in list(self._behind.items()):
            blocks: list[KVCacheBlock] = []
            for group in self._groups.ids:
                first = progress.num_ahead[group]
                stop = min(progress.num_hashed[group], first + budget)
                if first < stop:
                    table = self._managers[group].req_to_blocks.get(request_id, [])
                    blocks += table[first:stop]
                    progress.num_ahead[group] = stop
            self._store(progress, blocks)
            budget -= len(blocks)
            if budget <= 0:
                return
            del self._behind[request_id]

    def _store(self, progress: _Progress, blocks: Sequence[KVCacheBlock]) -> None:
        """Store those of ``blocks``, parents before children, that the tier lacks."""
        self._plan(progress, [b for b in reversed(blocks) if self._contents.is_storable(b)])

    def _plan(self, progress: _Progress, blocks: Sequence[KVCacheBlock]) -> None:
        """Plan stores of ``blocks``, storable and children before parents."""
        by_key = {key: b for b in blocks if (key := b.block_hash) is not None}
        left = self._contents.plan(list(by_key.values()), progress.keep)
        for block in left:
            if (key := block.block_hash) is not None:
                del by_key[key]
        progress.keep.update(by_key)

    # The rest of a request that has ended

    def _unhashed(self, request: "Request") -> list[Run]:
        """Blocks that vLLM will not hash any more, and will allocate first: blocks completed by
        the last step, and a window that the next turn needs."""
        runs = []
        for group in self._groups.ids:
            manager = self._managers[group]
            table = manager.req_to_blocks.get(request.request_id, [])
            stop = num_complete_blocks(self._groups, request, group, len(table))
            if group in self._groups.chained_ids:
                first = manager.num_cached_block.get(request.request_id, 0)
            else:
                first = first_unhashed_block(self._groups, request, group, table, stop)
            size = self._groups.block_sizes[group]
            keys = self._groups.keys(request.block_hashes, group, first, stop)
            places = [
                place
                for place, (block, key) in enumerate(zip(table[first:stop], keys, strict=True))
                if not block.is_null and block.block_hash is None and self._admission.admits(key)
            ]
            for start, end in stretches(places):
                num_tokens = (first + start) * size
                key_at = self._groups.key_at
                parent = key_at(request.block_hashes, group, num_tokens) if num_tokens else None
                runs.append(
                    Run(
                        table[first + start : first + end],
                        keys[start:end],
                        parent,
                        num_tokens + size,
                        size,
                        early=True,
                        request=request if self._wants_events else None,
                    )
                )
        return runs

    def _at_risk(self, progress: _Progress) -> list[KVCacheBlock]:
        """Blocks that join a queue so short that they may be evicted before the next walk,
        children before parents."""
        num_free = self._device_pool.get_num_free_blocks()
        num_at_risk = min(self._limits.per_step, self._walk.num_ahead) - num_free
        found: list[KVCacheBlock] = []
        for group in reversed(self._groups.ids):
            table = self._managers[group].req_to_blocks.get(progress.request.request_id, [])
            unstored = table[progress.num_ahead[group] : progress.num_hashed[group]]
            for block in reversed(unstored):  # as vLLM will free them
                if len(found) >= num_at_risk:
                    return found
                if block.ref_cnt == 1 and self._contents.is_storable(block):
                    found.append(block)
        return found

    def _store_rest(self, ended: _Ended) -> None:
        """Make the request's blocks in the tier the most recently used, and store those held."""
        progress = ended.progress
        zeros = [0] * len(self._managers)
        self._tier.on_request_finished(
            progress.request.block_hashes, progress.num_hashed, zeros, loaded=False
        )
        self._plan(progress, [b for b in ended.at_risk if self._contents.is_storable(b)])
        num_dropped = 0
        for run in ended.unhashed:
            for start, stop in stretches(self._stores.lacking(run.keys)):
                piece = run.slice(start, stop)
                count = self._stores.plan(piece, lambda: progress.keep, self._device_pool)
                progress.keep.update(piece.keys[:count])
                num_dropped += stop - start - count
        # The device has these no more.
        self._meter.add(metrics.DROPPED, num_dropped, "tier_full")
        block_pool.free_blocks(self._device_pool, ended.held)
