"""EagerPolicy: blocks are stored as soon as they are computed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    BlockHashWithGroupId,
    KVCacheBlock,
)

from simple_offload import metrics
from simple_offload.scheduler import block_lists
from simple_offload.scheduler.admission import Admission
from simple_offload.scheduler.cpu_tier import CpuTier
from simple_offload.scheduler.due import Due
from simple_offload.scheduler.kept import Kept
from simple_offload.scheduler.runs import Run
from simple_offload.scheduler.sources import Sources
from simple_offload.scheduler.store_policy import (
    BoundaryState,
    confirmed_tokens,
    num_complete_blocks,
)
from simple_offload.scheduler.stores import Storable, Stores

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import Request

_MOST_BLOCKS = 8
_MOST_TOKENS = 128
"""How much of what a request says waits to be stored in one go: so many device blocks or tokens,
whichever is less, but at least a host block. The scheduler side takes about as long for eight
blocks as for one. While the request runs, the device has them. One that is preempted before they
are stored may lose them, which is why these are few: it computes them again."""


@dataclass(slots=True, eq=False)
class _Progress:
    """Of a request, but not the request: what is left of one that has ended outlives it."""

    hashes: list[BlockHash]
    """The request's, which grow with it."""
    next_index: list[int]
    """By group, the first block that has not been dealt with."""
    num_found: list[int]
    """By chained group, how many of its first blocks the tier had (or was getting) already when
    the first of the others was to be stored."""
    loads: bool
    """Whether the tier fills blocks of it before it runs."""
    kept: Kept
    """What the tier has of it: that must not leave to make room for the rest."""
    ran: bool = False
    """Whether a step with it has been scheduled since it got its blocks."""
    ready_at: int = 0
    """With fewer tokens computed, there is nothing to store."""
    started: bool = False
    """Whether what the tier has of it already has been skipped."""
    refused_at: int = -1
    """The version of the admission that has refused the block at a cursor, if it has."""


class _Ended(NamedTuple):
    """What is left to store of a request that has ended."""

    progress: _Progress
    first: list[int]
    stops: dict[int, int]
    """By group, where its complete blocks end."""
    tables: dict[int, list[KVCacheBlock]]
    """By group, those from block ``first[group]`` on."""
    held: list[KVCacheBlock]


