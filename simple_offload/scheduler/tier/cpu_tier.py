"""CpuTier: the host tier, made of vLLM's own coordinator and block pool.

The rest of the scheduler side knows the tier by this class alone. The tier need not hold what the
device has: a hit continues from the device's blocks into the tier's. Which block leaves first:
``segments.py``.

A host block may hold several device blocks (``groups.py``). The ranks have slots of one device
block each; a host block's slots are neighbours.
"""

import gc
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from vllm.utils.math_utils import cdiv
from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    BlockHashWithGroupId,
    KVCacheBlock,
    get_group_id,
)

from simple_offload import metrics
from simple_offload.scheduler.tier import block_pool
from simple_offload.scheduler.tier.groups import Groups
from simple_offload.scheduler.tier.leases import RELEASED, Lease
from simple_offload.scheduler.tier.lookup import HostHit, Lookup
from simple_offload.scheduler.tier.run import Run
from simple_offload.scheduler.tier.segments import Segments
from simple_offload.transfer import BlockIds


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
        self, coordinator: KVCacheCoordinator, groups: Groups, meter: metrics.Meter
    ) -> None:
        self._pool = coordinator.block_pool
        self._groups = groups
        self._meter = meter
        self.has_copies = groups.all_chained and len(groups.ids) == 1
        """Whether contents that the device has too may leave first. A hit needs blocks of every
        group from one place on. If the device has lost those of one group, copies of the others
        are all there is."""
        self._segments = Segments(self._pool)
        self._lookup = Lookup(coordinator, groups)
        self._private_groups: frozenset[int] = frozenset()
        self._num_places = 1
        self._at_place = np.zeros((1, 1), np.int32)  # [places, blocks]
        """By place of a rank in its pool, and by block id: the block with the rank's contents. It
        is another one in a private group only. That has a reference, and neither key nor queue,
        until the block that stands for it is allocated anew."""
        self._doubted: dict[int, int] = {}
        """By id of a block that a load failed to read: the first load id that could begin after
        the failure was known."""
        self.num_used = 0
        """Blocks with contents."""
        self.version = 0
        """Grows whenever a lookup might find something else than before."""
        self._expected: dict[BlockHashWithGroupId, int] = {}
        """By key, how many requests expect it."""
        self._on_removed: list[Callable[[Sequence[BlockHashWithGroupId]], None]] = []
        block_pool.on_removed(self._pool, self._call_back)
        self._cached = block_pool.cached(self._pool)
        self.has: Callable[[bytes], bool] = self._cached.__contains__
        """Whether a block holds a key."""

    # Size

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool, vLLM's null block included."""
        return len(self._pool.blocks)

    @property
    def num_others(self) -> int:
        """Blocks that another one stands for, in a private group."""
        return self._segments.num_others

    @property
    def max_contents(self) -> int:
        """Blocks without those, and without vLLM's null block."""
        return self._segments.max_contents

    @property
    def num_free(self) -> int:
        """Blocks without references, empty or not."""
        return self._segments.num_free

    @property
    def num_empty(self) -> int:
        """Blocks without contents and references; fewer are counted while others are pinned."""
        return max(0, self.num_free - self.num_used)

    def grow(self, num_blocks: int) -> None:
        """Have ``num_blocks`` blocks from now on, vLLM's null block included; no effect if there
        are more. New blocks are the next to be allocated, lowest id first, so that blocks stored
        together lie together."""
        with _collector_paused():
            block_pool.add_blocks(self._pool, max(0, num_blocks - self.num_blocks))
        if self._private_groups:
            new = np.arange(self._at_place.shape[1], self.num_blocks, dtype=np.int32)
            new = np.tile(new, (self._num_places, 1))
            self._at_place = np.concatenate([self._at_place, new], axis=1)
        self._segments.grow()

    def share(self, private_groups: frozenset[int], num_places: int) -> None:
        """Up to ``num_places`` ranks share these blocks. In ``private_groups``, contents differ
        between them, and take a block for each. Called before the first block is allocated."""
        if private_groups:
            self._private_groups, self._num_places = private_groups, num_places
            self._at_place = np.tile(self._at_place[:1], (num_places, 1))

    def slots(self, blocks: Iterable[KVCacheBlock]) -> list[int]:
        """Slots of the sub-blocks of ``blocks`` in each rank's host memory, in order. The first
        slots, as many as a block has, are the null block's."""
        count = self._groups.num_sub_blocks
        if count == 1:
            return [block.block_id for block in blocks]
        return [block.block_id * count + place for block in blocks for place in range(count)]

    def slots_by_place(self, slots: BlockIds) -> BlockIds | None:
        """``[places, len(slots)]``: where the rank at each place of its pool has the contents of
        ``slots``. None if that is the same place for all."""
        if not self._private_groups:
            return None
        count = self._groups.num_sub_blocks
        return self._at_place[:, slots // count].astype(np.int64) * count + slots % count

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

    def absent(self, keys: Iterable[BlockHashWithGroupId]) -> set[BlockHashWithGroupId]:
        """Those of ``keys`` that no block holds."""
        return set(keys).difference(self._cached)

    def ids_of(self, keys: Iterable[BlockHashWithGroupId]) -> list[int]:
        """Ids of the blocks that hold those of ``keys`` which a block holds."""
        return [block.block_id for block in block_pool.find_blocks(self._pool, keys) if block]

    # References

    def pin(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Add a reference to each block of a hit: it cannot be evicted. A request has found these
        blocks, so they are protected, too, once they are free."""
        self._segments.pin(blocks)

    def unpin(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Drop a reference to each block, parents before children. Those without references become
        the most recently used."""
        self._segments.unpin(blocks)

    def unpin_loaded(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Likewise, for blocks that the device has loaded: they become copies, and the first to
        leave, unless it may have a part of one only."""
        is_whole = self._groups.num_sub_blocks == 1 and all(block_pool.keys_of(blocks))
        if self.has_copies and is_whole:
            self._segments.unpin_copies(blocks)
        else:
            self._segments.unpin(blocks)

    # Filling

    def allocate(
        self, count: int, keep: Container[BlockHashWithGroupId] = frozenset()
    ) -> list[KVCacheBlock]:
        """Up to ``count`` pinned, empty blocks; fewer if there is no room without evicting a block
        with a key in ``keep``."""
        blocks, copies, others = self._segments.get_new_blocks(count, keep)
        if copies or others:
            self.version += 1
            self.trust(blocks)
            self._on_lost(len(copies), "copy")
            self._on_lost(len(others), "lru")
        return blocks

    def allocate_for(
        self, keys: Sequence[BlockHashWithGroupId], keep: Container[BlockHashWithGroupId]
    ) -> list[KVCacheBlock]:
        """``allocate`` a block for the contents of each of ``keys``, from the first on. One of a
        private group takes as many blocks as a pool has ranks; the first stands for all."""
        if not self._private_groups:
            return self.allocate(len(keys), keep)
        widths = [self._num_places if self._is_private(key) else 1 for key in keys]
        blocks: list[KVCacheBlock] = []
        while (num_lacking := sum(widths) - len(blocks)) > 0:
            # Each evicted block may bring the others that it stands for.
            new = self.allocate(cdiv(num_lacking, self._num_places), keep)
            if not new:
                break
            blocks += self._split(new)
        allocated = []
        for width in widths:
            if width > len(blocks):
                break
            allocated.append(self._join(blocks[:width]))
            del blocks[:width]
        self.unpin(blocks)
        return allocated

    def commit(self, runs: Iterable[Run]) -> list[list[int]]:
        """Make the host blocks of ``runs``, whose bytes are complete on every rank, findable by
        their keys, and unpin them.

        Returns for each run the places of blocks whose key another block holds by now. They are
        free and empty again.
        """
        return [self._commit(run) for run in runs]

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
        """Empty ``blocks``, at once. References stay. Their descendants leave in their turn, or are
        found again when these contents return."""
        lost = [block for block in blocks if block.block_hash]
        self.version += 1
        self._pool.evict_blocks({block.block_id for block in lost})
        self._segments.on_emptied(lost)
        self.trust(lost)
        self._on_lost(len(lost), "load_failed")

    def reset(self) -> None:
        """Empty all blocks, at once. References stay."""
        self.version += 1
        self._segments.empty_all()
        self._doubted.clear()
        self._on_lost(self.num_used, "reset")

    def on_removed(self, callback: Callable[[Sequence[BlockHashWithGroupId]], None]) -> None:
        """Call ``callback`` with the keys of all blocks that lose their contents."""
        self._on_removed.append(callback)

    # Wishes

    def make_lease(self, seconds: float | None, session: bytes) -> Lease:
        """A lease that ends in ``seconds``; None: a release."""
        until = RELEASED if seconds is None else self._segments.clock() + seconds
        return Lease(until, session)

    def lease(self, block_ids: Iterable[int], lease: Lease) -> None:
        """Keep these blocks, which have contents, parents before children, before others until
        ``lease`` ends, or release them: they leave before others, but for those in use, and those
        kept for another session. Softly: a part of the tier only is kept, and all of that is
        evicted where nothing else is left."""
        self._segments.lease(block_ids, lease)

    def lease_of(self, block_id: int) -> Lease | None:
        """The lease of a block that is kept, and may be about to lose its contents."""
        return self._segments.lease_of(block_id)

    def is_released(self, block_id: int) -> bool:
        """Whether a block, which may be about to lose its contents, has been released, and not
        found since."""
        return self._segments.is_released(block_id)

    # vLLM's queue

    @property
    def num_expected(self) -> int:
        """Contents that requests expect, in the tier or not."""
        return len(self._expected)

    def expect(self, keys: Sequence[BlockHashWithGroupId]) -> None:
        """A request in vLLM's queue wants contents with ``keys``. They leave last, also those that
        the tier gets later, until this is called off as often by ``stop_expecting``."""
        expected = self._expected
        for key in keys:
            expected[key] = expected.get(key, 0) + 1
        self._segments.expect(self.ids_of(keys))

    def stop_expecting(self, keys: Sequence[BlockHashWithGroupId]) -> None:
        """A request that has expected ``keys``, parents before children, expects them no more."""
        expected, over = self._expected, []
        for key in keys:
            if expected[key] > 1:
                expected[key] -= 1
            else:
                del expected[key]
                over.append(key)
        self._segments.stop_expecting(self.ids_of(over))

    # What the device has too

    def watch_device(self, keys: Callable[[], Container[bytes]]) -> None:
        """From now on ``keys`` returns the keys that the device finds: it may have contents twice,
        and let go of one of them only."""
        self._segments.device_keys = keys

    def add_copies(self, keys: Sequence[BlockHashWithGroupId]) -> list[KVCacheBlock | None]:
        """The device has got contents with ``keys``, parents before children, each once, for
        requests that find or recompute them. Their blocks in the tier become copies, and the first
        to leave. A tier without copies makes them the most recently used instead. Returns the block
        of each key; none if no key has one."""
        if self._cached.keys().isdisjoint(keys):
            return []
        found = block_pool.find_blocks(self._pool, keys)
        blocks = list(filter(None, found))
        if self.has_copies:
            self._segments.add_copies(blocks)
        else:
            self.pin(blocks)
            self.unpin(blocks)
        return found

    def on_request(self, block_hashes: Sequence[bytes]) -> None:
        """A request gets its blocks. It wants contents with ``block_hashes``, in the tier or not.
        Where requests miss much that has left, copies make room. No effect on a tier without
        copies."""
        if self.has_copies:
            self._segments.on_request(block_hashes)

    def on_copies_found(self, block_ids: BlockIds) -> None:
        """Requests have found the contents of these copies on the device."""
        self._segments.on_copies_found(block_ids)

    def on_let_go(self, block_ids: BlockIds) -> None:
        """The device has let go of the contents of its copies of these blocks, in this order. They
        become the most recently used, and protected if requests have found them. No effect on a
        tier without copies."""
        if self.has_copies:
            self._segments.on_let_go(block_ids)

    def was_found(self, block_id: int) -> bool:
        """Whether a request has found the contents of a block, which may be about to lose them."""
        return self._segments.was_found(block_id)

    def unfound(self, block_ids: BlockIds) -> list[BlockHashWithGroupId]:
        """The keys of those of the blocks that no request has found."""
        return self._segments.unfound(block_ids)

    def remove_all_copies(self) -> None:
        """The device has let go of all its contents at once."""
        self._segments.remove_all_copies()

    def renew(self, keys: Iterable[BlockHashWithGroupId]) -> None:
        """Make the blocks of ``keys``, parents before children, the most recently used, for a tier
        without copies: its blocks are in the order in which they came."""
        self._segments.renew(filter(None, block_pool.find_blocks(self._pool, keys)))

    # Details

    def _is_private(self, key: BlockHashWithGroupId) -> bool:
        return get_group_id(key) in self._private_groups

    def _join(self, blocks: Sequence[KVCacheBlock]) -> KVCacheBlock:
        """Have the first one stand for all of ``blocks``."""
        first = blocks[0]
        self._at_place[: len(blocks), first.block_id] = [block.block_id for block in blocks]
        self._segments.add_others(len(blocks) - 1)
        return first

    def _split(self, blocks: Sequence[KVCacheBlock]) -> list[KVCacheBlock]:
        """``blocks``, and those that they have stood for."""
        ids = np.array([block.block_id for block in blocks])
        at_place = self._at_place[:, ids]
        self._at_place[:, ids] = ids
        others = [self._pool.blocks[i] for i in at_place[at_place != ids].tolist()]
        self._segments.num_others -= len(others)
        return [*blocks, *others]

    def _commit(self, run: Run) -> list[int]:
        """``commit`` for one run."""
        blocks, keys, inner_keys = run.host_blocks, run.keys, run.inner_keys
        useless = block_pool.cache_blocks(self._pool, blocks, keys)
        if useless:
            self.unpin([blocks[place] for place in useless])
            places = sorted(set(range(len(keys))).difference(useless))
            blocks, keys = [blocks[i] for i in places], [keys[i] for i in places]
            inner_keys = [inner_keys[i] for i in places] if inner_keys else ()
        for block, of_block in zip(blocks, inner_keys, strict=False):
            for inner_key in of_block:
                block_pool.add_key(self._pool, block, inner_key)
        self._segments.add(blocks, copies=run.on_device and self.has_copies)
        if not self._expected.keys().isdisjoint(keys):
            self._segments.expect(self.ids_of([key for key in keys if key in self._expected]))
        self.version += len(keys)
        self.num_used += len(keys)
        return useless

    def _call_back(self, keys: Sequence[BlockHashWithGroupId]) -> None:
        for callback in self._on_removed:
            callback(keys)

    def _on_lost(self, count: int, reason: str) -> None:
        """``count`` blocks have lost their contents."""
        self.num_used -= count
        self._meter.add(metrics.EVICTED, count, reason)
