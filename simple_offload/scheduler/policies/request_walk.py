"""StoreWalk: goes along a request's blocks and plans stores of those that the tier lacks."""

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    BlockHashWithGroupId,
    KVCacheBlock,
    get_block_hash,
)

from simple_offload import metrics
from simple_offload.scheduler.policies.admission import Admission
from simple_offload.scheduler.policies.base import BoundaryState
from simple_offload.scheduler.stores import Storable, Stores
from simple_offload.scheduler.tier.cpu_tier import CpuTier
from simple_offload.scheduler.tier.groups import Groups
from simple_offload.scheduler.tier.lookup import Lookup
from simple_offload.scheduler.tier.run import Run

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager


class Kept:
    """A request's first host blocks, by group, and some more.

    Their keys are collected when somebody asks: only a full tier does.
    """

    def __init__(self, groups: Groups, lookup: Lookup, block_hashes: list[BlockHash]) -> None:
        self._groups = groups
        self._lookup = lookup
        self._hashes = block_hashes
        self._counts = [0] * len(groups.block_sizes)
        self._num_collected = self._counts.copy()
        self._collected: set[BlockHashWithGroupId] = set()

    def keep_first(self, group: int, count: int) -> None:
        """Keep at least the first ``count`` blocks of a group."""
        self._counts[group] = max(self._counts[group], count)

    def keep(self, keys: Iterable[BlockHashWithGroupId]) -> None:
        """Keep these too."""
        self._collected.update(keys)

    def collect(self) -> Set[BlockHashWithGroupId]:
        """Keys of which the queue of eviction has one before it has anything that is kept; none
        but of blocks that are kept."""
        for group, count in enumerate(self._counts):
            if count > self._num_collected[group]:
                if group in self._groups.chained_ids:
                    self._collect_last(group, count)
                else:
                    self._collect_all(group, count)
        return self._collected

    def _collect_last(self, group: int, count: int) -> None:
        """Of a chain the last block that is there stands before all others. Unless somebody holds
        it, it is all that one has to know."""
        count = self._lookup.count_first(self._hashes, group, count)
        if count:
            last = self._groups.key_at(self._hashes, group, count * self._groups.block_sizes[group])
            block = self._lookup.get(last)
            if block is not None and block.ref_cnt == 0:
                self._collected.add(last)
            else:
                self._collect_all(group, count)

    def _collect_all(self, group: int, count: int) -> None:
        first = self._num_collected[group]
        if first < count:
            self._collected.update(self._groups.keys(self._hashes, group, first, count))
            self._num_collected[group] = count


@dataclass(slots=True, eq=False)
class Progress:
    """Of a request, but not the request: what is left of one that has ended outlives it."""

    hashes: list[BlockHash]
    """The request's, which grow with it."""
    next_index: list[int]
    """By group, the first block that has not been dealt with; of a chained group a guess at it,
    until ``started`` or the request's end."""
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


