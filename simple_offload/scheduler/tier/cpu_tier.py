"""CpuTier: the host tier, made of vLLM's own coordinator and block pool.

The rest of the scheduler side knows the tier by this class alone. The tail of a prefix leaves
before its head (``eviction.py``). A block may be committed before its parent, while the device
still has that: a hit then continues from the device's blocks into the tier's.

A host block may hold several device blocks (``groups.py``). The ranks have slots of one device
block each; a host block's slots are neighbours.
"""

import gc
from bisect import bisect_left
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager

from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
from vllm.v1.core.kv_cache_utils import BlockHash, BlockHashWithGroupId, KVCacheBlock

from simple_offload import metrics
from simple_offload.scheduler.tier import block_pool
from simple_offload.scheduler.tier.eviction import EvictionOrder
from simple_offload.scheduler.tier.groups import Groups
from simple_offload.scheduler.tier.lookup import HostHit, Lookup
from simple_offload.scheduler.tier.run import Run, stretches
from simple_offload.scheduler.tier.segmented_lru import SegmentedQueue


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Python's garbage collector would visit millions of new blocks again and again while they are
    made. None is garbage: it sees them once, afterwards."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class CpuTier:
    """Host blocks by contents. Single-threaded: vLLM calls the scheduler side from one thread."""

    def __init__(
        self,
        coordinator: KVCacheCoordinator,
        groups: Groups,
        meter: metrics.Meter,
        demotes: bool = False,
    ) -> None:
        """``demotes``: ``demote`` has an effect. It costs an entry for each parent."""
        self._pool = coordinator.block_pool
        self._groups = groups
        self._meter = meter
        self._queue = SegmentedQueue(self._pool)
        self._order = EvictionOrder(self._pool, self._queue, demotes, groups.is_chained)
        self._lookup = Lookup(coordinator, groups, self._order)
        self._doubted: dict[int, int] = {}
        """By id of a block that a load failed to read: the first load id that could begin after
        the failure was known."""
        self.num_used = 0
        """Blocks with contents."""
        self.num_lost = 0
        """Blocks that lost their contents, since the start."""
        self.version = 0
        """Grows whenever a lookup might find something else than before."""
        self._cached = block_pool.cached(self._pool)
        self.has: Callable[[bytes], bool] = self._cached.__contains__
        """Whether a block holds a key."""

    # Size

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool, vLLM's null block included."""
        return len(self._pool.blocks)

    @property
    def num_free(self) -> int:
        """Blocks without references, empty or not."""
        num_free: int = self._pool.get_num_free_blocks()
        return num_free

    def grow(self, num_blocks: int) -> None:
        """Have ``num_blocks`` blocks from now on, vLLM's null block included; no effect if there
        are more. New blocks are the next to be allocated, lowest id first, so that blocks stored
        together lie together."""
        with _collector_paused():
            block_pool.add_blocks(self._pool, max(0, num_blocks - self.num_blocks))
        self._order.grow()
        self._queue.grow()

    def slots(self, blocks: Iterable[KVCacheBlock]) -> list[int]:
        """Slots of the sub-blocks of ``blocks`` in each rank's host memory, in order. The first
        slots, as many as a block has, are the null block's."""
        count = self._groups.num_sub_blocks
        if count == 1:
            return [block.block_id for block in blocks]
        return [block.block_id * count + place for block in blocks for place in range(count)]

    def blocks_at(self, slots: Iterable[int]) -> list[KVCacheBlock]:
        """The blocks that these slots belong to, each once."""
        count = self._groups.num_sub_blocks
        return [self._pool.blocks[i] for i in dict.fromkeys(slot // count for slot in slots)]

    def num_blocks_at(self, slots: Sequence[int]) -> int:
        """Number of those blocks. No slot may be repeated."""
        return len(slots) if self._groups.num_sub_blocks == 1 else len(self.blocks_at(slots))

    # Finding

    def lookup(
        self, block_hashes: list[BlockHash], num_computed_tokens: int, max_tokens: int
    ) -> HostHit:
        """The longest prefix beyond ``num_computed_tokens`` that every group can supply, at most
        ``max_tokens`` tokens. Changes nothing: ``pin`` the hit's ``pins`` before anything else."""
        return self._lookup.find(block_hashes, num_computed_tokens, max_tokens)

    def has_none(self, keys: Sequence[BlockHashWithGroupId]) -> bool:
        """Whether no block holds one of ``keys``, at least one, of consecutive blocks."""
        if not self._order.early and self._groups.is_chained(keys[0]):
            return not self.has(keys[0])  # then its descendants are not there either
        return self._cached.keys().isdisjoint(keys)

    def count_first(
        self,
        block_hashes: list[BlockHash],
        group: int,
        limit: int,
        guess: int | None = None,
        is_coming: Callable[[bytes], bool] | None = None,
    ) -> int:
        """Number of the first ``limit`` blocks of a request in a chained group that are in the
        tier, or coming. If the chain has a gap, blocks behind it may be counted too. ``guess``:
        the probable answer, if not ``limit``."""
        return self._lookup.count_first(block_hashes, group, limit, guess, is_coming)

    @property
    def has_all_parents(self) -> bool:
        """Whether the parent of every block is in the tier too."""
        return self._groups.all_chained and not self._order.early

    def is_free(self, key: BlockHashWithGroupId) -> bool:
        """Whether a block holds ``key`` and has no references."""
        block = block_pool.get_block(self._pool, key)
        return block is not None and block.ref_cnt == 0

    # References

    def pin(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Add a reference to each block of a hit, parents before children: it cannot be evicted.
        A request has found these blocks, so they are protected, too, once they are free."""
        self._queue.pin(blocks)
        if self._groups.is_one_chain:
            self._queue.protect_chain(blocks)
        else:
            self._queue.protect(blocks)

    def unpin(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Drop a reference to each block, parents before children. Blocks without references join
        the free queue at their place in the order of eviction."""
        self._order.unpin(blocks)

    # Filling

    def allocate(
        self, count: int, keep: Callable[[], Container[BlockHashWithGroupId]] = frozenset
    ) -> list[KVCacheBlock]:
        """Up to ``count`` pinned, empty blocks; fewer if there is no room.

        Evicts blocks in order, up to the first one with a key in ``keep()``, which is called only
        if the tier is full: then a chain must not evict its own beginning.
        """
        blocks = block_pool.get_empty_blocks(self._pool, count)
        if len(blocks) == count:
            return blocks
        evicted, num_lost = self._order.evict(count - len(blocks), keep())
        if evicted:
            self.version += 1
            self.trust(evicted)
            self._on_lost(num_lost, "lru")
        return blocks + evicted

    def commit(self, runs: Iterable[Run]) -> list[list[int]]:
        """Make the host blocks of ``runs``, whose bytes are complete on every rank, findable by
        their keys, and unpin them.

        Returns for each run the places of blocks that no hit could use: their chain's head has
        left, or another block holds the key. They are free and empty again.
        """
        useless: list[list[int]] = []
        renewed: list[KVCacheBlock] = []
        count = 0
        for run in runs:
            useless.append(self._commit(run))
            count += len(run.keys) - len(useless[-1])
            if self._order.early:
                renewed += self._order.on_cached(run.keys)
        self.version += count
        self.num_used += count
        self._meter.add(metrics.STORED, count)
        for block in renewed:
            self._order.renew(block)  # its children stand anywhere, so it had better stand last
        return useless

    # Losing

    def doubt(self, blocks: Sequence[KVCacheBlock], load_id: int, next_load_id: int) -> None:
        """A load of ``blocks`` has failed. Blocks that an earlier load failed to read, before this
        one began, are dropped. ``next_load_id`` is greater than the id of any load so far.

        One failure says little about the blocks: a load only reads them, and one fault may fail
        all loads under way. Blocks that cannot be read fail the next load too.
        """
        again = [b for b in blocks if self._doubted.get(b.block_id, next_load_id) <= load_id]
        for block in blocks:
            if block.block_hash is not None:
                self._doubted.setdefault(block.block_id, next_load_id)
        if again:
            self.drop(again)

    def trust(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Clear the doubt about ``blocks``: a load has read them, or they have new contents."""
        if self._doubted:
            for block in blocks:
                self._doubted.pop(block.block_id, None)

    @property
    def has_doubts(self) -> bool:
        """Whether a load of any block has failed since its last success."""
        return bool(self._doubted)

    def drop(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Empty ``blocks`` and all their descendants, which could not be found any more, at once.
        References stay."""
        self.version += 1
        dropped = self._order.drop(b.block_id for b in blocks if b.block_hash is not None)
        for block_id in dropped:
            self._doubted.pop(block_id, None)
        self._on_lost(len(dropped), "load_failed")

    def reset(self) -> None:
        """Empty all blocks, at once. References stay."""
        self.version += 1
        self._order.reset()
        self._doubted.clear()
        self._on_lost(self.num_used, "reset")

    def on_removed(self, callback: Callable[[Sequence[BlockHashWithGroupId]], None]) -> None:
        """Call ``callback`` with the keys of all blocks that lose their contents."""
        block_pool.on_removed(self._pool, callback)

    # What leaves first

    def on_request_finished(
        self,
        block_hashes: list[BlockHash],
        num_blocks: Sequence[int],
        num_found: Sequence[int],
        *,
        loaded: bool,
    ) -> None:
        """A request has ended. By group: its first ``num_blocks`` blocks become the most recently
        used, so that its rest, which is stored next, evicts others' blocks; unless it was
        ``loaded``, which made them so. Its first ``num_found`` blocks become protected. Only
        chained groups count."""
        for group in self._groups.chained_ids:
            if not loaded:
                self._renew_first(block_hashes, group, num_blocks[group])
            self._protect_first(block_hashes, group, num_found[group])

    def demote(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Let ``blocks``, parents before children, leave first, because the device has them too.
        Without effect unless the tier ``demotes``, or while it has empty blocks."""
        if self._order.counts_children:
            self._order.demote(blocks)

    def promote(self, keys: Iterable[BlockHashWithGroupId]) -> None:
        """Make the demoted blocks among those of ``keys``, and their ancestors, the most recently
        used: the device is about to evict its copies."""
        demoted = self._queue.demoted
        for key in keys if demoted else ():
            block = block_pool.get_block(self._pool, key)
            if block is not None and block.block_id in demoted:
                self._order.renew(block)

    # Details

    def _commit(self, run: Run) -> list[int]:
        """``commit`` for one run."""
        useless = self._useless_places(run)
        places: Sequence[int] = range(len(run.keys))
        if useless:
            places = [place for place in places if place not in set(useless)]
            self.unpin([run.host_blocks[place] for place in useless])
        for start, stop in stretches(places):
            key = run.keys[start - 1] if start else run.parent
            parent = block_pool.get_block(self._pool, key) if key is not None else None
            if parent is not None:
                key = parent.block_hash  # equal, but the very same object is faster to compare
            blocks, keys = run.host_blocks, run.keys
            if stop - start < len(run.keys):
                blocks, keys = blocks[start:stop], keys[start:stop]
            self._order.cache_chain(blocks, keys, key)
            for block, inner_keys in zip(blocks, run.inner_keys[start:stop], strict=False):
                for inner_key in inner_keys:
                    block_pool.add_key(self._pool, block, inner_key)
            if parent is None and key is not None and self._groups.is_chained(keys[0]):
                self._order.add_early(key, blocks[0])
            self._order.free(blocks, parent)
        return useless

    def _useless_places(self, run: Run) -> list[int]:
        """Places of blocks that no hit could use."""
        keys, parent = run.keys, run.parent
        is_orphan = parent is not None and not self.has(parent) and self._groups.is_chained(keys[0])
        if self.has_none(keys) and (run.early or not is_orphan):
            return []
        useless = []
        is_chained = self._groups.is_chained(keys[0])
        has_parent = run.early or not is_orphan
        for place, key in enumerate(keys):
            is_held = self.has(key)
            if is_held or (is_chained and not has_parent):
                useless.append(place)
            has_parent = is_held or has_parent
        return useless

    def _renew_first(self, block_hashes: list[BlockHash], group: int, count: int) -> None:
        """Make the first ``count`` blocks of a request, up to the first demoted one, the most
        recently used. Some may not have arrived yet."""
        if count == 0:
            return
        size = self._groups.block_sizes[group]
        head, last = (
            block_pool.get_block(self._pool, self._groups.key_at(block_hashes, group, num_tokens))
            for num_tokens in (size, count * size)
        )
        if last is None:
            count = self.count_first(block_hashes, group, count)
            self._renew_first(block_hashes, group, count)
        elif not self._order.renew_pieces(head, last, count):
            self._order.renew_chain(self._lookup.first_blocks(block_hashes, group, count))

    def _protect_first(self, block_hashes: list[BlockHash], group: int, count: int) -> None:
        """Protect those of the first ``count`` blocks of a request that are there. Visits no block
        that is protected already."""

        def is_new(index: int) -> bool:
            num_tokens = (index + 1) * self._groups.block_sizes[group]
            key = self._groups.key_at(block_hashes, group, num_tokens)
            block = block_pool.get_block(self._pool, key)
            return block is None or not self._queue.is_protected[block.block_id]

        if count and is_new(count - 1):
            first = bisect_left(range(count), True, key=is_new)
            self._order.protect(self._lookup.blocks(block_hashes, group, first, count))

    def _on_lost(self, count: int, reason: str) -> None:
        """``count`` blocks have lost their contents."""
        self.num_used -= count
        self.num_lost += count
        self._meter.add(metrics.EVICTED, count, reason)
