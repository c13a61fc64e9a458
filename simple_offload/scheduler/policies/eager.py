"""EagerPolicy: blocks are stored as soon as they are computed."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from simple_offload import metrics
from simple_offload.scheduler.policies.admission import Admission
from simple_offload.scheduler.policies.base import (
    BoundaryState,
    confirmed_tokens,
    first_unhashed_block,
    num_complete_blocks,
)
from simple_offload.scheduler.policies.pacing import Pacer, StoreBatches
from simple_offload.scheduler.policies.request_walk import KeepSet, Progress, StoreWalk
from simple_offload.scheduler.stores import Stores
from simple_offload.scheduler.tier import block_pool
from simple_offload.scheduler.tier.cpu_tier import CpuTier
from simple_offload.scheduler.tier.groups import Groups

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


class _Ended(NamedTuple):
    """The rest of a request that has ended: its blocks that are not stored yet."""

    progress: Progress
    first: list[int]
    stops: dict[int, int]
    """By group, the end of its complete blocks."""
    unhashed_from: dict[int, int]
    """By group, from which block on its blocks are stored without a hash."""
    tables: dict[int, list[KVCacheBlock]]
    """By group, its blocks from block ``first[group]`` on."""
    held: list[KVCacheBlock]


class EagerPolicy:
    """Stores every full block once its tokens are confirmed: a few at a time (``pacing.py``), and
    the rest when the request ends.

    State blocks are stored when they are handed over; the walk (``request_walk.py``) finds others
    as long as the device's prefix cache has them. Blocks that leave the block table while their
    request runs (windows, states) do not wait for others.
    """

    def __init__(
        self,
        tier: CpuTier,
        groups: Groups,
        stores: Stores,
        kv_cache_manager: "KVCacheManager",
        admission: Admission,
        meter: metrics.Meter,
        wants_events: bool = False,
    ) -> None:
        self._tier = tier
        self._groups = groups
        self._admission = admission
        self._meter = meter
        self._managers = kv_cache_manager.coordinator.single_type_managers
        self._device_pool: BlockPool = kv_cache_manager.block_pool
        self._wants_events = wants_events
        self._requests: dict[str, Request] = {}
        self._progress: dict[str, Progress] = {}
        self._pacer = Pacer()
        self._ended: list[_Ended] = []
        chained = set(groups.chained_ids)
        self._group_ids = (*groups.chained_ids, *(g for g in groups.ids if g not in chained))
        """Chained groups first: the others' blocks are of no use beyond them."""
        self._batches = StoreBatches(groups)
        self._zeros = [0] * len(self._managers)
        self._walk = StoreWalk(tier, groups, stores, kv_cache_manager, admission, meter)

    @property
    def idle(self) -> bool:
        return not self._ended

    @property
    def num_held_blocks(self) -> int:
        return sum(len(ended.held) for ended in self._ended)

    def on_allocated(self, request: "Request", *, loads: bool) -> None:
        self._admission.count(request)
        keep = KeepSet(self._groups, self._tier, request.block_hashes)
        hashes, zeros = request.block_hashes, self._zeros
        source = request if self._wants_events else None
        self._requests[request.request_id] = request
        self._progress[request.request_id] = Progress(
            hashes, source, zeros.copy(), zeros.copy(), loads, keep
        )
        self._pacer.add(request.request_id)

    def on_states(self, states: Mapping[str, Sequence[BoundaryState]]) -> None:
        for request_id, of_request in states.items():
            if (progress := self._progress.get(request_id)) is not None:
                self._admission.count(self._requests[request_id])
                for state in of_request:
                    self._walk.store_state(progress, state)

    def on_step(self, scheduled: "SchedulerOutput") -> None:
        ended, self._ended = self._ended, []
        for rest in ended:
            self._store_rest(rest)
        for request_id in self._pacer.on_step(scheduled.num_scheduled_tokens):
            progress = self._progress[request_id]
            request = self._requests[request_id]
            self._admission.count(request)
            if not progress.ran:
                # In its first step a request has only blocks that it has found.
                progress.ran = True
                progress.ready_at = self._batches.first_at(request.num_computed_tokens)
                for group in self._groups.chained_ids:
                    size = self._groups.block_sizes[group]
                    progress.next_index[group] = request.num_computed_tokens // size
            elif progress.refused_at != self._admission.version:
                if confirmed_tokens(request) >= progress.ready_at:
                    self._store_computed(request, progress)
                self._pacer.postpone(request_id, progress.ready_at - request.num_computed_tokens)

    def on_request_finished(self, request: "Request", loading: bool) -> None:
        progress = self._progress.pop(request.request_id, None)
        if progress is not None:
            del self._requests[request.request_id]
            self._pacer.remove(request.request_id)
            self._admission.count(request)
        self._admission.on_request_finished(request.request_id)
        # Until a step has run it, another connector (MultiConnector) may still be filling its
        # blocks, unless the tier does.
        if progress is None or loading or not (progress.ran or progress.loads):
            return
        tables, stops, unhashed_from = {}, {}, {}
        for group in self._group_ids:
            table = self._table(request.request_id, group)
            stop = self._num_complete(request, group, len(table))
            if group in self._groups.chained_ids:
                # The tier may have lost the end of the stored part, or have got it from others.
                self._walk.skip_stored(progress, group, stop)
                unhashed_from[group] = progress.next_index[group]
            else:
                first = first_unhashed_block(self._groups, request, group, table, stop)
                unhashed_from[group] = first
                progress.next_index[group] = min(progress.next_index[group], first)
            tables[group] = self._groups.sub_blocks(table, progress.next_index[group], stop)
            stops[group] = stop
        held = [block for table in tables.values() for block in table if not block.is_null]
        block_pool.touch(self._device_pool, held)
        first_index = list(progress.next_index)
        self._ended.append(_Ended(progress, first_index, stops, unhashed_from, tables, held))

    def free_blocks(self, blocks: Sequence[KVCacheBlock]) -> None:
        # Last block first, as vLLM frees a request's: the tail of a prefix leaves first.
        block_pool.free_blocks(self._device_pool, reversed(blocks))

    def on_reset(self) -> None:
        self._requests.clear()
        self._progress.clear()
        self._pacer.clear()
        ended, self._ended = self._ended, []
        for rest in ended:
            self.free_blocks(rest.held)

    def _store_computed(self, request: "Request", progress: Progress) -> None:
        """Store the computed blocks of a request that runs."""
        tables = {group: self._table(request.request_id, group) for group in self._group_ids}
        ready = {
            group: self._num_complete(request, group, len(table)) for group, table in tables.items()
        }
        all_stored = self._walk.store_ready(progress, ready, tables, self._zeros, {})
        progress.ready_at = self._batches.next_at(progress.next_index, may_wait=all_stored)

    def _store_rest(self, rest: _Ended) -> None:
        """Store the rest of a request that has ended."""
        progress, hashes = rest.progress, rest.progress.hashes
        for group in self._groups.chained_ids:
            if not progress.next_index[group]:
                self._walk.skip_stored(progress, group, rest.stops[group])
        if not progress.started:
            self._walk.count_skipped(progress)
        progress.started = True
        self._tier.on_request_finished(
            hashes, progress.next_index, progress.num_found, loaded=progress.loads
        )
        arguments = rest.stops, rest.tables, rest.first, rest.unhashed_from
        self._walk.store_ready(progress, *arguments)
        if progress.refused_at == self._admission.version:
            self._meter.add(metrics.SKIPPED, self._num_left(rest), "below_threshold")
        elif self._num_left(rest):
            # No other block is on probation: protect these, and compete with protected blocks.
            self._tier.on_request_finished(
                hashes, progress.next_index, progress.next_index, loaded=False
            )
            self._walk.store_ready(progress, *arguments)
            self._meter.add(metrics.DROPPED, self._num_left(rest), "tier_full")
        self.free_blocks(rest.held)

    def _num_left(self, rest: _Ended) -> int:
        """Number of its host blocks that are neither stored nor found in the tier."""
        next_index = rest.progress.next_index
        return sum(max(0, stop - next_index[group]) for group, stop in rest.stops.items())

    def _table(self, request_id: str, group: int) -> list[KVCacheBlock]:
        table: list[KVCacheBlock] = self._managers[group].req_to_blocks.get(request_id, [])
        return table

    def _num_complete(self, request: "Request", group: int, num_device_blocks: int) -> int:
        num_blocks = num_device_blocks // self._groups.num_sub_blocks
        return num_complete_blocks(self._groups, request, group, num_blocks)