class Sources:
    """Tells by what a device block is known whether it is the one to be copied: a block table
    may have another block there, or none any more."""

    def __init__(self, groups: Groups, kv_cache_manager: "KVCacheManager") -> None:
        self._groups = groups
        self._device_pool: BlockPool = kv_cache_manager.block_pool

    def matching(
        self,
        block_hashes: list[BlockHash],
        group: int,
        first: int,
        blocks: Sequence[KVCacheBlock],
    ) -> list[BlockHashWithGroupId]:
        """The keys of a request's host blocks from ``first`` on, up to the first one of which
        ``blocks``, the parts that the block table has, at least one, are not all what they are
        taken for."""
        num_parts, end = self._groups.num_parts, self._groups.key_ends[group]
        last = first + len(blocks) // num_parts
        hashes = self._groups.part_hashes(block_hashes, group, first, last)
        held: list[Any] = [block._block_hash or b"" for block in blocks]
        # All at once, which makes no keys: each is as long as any other.
        if b"".join(held) == end.join(hashes) + end:
            return held[num_parts - 1 :: num_parts]
        count = next(i for i, each in enumerate(hashes) if held[i] != each + end) // num_parts
        return held[num_parts - 1 : count * num_parts : num_parts]

    def of(
        self,
        parts: Sequence[KVCacheBlock],
        block_hashes: list[BlockHash],
        index: int,
        key: BlockHashWithGroupId,
        group: int,
        own: bool,
    ) -> tuple[KVCacheBlock, ...] | None:
        """The device blocks to store under ``key``, the request's host block ``index``, where the
        block table has ``parts``; None unless all of them are there. ``own``: the table's may lack
        a hash."""
        keys = [key]
        if self._groups.num_parts > 1:
            keys = self._groups.part_keys(block_hashes, group, index, index + 1)
        sources = []
        for part, part_key in zip(parts, keys, strict=True):
            source = self._of_part(part, part_key, group, own)
            if source is None:
                return None
            sources.append(source)
        return tuple(sources)

    def _of_part(
        self, block: KVCacheBlock, key: BlockHashWithGroupId, group: int, own: bool
    ) -> KVCacheBlock | None:
        """The device block to store under ``key``, where the block table has ``block``."""
        if block.is_null:
            # The window has moved on. The block may still lie in the free queue, unharmed.
            cached = self._device_pool.get_cached_block(get_block_hash(key), [group])
            return cached[0] if cached is not None else None
        if own and block.block_hash is None and group in self._groups.stable_ids:
            return block
        return block if block.block_hash == key else None


