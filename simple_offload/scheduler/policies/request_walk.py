"""StoreWalk: walks along a request's blocks and plans stores of those that the tier lacks."""

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash, BlockHashWithGroupId, KVCacheBlock

from simple_offload import metrics
from simple_offload.scheduler.policies.admission import Admission
from simple_offload.scheduler.policies.base import BoundaryState
from simple_offload.scheduler.stores import Stores
from simple_offload.scheduler.tier import block_pool
from simple_offload.scheduler.tier.cpu_tier import CpuTier
from simple_offload.scheduler.tier.groups import Groups, make_keys
from simple_offload.scheduler.tier.run import Run, stretches

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import Request


class KeepSet:
    """Blocks of a request that must not leave the tier to make room for its other blocks: by group
    the first ones, and single keys. Keys are collected when the tier is full, which needs them."""

    def __init__(self, groups: Groups, tier: CpuTier, block_hashes: list[BlockHash]) -> None:
        self._groups = groups
        self._tier = tier
        self._hashes = block_hashes
        self._counts = [0] * len(groups.block_sizes)
        self._num_collected = self._counts.copy()
        self._collected: set[BlockHashWithGroupId] = set()

    def add_first(self, group: int, count: int) -> None:
        """Keep at least the first ``count`` blocks of a group."""
        self._counts[group] = max(self._counts[group], count)

    def add(self, keys: Iterable[BlockHashWithGroupId]) -> None:
        """Keep the blocks of ``keys`` too."""
        self._collected.update(keys)

    def collect(self) -> Set[BlockHashWithGroupId]:
        """Keys of kept blocks, chosen so that eviction meets one of them before any other kept
        block."""
        for group, count in enumerate(self._counts):
            if count > self._num_collected[group]:
                if group in self._groups.chained_ids:
                    self._collect_last(group, count)
                else:
                    self._collect_all(group, count)
        return self._collected

    def _collect_last(self, group: int, count: int) -> None:
        """The last block of a chain that is in the tier stands before all others, unless it is
        pinned."""
        count = self._tier.count_first(self._hashes, group, count)
        if count:
            num_tokens = count * self._groups.block_sizes[group]
            key = self._groups.key_at(self._hashes, group, num_tokens)
            if self._tier.is_free(key):
                self._collected.add(key)
            else:
                self._collect_all(group, count)

    def _collect_all(self, group: int, count: int) -> None:
        first = self._num_collected[group]
        if first < count:
            self._collected.update(self._groups.keys(self._hashes, group, first, count))
            self._num_collected[group] = count


@dataclass(slots=True, eq=False)
class Progress:
    """How much of a request is stored. What is left of an ended request outlives it."""

    hashes: list[BlockHash]
    """The request's, which grow with it."""
    source: "Request | None"
    """The request, if KV events are wanted. Otherwise nothing here refers to an ended request:
    dropping the last reference to thousands of tokens takes time."""
    next_index: list[int]
    """By group, the first block that is not dealt with; in a chained group a guess at it until
    ``started`` or the request's end."""
    num_found: list[int]
    """By chained group, how many first blocks the tier had (or was getting) before the first store
    of this request."""
    loads: bool
    """Whether the tier fills blocks of it before it runs."""
    keep: KeepSet
    """Its blocks in the tier, which must not leave to make room for the rest."""
    ran: bool = False
    """Whether a step with it has been scheduled since it got its blocks."""
    ready_at: int = 0
    """With fewer tokens computed, there is nothing to store."""
    started: bool = False
    """Whether its blocks that the tier had already have been skipped."""
    refused_at: int = -1
    """Version of the admission that refused the block at a cursor; -1 if none did."""


