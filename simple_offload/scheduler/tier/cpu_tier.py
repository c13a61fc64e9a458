"""CpuTier: the host tier, made of vLLM's own coordinator and block pool.

The rest of the scheduler side knows the tier by this class alone. The tier need not hold what the
device has: a hit continues from the device's blocks into the tier's. Which block leaves first:
``eviction_order.py``.

A host block may hold several device blocks (``groups.py``). The ranks have slots of one device
block each; a host block's slots are neighbours.
"""

import gc
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray
from vllm.utils.math_utils import cdiv
from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    BlockHashWithGroupId,
    KVCacheBlock,
    get_group_id,
)

from simple_offload import metrics
from simple_offload.miss_reason import MissReason
from simple_offload.scheduler.tier import block_pool
from simple_offload.scheduler.tier.eviction_order import EvictionOrder
from simple_offload.scheduler.tier.groups import Groups
from simple_offload.scheduler.tier.history import History
from simple_offload.scheduler.tier.lookup import HostHit, Lookup
from simple_offload.scheduler.tier.run import Run
from simple_offload.transfer import BlockIds

_FEW_EVICTED, _NOTED = 64, 4
"""If more blocks of chains are evicted at once, the history notes one in four: a full tier evicts
thousands for one prompt."""


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
        *,
        is_exclusive: bool,
    ) -> None:
        self._pool = coordinator.block_pool
        self._groups = groups
        self._meter = meter
        self.is_exclusive = is_exclusive
        """Whether contents that the device has too are duplicates, and leave first."""
        self._order = EvictionOrder(self._pool)
        self._lookup = Lookup(coordinator, groups)
        self._private_groups: frozenset[int] = frozenset()
        self._num_places = 1
        self._at_place = np.zeros((1, 1), np.int32)  # [places, blocks]
        """By place of a rank in its pool, and by block id: the block with the rank's contents. It
        is another one in a private group only. That has a reference, and neither key nor queue,
        until the block that stands for it is allocated anew."""
        self.num_used = 0
        """Blocks with contents."""
        self.version = 0
        """Grows whenever a lookup might find something else than before."""
        self.history = History()
        """Why contents are in no cache, for those that ask for them again."""
        self._reserved: dict[BlockHashWithGroupId, int] = {}
        """By key, how often it is reserved."""
        self._on_removed: list[Callable[[Sequence[BlockHashWithGroupId]], None]] = []
        self._removed: list[BlockHashWithGroupId] = []
        """Keys that the pool has removed since the last callbacks: one for each of its queues
        would be many (``_on_lost``)."""
        block_pool.on_removed(self._pool, self._removed.extend)
        self._cached = block_pool.cached(self._pool)
        self.has: Callable[[bytes], bool] = self._cached.__contains__
        """Whether a block holds a key."""

    # Size

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool, vLLM's null block included."""
        return len(self._pool.blocks)

    @property
    def max_contents(self) -> int:
        """Blocks that can have contents of their own: no replicas, and not vLLM's null block."""
        return self._order.max_contents

    @property
    def num_duplicates(self) -> int:
        """Blocks of contents that the device has too. Of an exclusive tier."""
        return self._order.num_duplicates

    @property
    def num_evicted(self) -> int:
        """Evicted contents since the start that were no duplicates."""
        return self._order.num_evicted

    @property
    def num_free(self) -> int:
        """Blocks without references, empty or not."""
        return self._order.num_free

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
        self._order.grow()

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
        """Number of blocks that these slots belong to. No slot may be repeated."""
        return len(slots) if self._groups.num_sub_blocks == 1 else len(self.blocks_at(slots))

    # Finding

    def lookup(
        self, block_hashes: list[BlockHash], num_computed_tokens: int, max_tokens: int
    ) -> HostHit:
        """The longest prefix beyond ``num_computed_tokens`` that every group can supply, at most
        ``max_tokens`` tokens. Changes nothing: ``pin`` the hit's ``pins`` before anything else."""
        return self._lookup.find(block_hashes, num_computed_tokens, max_tokens)

    def lacks(self, keys: Iterable[BlockHashWithGroupId]) -> bool:
        """Whether no block holds one of ``keys``."""
        return self._cached.keys().isdisjoint(keys)

    def absent(self, keys: Iterable[BlockHashWithGroupId]) -> set[BlockHashWithGroupId]:
        """The ``keys`` that no block holds."""
        return set(keys).difference(self._cached)

    def ids_of(self, keys: Iterable[BlockHashWithGroupId]) -> list[int]:
        """Ids of the blocks with those ``keys`` that are in the tier."""
        return [block.block_id for block in block_pool.find_blocks(self._pool, keys) if block]

    # References

    def pin(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Add a reference to each block of a hit: it cannot be evicted. A request has found these
        blocks, so they are protected, too, once they are free."""
        self._order.pin(blocks)

    def unpin(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Drop a reference to each block, parents before children. Those without references become
        the most recently used."""
        self._order.unpin(blocks)

    def unpin_loaded(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Unpin blocks that the device has loaded: they become duplicates, and the first to
        leave."""
        is_there = self.is_exclusive and all(block_pool.keys_of(blocks))
        self._order.unpin(blocks, duplicates=is_there)

    # Filling

    def allocate(self, count: int, keep: Container[int] = ()) -> list[KVCacheBlock]:
        """Up to ``count`` pinned, empty blocks; fewer if there is no room without evicting a block
        whose id is in ``keep``."""
        blocks, duplicates, others = self._order.evict(count, keep)
        if duplicates or others:
            # A chain leaves from its end. What was lost before one that is noted is known to be.
            is_exact = len(others) <= _FEW_EVICTED or not self._groups.all_chained
            noted = others if is_exact else others[::_NOTED]
            self.history.note(MissReason.EVICTED, noted, self._order.num_evicted)
            self._on_lost(copy=len(duplicates), lru=len(others))
        return blocks

    def first_out(self, count: int) -> list[KVCacheBlock]:
        """The next blocks to leave: ``allocate(count)`` evicts no others."""
        return self._order.first_out(count)

    def allocate_for(
        self, keys: Sequence[BlockHashWithGroupId], keep: Container[int]
    ) -> list[KVCacheBlock]:
        """``allocate`` a block for the contents of each of ``keys``, from the first on. One of a
        private group takes as many blocks as a pool has ranks; the first stands for all."""
        if not self._private_groups:
            return self.allocate(len(keys), keep)
        widths = [
            self._num_places if get_group_id(key) in self._private_groups else 1 for key in keys
        ]
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

    def commit(self, run: Run) -> list[int]:
        """Make the host blocks of ``run``, whose bytes are complete on every rank, findable by
        their keys, and unpin them. Returns the places of blocks whose key another block holds by
        now. They are free and empty again."""
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
        self._order.add(blocks, duplicates=run.on_device and self.is_exclusive)
        if self._reserved and not self._reserved.keys().isdisjoint(keys):
            self._order.reserve(self.ids_of([key for key in keys if key in self._reserved]))
        self.version += len(keys)
        self.num_used += len(keys)
        return useless

    # Losing

    def drop(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Empty ``blocks``, which a load failed to read, at once. References stay. Their
        descendants leave in their turn, or are found again when these contents return."""
        lost = [block for block in blocks if block.block_hash]
        self._pool.evict_blocks({block.block_id for block in lost})
        self._order.on_emptied(lost)
        self.history.note(MissReason.LOAD_FAILED, [*self._removed])
        self._on_lost(load_failed=len(lost))

    def reset(self) -> None:
        """Empty all blocks, at once. References stay."""
        self._order.empty_all()
        self.history.note(MissReason.RESET, [*self._removed])
        self._on_lost(reset=self.num_used)

    def on_removed(self, callback: Callable[[Sequence[BlockHashWithGroupId]], None]) -> None:
        """Call ``callback`` with the keys of all blocks that lose their contents."""
        self._on_removed.append(callback)

    # What leaves last, and what leaves first

    @property
    def num_reserved(self) -> int:
        """Contents that are reserved, in the tier or not."""
        return len(self._reserved)

    def reserve(self, keys: Iterable[BlockHashWithGroupId]) -> None:
        """Contents with ``keys``, parents before children, leave last, also those that the tier
        gets later, until ``unreserve`` is called as often. The last reserved leaves first."""
        reserved = self._reserved
        new = []
        for key in keys:
            count = reserved.get(key, 0)
            reserved[key] = count + 1
            if not count:
                new.append(key)
        self._order.reserve(self.ids_of(new))

    def unreserve(self, keys: Iterable[BlockHashWithGroupId]) -> None:
        """Call off one ``reserve`` of each of ``keys``, parents before children. Contents that
        nothing reserves any more become protected."""
        reserved, over = self._reserved, []
        for key in keys:
            if reserved[key] > 1:
                reserved[key] -= 1
            else:
                del reserved[key]
                over.append(key)
        self._order.unreserve(self.ids_of(over))

    def release(self, keys: Iterable[BlockHashWithGroupId]) -> None:
        """Contents with ``keys``, parents before children, leave before all others that the device
        lacks, unless they are reserved, in use, or hit again."""
        self._order.release(self.ids_of(keys))

    def renew(self, keys: Iterable[BlockHashWithGroupId]) -> None:
        """Make the blocks of ``keys``, parents before children, the most recently used."""
        self._order.renew(filter(None, block_pool.find_blocks(self._pool, keys)))

    def touch(self, keys: Sequence[BlockHashWithGroupId]) -> None:
        """A request has hit or computed contents with ``keys``, parents before children. Their
        blocks become protected, and the most recently used."""
        blocks = list(filter(None, block_pool.find_blocks(self._pool, keys)))
        self.pin(blocks)
        self.unpin(blocks)

    # What the device has too, for an exclusive tier

    def device_got(self, keys: Sequence[BlockHashWithGroupId]) -> list[KVCacheBlock | None]:
        """The device has got contents with ``keys``, parents before children, each once, for
        requests that hit or compute them. Their blocks in the tier become duplicates, and the first
        to leave. Returns the block of each key; none if no key has one."""
        if self.lacks(keys):
            return []
        found = block_pool.find_blocks(self._pool, keys)
        self._order.device_got(list(filter(None, found)))
        return found

    def device_lost(self, block_ids: BlockIds, hit: NDArray[np.bool_]) -> None:
        """The device has lost the contents of these blocks, in this order, as far as they are
        duplicates. They become the most recently used, and protected if a request has ``hit``
        them."""
        self._order.device_lost(block_ids, hit)

    def on_device_reset(self) -> None:
        """The device has lost all its contents at once."""
        self._order.on_device_reset()

    def keys_at(self, block_ids: Iterable[int]) -> list[BlockHashWithGroupId]:
        """The keys of these blocks, as far as they have contents."""
        blocks = [self._pool.blocks[block_id] for block_id in block_ids]
        return [key for key in block_pool.keys_of(blocks) if key is not None]

    # Details

    def _join(self, blocks: Sequence[KVCacheBlock]) -> KVCacheBlock:
        """Have the first one stand for all of ``blocks``."""
        first = blocks[0]
        self._at_place[: len(blocks), first.block_id] = [block.block_id for block in blocks]
        self._order.max_contents -= len(blocks) - 1
        return first

    def _split(self, blocks: Sequence[KVCacheBlock]) -> list[KVCacheBlock]:
        """``blocks``, and their replicas at other places."""
        ids = np.array([block.block_id for block in blocks])
        at_place = self._at_place[:, ids]
        self._at_place[:, ids] = ids
        others = [self._pool.blocks[i] for i in at_place[at_place != ids].tolist()]
        self._order.max_contents += len(others)
        return [*blocks, *others]

    def _on_lost(self, **counts: int) -> None:
        """Blocks have lost their contents: by reason, how many."""
        self.version += 1
        for reason, count in counts.items():
            self.num_used -= count
            self._meter.add(metrics.EVICTED, count, reason)
        keys = [*self._removed]
        self._removed.clear()
        for callback in self._on_removed:
            callback(keys)
