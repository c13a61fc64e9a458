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
    first_own_block,
    num_complete_blocks,
)
from simple_offload.scheduler.policies.pacing import Due, Waits
from simple_offload.scheduler.policies.request_walk import Kept, Progress, StoreWalk
from simple_offload.scheduler.stores import Stores
from simple_offload.scheduler.tier import block_pool
from simple_offload.scheduler.tier.cpu_tier import CpuTier

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


class _Ended(NamedTuple):
    """What is left to store of a request that has ended."""

    progress: Progress
    first: list[int]
    stops: dict[int, int]
    """By group, where its complete blocks end."""
    own_from: dict[int, int]
    """By group, from where on those are stored too that vLLM has not hashed."""
    tables: dict[int, list[KVCacheBlock]]
    """By group, those from block ``first[group]`` on."""
    held: list[KVCacheBlock]


class EagerPolicy:
    """Stores every full block once its tokens are confirmed computed: a few at a time
    (``waits.py``), and what is left of them when the request ends.

    State blocks are stored when they are handed over; the walk (``store_walk.py``) finds those that
    were not, as long as the device's prefix cache has them. Blocks that leave the block table while
    their request runs (windows, states) do not wait for others.
    """

    def __init__(
        self,
        tier: CpuTier,
        stores: Stores,
        kv_cache_manager: "KVCacheManager",
        admission: Admission,
    ) -> None:
        self.tier = tier
        self.groups = groups = tier.groups
        self.stores = stores
        self.admission = admission
        self._managers = kv_cache_manager.coordinator.single_type_managers
        self._device_pool: BlockPool = kv_cache_manager.block_pool
        self._requests: dict[str, Request] = {}
        self._progress: dict[str, Progress] = {}
        self._due = Due()
        self._ended: list[_Ended] = []
        chained = set(groups.chained_ids)
        self._group_ids = (*groups.chained_ids, *(g for g in groups.ids if g not in chained))
        """Chained groups first: the others' blocks are of no use beyond them."""
        self._waits = Waits(groups)
        self._zeros = [0] * len(self._managers)
        self._walk = StoreWalk(tier, stores, kv_cache_manager, admission)

    @property
    def num_requests(self) -> int:
        return len(self._progress) + len(self._ended)

    @property
    def idle(self) -> bool:
        return not self._ended

    @property
    def num_held_blocks(self) -> int:
        return sum(len(ended.held) for ended in self._ended)

    def on_allocated(self, request: "Request", *, loads: bool) -> None:
        self.admission.note(request)
        hashes, zeros = request.block_hashes, self._zeros
        kept = Kept(self.groups, self.tier.lookup, hashes)
        self._requests[request.request_id] = request
        self._progress[request.request_id] = Progress(
            hashes, zeros.copy(), zeros.copy(), loads, kept
        )
        self._due.follow(request.request_id)

    def on_states(self, states: Mapping[str, Sequence[BoundaryState]]) -> None:
        for request_id, of_request in states.items():
            if (progress := self._progress.get(request_id)) is not None:
                self.admission.note(self._requests[request_id])
                for state in of_request:
                    self._walk.store_state(progress, state)

    def on_step(self, scheduled: "SchedulerOutput") -> None:
        left_behind, self._ended = self._ended, []
        for ended in left_behind:
            self._finish(ended)
        for request_id in self._due.step(scheduled.num_scheduled_tokens):
            progress = self._progress[request_id]
            request = self._requests[request_id]
            self.admission.note(request)
            if not progress.ran:
                # In its first step a request has no blocks but those that it has found.
                progress.ran = True
                progress.ready_at = self._waits.first_at(request.num_computed_tokens)
                for group in self.groups.chained_ids:
                    size = self.groups.block_sizes[group]
                    progress.next_index[group] = request.num_computed_tokens // size
            elif progress.refused_at != self.admission.version:
                if confirmed_tokens(request) >= progress.ready_at:
                    self._go_on(request, progress)
                self._due.put_off(request_id, progress.ready_at - request.num_computed_tokens)

    def on_finished(self, request: "Request", loading: bool) -> None:
        progress = self._progress.pop(request.request_id, None)
        if progress is not None:
            del self._requests[request.request_id]
            self._due.forget(request.request_id)
            self.admission.note(request)
        self.admission.forget(request.request_id)
        # Where no step has run it, another connector (MultiConnector) may still be filling its
        # blocks, unless the tier does.
        if progress is None or loading or not (progress.ran or progress.loads):
            return
        tables, stops, own_from = {}, {}, {}
        for group in self._group_ids:
            table = self._table(request.request_id, group)
            stop = self._num_complete(request, group, len(table) // self.groups.num_parts)
            if group in self.groups.chained_ids:
                # The tier may have lost the end of what was stored, or have got it from others.
                self._walk.skip_stored(progress, group, stop)
                own_from[group] = progress.next_index[group]
            else:
                own_from[group] = first_own_block(self.groups, request, group, table, stop)
                progress.next_index[group] = min(progress.next_index[group], own_from[group])
            tables[group] = self.groups.parts(table, progress.next_index[group], stop)
            stops[group] = stop
        held = [block for table in tables.values() for block in table if not block.is_null]
        block_pool.hold(self._device_pool, held)
        first = list(progress.next_index)
        self._ended.append(_Ended(progress, first, stops, own_from, tables, held))

    def on_reset(self) -> None:
        self._requests.clear()
        self._progress.clear()
        self._due.clear()
        ended, self._ended = self._ended, []
        for request in ended:
            block_pool.release(self._device_pool, reversed(request.held))

    def _go_on(self, request: "Request", progress: Progress) -> None:
        """Store what has been computed of a request that runs."""
        tables = {group: self._table(request.request_id, group) for group in self._group_ids}
        ready = {
            group: self._num_complete(request, group, len(table) // self.groups.num_parts)
            for group, table in tables.items()
        }
        all_stored = self._walk.store_ready(progress, ready, tables, self._zeros, {})
        progress.ready_at = self._waits.next_at(progress.next_index, may_wait=all_stored)

    def _finish(self, ended: _Ended) -> None:
        """Store what is left of a request. What it has in the tier is the most recently used
        from now on, so that its rest displaces others' blocks; unless that was so when it had
        been loaded, which is long enough."""
        progress, hashes = ended.progress, ended.progress.hashes
        for group in self.groups.chained_ids:
            if not progress.next_index[group]:
                self._walk.skip_stored(progress, group, ended.stops[group])
        if not progress.started:
            self._walk.count_skipped(progress)
        progress.started = True
        for group in self.groups.chained_ids:
            if not progress.loads:
                self.tier.refresh(hashes, group, progress.next_index[group])
            self.tier.protect_first(hashes, group, progress.num_found[group])
        left = ended.stops, ended.tables, ended.first, ended.own_from
        self._walk.store_ready(progress, *left)
        if progress.refused_at == self.admission.version:
            self.tier.meter.add(metrics.SKIPPED, self._num_left(ended), "below_threshold")
        elif self._num_left(ended):
            # Nothing else is on probation: let it compete with what is protected.
            for group in self.groups.chained_ids:
                self.tier.refresh(hashes, group, progress.next_index[group])
                self.tier.protect_first(hashes, group, progress.next_index[group])
            self._walk.store_ready(progress, *left)
            self.tier.meter.add(metrics.DROPPED, self._num_left(ended), "tier_full")
        block_pool.release(self._device_pool, reversed(ended.held))

    def _num_left(self, ended: _Ended) -> int:
        """How many of its host blocks have neither been stored nor found to be in the tier."""
        next_index = ended.progress.next_index
        return sum(max(0, stop - next_index[group]) for group, stop in ended.stops.items())

    def _table(self, request_id: str, group: int) -> list[KVCacheBlock]:
        table: list[KVCacheBlock] = self._managers[group].req_to_blocks.get(request_id, [])
        return table

    def _num_complete(self, request: "Request", group: int, num_blocks: int) -> int:
        return num_complete_blocks(self.groups, request, group, num_blocks)