class DeviceBlocks:
    """Finds the device blocks that hold a request's contents. Its block table may have other
    blocks there, or none."""

    def __init__(self, groups: Groups, kv_cache_manager: "KVCacheManager") -> None:
        self._groups = groups
        self._device_pool: BlockPool = kv_cache_manager.block_pool

    def match(
        self,
        block_hashes: list[BlockHash],
        group: int,
        first: int,
        table: Sequence[KVCacheBlock],
        unhashed_from: int | None,
    ) -> tuple[list[BlockHashWithGroupId], Sequence[KVCacheBlock | None]]:
        """The keys of a request's host blocks from ``first`` on, and device blocks to store: for
        each one its sub-blocks, None where the device has them no more. ``table``: the sub-blocks
        of the block table. ``unhashed_from``: from this host block on, those of the table count
        without a hash."""
        num_sub_blocks, end = self._groups.num_sub_blocks, self._groups.key_ends[group]
        last = first + len(table) // num_sub_blocks
        hashes = self._groups.sub_block_hashes(block_hashes, group, first, last)
        held = [key or b"" for key in block_pool.keys_of(table)]
        # All at once, which makes no keys: all have the same length.
        if b"".join(held) == end.join(hashes) + (end if hashes else b""):
            return held[num_sub_blocks - 1 :: num_sub_blocks], table  # type: ignore[return-value]
        keys = make_keys(hashes, end)
        blocks: list[KVCacheBlock | None] = []
        for place, (block, key) in enumerate(zip(table, keys, strict=True)):
            if held[place] == key:
                blocks.append(block)
            else:
                index = first + place // num_sub_blocks
                may_lack_hash = unhashed_from is not None and index >= unhashed_from
                blocks.append(self._find(block, key, group, may_lack_hash))
        return keys[num_sub_blocks - 1 :: num_sub_blocks], blocks

    def _find(
        self, block: KVCacheBlock, key: BlockHashWithGroupId, group: int, may_lack_hash: bool
    ) -> KVCacheBlock | None:
        """The device block with the contents of ``key`` where the table has ``block``, which is
        not found by that key."""
        if block.is_null:
            # The window has moved on. The block may still lie in the free queue, unchanged.
            return block_pool.get_block(self._device_pool, key)
        is_own = may_lack_hash and block.block_hash is None and group in self._groups.stable_ids
        return block if is_own else None