class StoreWalk:
    """Moves a request's cursors along its block tables, one for each group. A cursor stops where
    the tier has no room, where the admission refuses a block, and where the device does not have
    what it should; and goes on from there the next time."""

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
        self.groups = tier.groups
        self._sources = Sources(tier.groups, kv_cache_manager)
        self._device_pool: BlockPool = kv_cache_manager.block_pool

    def start(self, progress: Progress, limits: Mapping[int, int]) -> None:
        """Skip and keep what the tier has (or is getting) already of the request's blocks before
        block ``limits[group]``."""
        progress.started = True
        for group in self.groups.ids:
            if group in self.groups.chained_ids:
                self.skip_stored(progress, group, limits[group])
            else:
                keys = self.groups.keys(progress.hashes, group, stop=limits[group])
                progress.kept.keep(filter(self.stores.has, keys))
        self.count_skipped(progress)

    def count_skipped(self, progress: Progress) -> None:
        """The cursors stand where the tier's part of the request ends."""
        if self.groups.all_chained:
            # Else a hit needs blocks of other groups too, and those say what has been loaded.
            progress.num_found = progress.next_index.copy()
        count = sum(progress.next_index[group] for group in self.groups.chained_ids)
        self.tier.meter.add(metrics.SKIPPED, count, "already_stored")

    def skip_stored(self, progress: Progress, group: int, limit: int) -> None:
        """Set the cursor behind what the tier has (or is getting) of the request's first
        ``limit`` blocks."""
        guess = progress.next_index[group]
        count = self.stores.count_first(progress.hashes, group, limit, guess)
        progress.next_index[group] = count
        progress.kept.keep_first(group, count)

    def store_ready(
        self,
        progress: Progress,
        ready: Mapping[int, int],
        tables: Mapping[int, list[KVCacheBlock]],
        first: Sequence[int],
        own_from: Mapping[int, int],
    ) -> bool:
        """Plan stores from the groups' cursors on, up to block ``ready[group]``. ``tables``: by
        group the request's blocks from block ``first[group]`` on. ``own_from``: by group, from
        where on those are stored too that vLLM has not hashed. False: some have to be put off.

        A hit needs every group, so a tier that is too small for the request had better hold the
        beginning of each: groups take turns.
        """
        sizes, next_index = self.groups.block_sizes, progress.next_index
        behind = [group for group in ready if next_index[group] < ready[group]]
        if not behind:
            return True
        if not progress.started:
            self.start(progress, ready)
            behind = [group for group in ready if next_index[group] < ready[group]]
        alone = len(ready) == 1 or 2 * sum(ready.values()) <= self.tier.num_blocks
        turn = max(ready.values()) if alone else 1
        while behind:
            group = behind[0]
            if len(behind) > 1:
                group = min(behind, key=lambda group: next_index[group] * sizes[group])
            start = next_index[group]
            stop = min(start + turn, ready[group])
            blocks = self.groups.parts(tables[group], start - first[group], stop - first[group])
            if not self._store_run(progress, group, blocks, own_from.get(group)):
                return False
            behind = [group for group in ready if next_index[group] < ready[group]]
        return True

    def store_state(self, progress: Progress, state: BoundaryState) -> None:
        """Plan the store of a state that has been handed over, wherever the cursors are."""
        group, size = state.group, self.groups.block_sizes[state.group]
        if group not in self.groups.ids:
            return
        hashes = progress.hashes
        key = self.groups.key_at(hashes, group, state.num_tokens)
        block = self._device_pool.blocks[state.block_id]
        # A block that was given up since it was handed over has lost its hash.
        if self.stores.has(key) or block.block_hash != key or not self.admission.admits(key):
            return
        before = (state.num_tokens - 1) // size * size
        parent = self.groups.key_at(hashes, group, before) if before else None
        if not progress.started:
            sizes = self.groups.block_sizes
            self.start(progress, {g: state.num_tokens // sizes[g] for g in self.groups.ids})
        storable = Storable((block,), key, parent, state.num_tokens)
        if self.stores.plan([storable], progress.kept.collect, self._device_pool):
            progress.kept.keep((key,))

    def _store_run(
        self, progress: Progress, group: int, blocks: list[KVCacheBlock], own_from: int | None
    ) -> bool:
        """Store those of ``blocks``, the parts of the host blocks that follow the group's cursor,
        that there is need to, and move the cursor. False: not now, and nothing of the request
        after it either."""
        first, size = progress.next_index[group], self.groups.block_sizes[group]
        last = first + len(blocks) // self.groups.num_parts
        chained = group in self.groups.chained_ids
        parent = self.groups.key_at(progress.hashes, group, first * size) if first else None
        if chained and parent is not None and not self.stores.has(parent):
            return False
        plain = self._plain_run(progress.hashes, group, blocks, parent, first)
        num_plain = len(plain) if plain is not None else 0
        num_planned = 0
        if plain is not None:
            num_planned = self.stores.plan_run(plain, progress.kept.collect, self._device_pool)
        stop = first + num_planned
        if num_planned == num_plain and stop < last:
            others = self.groups.parts(blocks, num_plain, last - first)
            storable, stop = self._storable_from(progress, group, others, stop, own_from)
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
        size = self.groups.block_sizes[group]
        return Run(self.groups.parts(blocks, 0, len(keys)), keys, parent, (first + 1) * size, size)

    def _storable_from(
        self,
        progress: Progress,
        group: int,
        blocks: list[KVCacheBlock],
        first: int,
        own_from: int | None,
    ) -> tuple[list[Storable], int]:
        """Of a request's host blocks from ``first`` on those that there is need to store, and
        where they end. ``blocks``: their parts."""
        size = self.groups.block_sizes[group]
        last = first + len(blocks) // self.groups.num_parts
        keys = self.groups.keys(progress.hashes, group, max(first - 1, 0), last)
        parent = keys.pop(0) if first else None
        storable: list[Storable] = []
        for index, key in enumerate(keys, first):
            if not self.stores.has(key):
                if not self.admission.admits(key):
                    progress.refused_at = self.admission.version
                    return storable, index
                parts = self.groups.parts(blocks, index - first, index - first + 1)
                own = own_from is not None and index >= own_from
                sources = self._sources.of(parts, progress.hashes, index, key, group, own)
                if sources is not None:
                    storable.append(Storable(sources, key, parent, (index + 1) * size))
                elif group in self.groups.chained_ids:
                    return storable, index
            parent = key
        return storable, last