class EagerPolicy:
    """Stores every full block once its tokens are confirmed computed: those of the prompt at
    once, those of what a request says a few at a time, and what is left of them when it ends.

    Walks each request's block tables with a cursor. A cursor stops where the tier has no
    room, and goes on when it has. State blocks are stored when they are handed over; the walk
    finds those that were not, as long as the device's prefix cache has them. Blocks that leave
    the block table while their request runs (windows, states) do not wait for others.
    """

    def __init__(
        self,
        tier: CpuTier,
        stores: Stores,
        kv_cache_manager: "KVCacheManager",
        admission: Admission,
    ) -> None:
        self.tier = tier
        self.stores = stores
        self.admission = admission
        self._managers = kv_cache_manager.coordinator.single_type_managers
        self._device_pool: BlockPool = kv_cache_manager.block_pool
        self._requests: dict[str, Request] = {}
        self._progress: dict[str, _Progress] = {}
        self._due = Due()
        self._ended: list[_Ended] = []
        chained = set(tier.groups.chained_ids)
        self._groups = (*tier.groups.chained_ids, *(g for g in tier.groups.ids if g not in chained))
        """Chained groups first: the others' blocks are of no use beyond them."""
        self._waits = [
            max(1, min(_MOST_BLOCKS // tier.groups.num_parts, _MOST_TOKENS // size))
            if group in chained
            else 1
            for group, size in enumerate(tier.groups.block_sizes)
        ]
        """By group, how many host blocks beyond the prompt are stored in one go."""
        self._zeros = [0] * len(self._managers)
        self._sources = Sources(tier.groups, kv_cache_manager)

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
        kept = Kept(self.tier.groups, hashes)
        self._requests[request.request_id] = request
        self._progress[request.request_id] = _Progress(
            hashes, zeros.copy(), zeros.copy(), loads, kept
        )
        self._due.follow(request.request_id)

    def on_states(self, states: Mapping[str, Sequence[BoundaryState]]) -> None:
        for request_id, of_request in states.items():
            if (progress := self._progress.get(request_id)) is not None:
                self.admission.note(self._requests[request_id])
                for state in of_request:
                    self._store_state(progress, state)

    def on_step(self, num_scheduled: Mapping[str, int]) -> None:
        left_behind, self._ended = self._ended, []
        for ended in left_behind:
            self._finish(ended)
        for request_id in self._due.step(num_scheduled):
            progress = self._progress[request_id]
            request = self._requests[request_id]
            self.admission.note(request)
            if progress.ran and progress.refused_at != self.admission.version:
                if confirmed_tokens(request) >= progress.ready_at:
                    self._go_on(request, progress)
                self._due.put_off(request_id, progress.ready_at - request.num_computed_tokens)
            # In its first step a request has no blocks but those that it has found.
            progress.ran = True

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
        tables, stops = {}, {}
        for group in self._groups:
            if progress.started and self._is_chained(group):
                # The tier may have lost the end of what was stored.
                self._skip_stored(progress, group, progress.next_index[group])
            table = self._table(request.request_id, group)
            stop = self._num_complete(request, group, len(table) // self.tier.groups.num_parts)
            if self._has_all(request, group, stop):
                progress.next_index[group] = stop
            tables[group] = self._parts(table, progress.next_index[group], stop)
            stops[group] = stop
        held = [block for table in tables.values() for block in table if not block.is_null]
        block_lists.hold(self._device_pool, held)
        self._ended.append(_Ended(progress, list(progress.next_index), stops, tables, held))

    def on_reset(self) -> None:
        self._requests.clear()
        self._progress.clear()
        self._due.clear()
        ended, self._ended = self._ended, []
        for request in ended:
            block_lists.release(self._device_pool, reversed(request.held))

    def _go_on(self, request: "Request", progress: _Progress) -> None:
        """Store what has been computed of a request that runs."""
        tables = {group: self._table(request.request_id, group) for group in self._groups}
        ready = {
            group: self._num_complete(request, group, len(table) // self.tier.groups.num_parts)
            for group, table in tables.items()
        }
        all_stored = self._store_ready(progress, ready, tables, self._zeros, ended=False)
        progress.ready_at = self._next_ready(request, progress, may_wait=all_stored)

    def _finish(self, ended: _Ended) -> None:
        """Store what is left of a request. What it has in the tier is the most recently used
        from now on, so that its rest displaces others' blocks."""
        progress, hashes = ended.progress, ended.progress.hashes
        for group in self.tier.groups.chained_ids:
            if not progress.next_index[group]:
                self._skip_stored(progress, group, self.tier.groups.num_keys(hashes, group))
        if not progress.started:
            self._count_skipped(progress)
        progress.started = True
        for group in self.tier.groups.chained_ids:
            self.tier.refresh(hashes, group, progress.next_index[group], progress.num_found[group])
        self._store_ready(progress, ended.stops, ended.tables, ended.first, ended=True)
        if progress.refused_at == self.admission.version:
            self.tier.meter.add(metrics.SKIPPED, self._num_left(ended), "below_threshold")
        elif self._num_left(ended):
            # Nothing else is on probation: let it compete with what is protected.
            for group in self.tier.groups.chained_ids:
                count = progress.next_index[group]
                self.tier.refresh(hashes, group, count, num_found=count)
            self._store_ready(progress, ended.stops, ended.tables, ended.first, ended=True)
            self.tier.meter.add(metrics.DROPPED, self._num_left(ended), "tier_full")
        block_lists.release(self._device_pool, reversed(ended.held))

    def _num_left(self, ended: _Ended) -> int:
        """How many of its host blocks have neither been stored nor found to be in the tier."""
        next_index = ended.progress.next_index
        return sum(max(0, stop - next_index[group]) for group, stop in ended.stops.items())

    def _store_ready(
        self,
        progress: _Progress,
        ready: Mapping[int, int],
        tables: Mapping[int, list[KVCacheBlock]],
        first: Sequence[int],
        ended: bool,
    ) -> bool:
        """Plan stores from the groups' cursors on, up to block ``ready[group]``. ``tables``: by
        group the request's blocks from block ``first[group]`` on. False: some have to be put off.

        A hit needs every group, so a tier that is too small for the request had better hold the
        beginning of each: groups take turns.
        """
        sizes, next_index = self.tier.groups.block_sizes, progress.next_index
        behind = [group for group in ready if next_index[group] < ready[group]]
        if not behind:
            return True
        if not progress.started:
            self._start(progress, ready)
            behind = [group for group in ready if next_index[group] < ready[group]]
        alone = len(ready) == 1 or 2 * sum(ready.values()) <= self.tier.num_blocks
        turn = max(ready.values()) if alone else 1
        while behind:
            group = behind[0]
            if len(behind) > 1:
                group = min(behind, key=lambda group: next_index[group] * sizes[group])
            start = next_index[group]
            stop = min(start + turn, ready[group])
            blocks = self._parts(tables[group], start - first[group], stop - first[group])
            if not self._store_run(progress, group, blocks, ended):
                return False
            behind = [group for group in ready if next_index[group] < ready[group]]
        return True

    def _next_ready(self, request: "Request", progress: _Progress, may_wait: bool) -> int:
        """How many tokens must have been computed before there is something to store: the next
        block of some group, or more of them, if it is none of the prompt's and ``may_wait``."""
        num_prompt_tokens = request.num_prompt_tokens
        at = []
        for group in self._groups:
            index, size = progress.next_index[group], self.tier.groups.block_sizes[group]
            in_prompt = (index + 1) * size <= num_prompt_tokens
            at.append((index + (self._waits[group] if may_wait and not in_prompt else 1)) * size)
        return min(at)

    def _table(self, request_id: str, group: int) -> list[KVCacheBlock]:
        table: list[KVCacheBlock] = self._managers[group].req_to_blocks.get(request_id, [])
        return table

    def _parts(self, table: list[KVCacheBlock], first: int, stop: int) -> list[KVCacheBlock]:
        """The device blocks of a table that belong to host blocks ``first`` to ``stop``."""
        return table[first * self.tier.groups.num_parts : stop * self.tier.groups.num_parts]

    def _is_chained(self, group: int) -> bool:
        return group in self.tier.groups.chained_ids

    def _num_complete(self, request: "Request", group: int, num_blocks: int) -> int:
        return num_complete_blocks(self.tier.groups, request, group, num_blocks)

    def _has_all(self, request: "Request", group: int, count: int) -> bool:
        """Whether the tier has (or is getting) the first ``count`` blocks of the request."""
        if not count or not self._is_chained(group):
            return False
        num_tokens = count * self.tier.groups.block_sizes[group]
        last = self.tier.groups.key_at(request.block_hashes, group, num_tokens)
        return self.stores.has(last)  # and with it, all before it

    def _store_state(self, progress: _Progress, state: BoundaryState) -> None:
        group, size = state.group, self.tier.groups.block_sizes[state.group]
        if group not in self.tier.groups.ids:
            return
        hashes = progress.hashes
        key = self.tier.groups.key_at(hashes, group, state.num_tokens)
        block = self._device_pool.blocks[state.block_id]
        # A block that was given up since it was handed over has lost its hash.
        if self.stores.has(key) or block.block_hash != key or not self.admission.admits(key):
            return
        before = (state.num_tokens - 1) // size * size
        parent = self.tier.groups.key_at(hashes, group, before) if before else None
        if not progress.started:
            sizes = self.tier.groups.block_sizes
            self._start(progress, {g: state.num_tokens // sizes[g] for g in self._groups})
        storable = Storable((block,), key, parent, state.num_tokens)
        if self.stores.plan([storable], progress.kept.collect, self._device_pool):
            progress.kept.keep((key,))

    def _store_run(
        self, progress: _Progress, group: int, blocks: list[KVCacheBlock], ended: bool
    ) -> bool:
        """Store those of ``blocks``, the parts of the host blocks that follow the group's cursor,
        that there is need to, and move the cursor. False: not now, and nothing of the request
        after it either."""
        first, size = progress.next_index[group], self.tier.groups.block_sizes[group]
        last = first + len(blocks) // self.tier.groups.num_parts
        chained = self._is_chained(group)
        parent = self.tier.groups.key_at(progress.hashes, group, first * size) if first else None
        if chained and parent is not None and not self.stores.has(parent):
            return False
        plain = self._plain_run(progress.hashes, group, blocks, parent, first)
        num_plain = len(plain) if plain is not None else 0
        num_planned = 0
        if plain is not None:
            num_planned = self.stores.plan_run(plain, progress.kept.collect, self._device_pool)
        stop = first + num_planned
        if num_planned == num_plain and stop < last:
            others = self._parts(blocks, num_plain, last - first)
            storable, stop = self._storable_from(progress, group, others, stop, ended)
            count = self.stores.plan(storable, progress.kept.collect, self._device_pool)
            num_planned += count
            if count < len(storable):
                stop = storable[count].num_tokens // size - 1
        if chained:
            num_skipped = stop - first - num_planned
            self.tier.meter.add(metrics.SKIPPED, num_skipped, "already_stored")
        progress.kept.keep_first(group, stop)
        progress.next_index[group] = stop
        return stop == last

    def _plain_run(
        self,
        hashes: list[BlockHash],
        group: int,
        blocks: list[KVCacheBlock],
        parent: BlockHashWithGroupId | None,
        first: int,
    ) -> Run | None:
        """As many of a request's host blocks from ``first`` on as there is nothing to decide
        about: the tier has none of them, and the device's ``blocks`` hold what they are taken
        for. None if there is no such block."""
        if self.admission.threshold > 1:
            return None
        keys = self._sources.matching(hashes, group, first, blocks)
        if not keys or not self.stores.has_none(keys):
            return None
        size = self.tier.groups.block_sizes[group]
        return Run(self._parts(blocks, 0, len(keys)), keys, parent, (first + 1) * size, size)

    def _storable_from(
        self,
        progress: _Progress,
        group: int,
        blocks: list[KVCacheBlock],
        first: int,
        ended: bool,
    ) -> tuple[list[Storable], int]:
        """Of a request's host blocks from ``first`` on those that there is need to store, and
        where they end. ``blocks``: their parts."""
        size = self.tier.groups.block_sizes[group]
        last = first + len(blocks) // self.tier.groups.num_parts
        keys = self.tier.groups.keys(progress.hashes, group, max(first - 1, 0), last)
        parent = keys.pop(0) if first else None
        storable: list[Storable] = []
        for index, key in enumerate(keys, first):
            if not self.stores.has(key):
                if not self.admission.admits(key):
                    progress.refused_at = self.admission.version
                    return storable, index
                parts = self._parts(blocks, index - first, index - first + 1)
                sources = self._sources.of(parts, progress.hashes, index, key, group, ended)
                if sources is not None:
                    storable.append(Storable(sources, key, parent, (index + 1) * size))
                elif self._is_chained(group):
                    return storable, index
            parent = key
        return storable, last

    def _start(self, progress: _Progress, limits: Mapping[int, int]) -> None:
        """Skip and keep what the tier has (or is getting) already of the request's blocks before
        block ``limits[group]``."""
        progress.started = True
        for group in self._groups:
            if self._is_chained(group):
                self._skip_stored(progress, group, limits[group])
            else:
                keys = self.tier.groups.keys(progress.hashes, group, stop=limits[group])
                progress.kept.keep(filter(self.stores.has, keys))
        self._count_skipped(progress)

    def _count_skipped(self, progress: _Progress) -> None:
        """The cursors stand where the tier's part of the request ends."""
        if len(self.tier.groups.chained_ids) == len(self.tier.groups.ids):
            # Else a hit needs blocks of other groups too, and those say what has been loaded.
            progress.num_found = progress.next_index.copy()
        count = sum(progress.next_index[group] for group in self.tier.groups.chained_ids)
        self.tier.meter.add(metrics.SKIPPED, count, "already_stored")

    def _skip_stored(self, progress: _Progress, group: int, limit: int) -> None:
        """Set the cursor behind what the tier has (or is getting) of the request's first
        ``limit`` blocks."""
        count = self.stores.count_first(progress.hashes, group, limit)
        progress.next_index[group] = count
        progress.kept.keep_first(group, count)