class StoreWalk:
    """Moves a request's cursors along its block tables, one for each group. A cursor stops where
    the tier has no room, where the admission refuses a block, and where the device lacks a block
    of a chain; it continues from there the next time."""

    def __init__(
        self,
        tier: CpuTier,
        groups: Groups,
        stores: Stores,
        kv_cache_manager: "KVCacheManager",
        admission: Admission,
        meter: metrics.Meter,
    ) -> None:
        self._tier = tier
        self._groups = groups
        self._stores = stores
        self._admission = admission
        self._meter = meter
        self._device_blocks = DeviceBlocks(groups, kv_cache_manager)
        self._device_pool: BlockPool = kv_cache_manager.block_pool

    def start(self, progress: Progress, limits: Mapping[int, int]) -> None:
        """Skip and keep the blocks that the tier has (or is getting) already, before block
        ``limits[group]`` of each group."""
        progress.started = True
        for group in self._groups.ids:
            if group in self._groups.chained_ids:
                self.skip_stored(progress, group, limits[group])
            else:
                keys = self._groups.keys(progress.hashes, group, stop=limits[group])
                progress.keep.add(filter(self._stores.has, keys))
        self.count_skipped(progress)

    def count_skipped(self, progress: Progress) -> None:
        """The cursors stand where the tier's part of the request ends."""
        if self._groups.all_chained:
            # Otherwise a hit needs blocks of other groups too, and their loads show what is found.
            progress.num_found = progress.next_index.copy()
        count = sum(progress.next_index[group] for group in self._groups.chained_ids)
        self._meter.add(metrics.SKIPPED, count, "already_stored")

    def skip_stored(self, progress: Progress, group: int, limit: int) -> None:
        """Set the cursor behind the blocks that the tier has (or is getting), among the request's
        first ``limit``."""
        guess = progress.next_index[group]
        count = self._stores.count_first(progress.hashes, group, limit, guess)
        progress.next_index[group] = count
        progress.keep.add_first(group, count)

    def store_ready(
        self,
        progress: Progress,
        ready: Mapping[int, int],
        tables: Mapping[int, list[KVCacheBlock]],
        first: Sequence[int],
        unhashed_from: Mapping[int, int],
    ) -> bool:
        """Plan stores from the groups' cursors on, up to block ``ready[group]``. ``tables``: by
        group the request's blocks from block ``first[group]`` on. ``unhashed_from``: by group, from
        which block on the table's blocks need no hash. False: some blocks must wait.

        A hit needs every group, so a tier that is too small for the request should hold the
        beginning of each: groups take turns.
        """
        sizes, next_index = self._groups.block_sizes, progress.next_index
        behind = [group for group in ready if next_index[group] < ready[group]]
        if not behind:
            return True
        if not progress.started:
            self.start(progress, ready)
            behind = [group for group in ready if next_index[group] < ready[group]]
        fits = len(ready) == 1 or 2 * sum(ready.values()) <= self._tier.num_blocks
        turn = max(ready.values()) if fits else 1
        while behind:
            group = behind[0]
            if len(behind) > 1:
                group = min(behind, key=lambda group: next_index[group] * sizes[group])
            start = next_index[group]
            stop = min(start + turn, ready[group])
            table = self._groups.sub_blocks(
                tables[group], start - first[group], stop - first[group]
            )
            if not self._store(progress, group, table, unhashed_from.get(group)):
                return False
            behind = [group for group in ready if next_index[group] < ready[group]]
        return True

    def store_state(self, progress: Progress, state: BoundaryState) -> None:
        """Plan the store of a state that vLLM hands over, wherever the cursors are."""
        group, size = state.group, self._groups.block_sizes[state.group]
        if group not in self._groups.ids:
            return
        hashes = progress.hashes
        key = self._groups.key_at(hashes, group, state.num_tokens)
        block = self._device_pool.blocks[state.block_id]
        # A block that was given up since it was handed over has lost its hash.
        if self._stores.has(key) or block.block_hash != key or not self._admission.admits(key):
            return
        before = (state.num_tokens - 1) // size * size
        parent = self._groups.key_at(hashes, group, before) if before else None
        if not progress.started:
            sizes = self._groups.block_sizes
            self.start(progress, {g: state.num_tokens // sizes[g] for g in self._groups.ids})
        run = Run((block,), (key,), parent, state.num_tokens, request=progress.source)
        if self._stores.plan(run, progress.keep.collect, self._device_pool):
            progress.keep.add((key,))

    def _store(
        self,
        progress: Progress,
        group: int,
        table: list[KVCacheBlock],
        unhashed_from: int | None,
    ) -> bool:
        """Store those host blocks from the group's cursor on that the tier lacks, and move the
        cursor. ``table``: their sub-blocks. False: the request's further blocks must wait."""
        first, size = progress.next_index[group], self._groups.block_sizes[group]
        hashes, num_sub_blocks = progress.hashes, self._groups.num_sub_blocks
        is_chained = group in self._groups.chained_ids
        parent = self._groups.key_at(hashes, group, first * size) if first else None
        if is_chained and parent is not None and not self._stores.has(parent):
            return False
        keys, blocks = self._device_blocks.match(hashes, group, first, table, unhashed_from)
        places, end = self._choose(
            progress, keys, blocks if blocks is not table else (), is_chained
        )
        num_planned = 0
        for start, stop in stretches(places):
            run = Run(
                cast(
                    Sequence[KVCacheBlock],
                    blocks[start * num_sub_blocks : stop * num_sub_blocks],
                ),
                keys[start:stop],
                keys[start - 1] if start else parent,
                (first + start + 1) * size,
                size,
                request=progress.source,
            )
            count = self._stores.plan(run, progress.keep.collect, self._device_pool)
            num_planned += count
            if count < stop - start:
                end = start + count
                break
        if is_chained:
            self._meter.add(metrics.SKIPPED, end - num_planned, "already_stored")
        progress.keep.add_first(group, first + end)
        progress.next_index[group] = first + end
        return end == len(keys)

    def _choose(
        self,
        progress: Progress,
        keys: list[BlockHashWithGroupId],
        blocks: Sequence[KVCacheBlock | None],
        is_chained: bool,
    ) -> tuple[Sequence[int], int]:
        """Places in ``keys`` of the blocks to store, and where the cursor stops. ``blocks``: as
        ``DeviceBlocks.match`` returns them; empty if none is missing."""
        places, end = self._stores.lacking(keys), len(keys)
        num_admitted = self._admission.num_admitted(keys, places)
        if num_admitted < len(places):
            progress.refused_at = self._admission.version
            end = places[num_admitted]
            places = places[:num_admitted]
        if blocks:
            count = self._groups.num_sub_blocks
            there = []
            for place in places:
                if all(block is not None for block in blocks[place * count : (place + 1) * count]):
                    there.append(place)
                elif is_chained:
                    return there, place
            places = there
        return places, end
