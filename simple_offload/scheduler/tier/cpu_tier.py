"""CpuTier: the host blocks, managed by vLLM's own coordinator and block pool.

The tail of a prefix is evicted before its head (``eviction_order.py``): a chain without its head
could never be found again.

A block may come before its parent does, while only the device has that: a hit then goes on from
the device's blocks with the tier's.

A host block may hold several device blocks (``groups.py``). The ranks know nothing of that: they
have slots of a device block each, and a host block's are neighbours.
"""

import gc
from bisect import bisect_left
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
from vllm.v1.core.kv_cache_utils import BlockHash, BlockHashWithGroupId, KVCacheBlock

from simple_offload import metrics
from simple_offload.scheduler.tier import block_pool
from simple_offload.scheduler.tier.eviction import EvictionOrder
from simple_offload.scheduler.tier.groups import Groups
from simple_offload.scheduler.tier.integrity import check_integrity
from simple_offload.scheduler.tier.lookup import Lookup
from simple_offload.scheduler.tier.run import Run


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Python's garbage collector would go over millions of new blocks again and again while they
    are made, none of which is garbage: it sees them once, afterwards."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class CpuTier:
    """Host blocks by content. Single-threaded: vLLM calls the scheduler side from one thread."""

    def __init__(
        self,
        coordinator: KVCacheCoordinator,
        hash_block_size: int,
        num_parts: int = 1,
        meter: metrics.Meter | None = None,
        demotes: bool = False,
    ) -> None:
        """``hash_block_size``, ``num_parts``: as for ``Groups``. ``demotes``: ``demote`` may be
        used, for which what follows each block has to be counted."""
        self.coordinator = coordinator
        self.meter = meter or metrics.Meter()
        self.num_used = 0
        """Blocks that hold something."""
        self.num_lost = 0
        """Blocks that have ever lost what they held."""
        self.pool: BlockPool = coordinator.block_pool
        self.groups = Groups(coordinator, hash_block_size, num_parts)
        self.version = 0
        """Grows whenever a lookup might find something else than before."""
        self.order = EvictionOrder(self.pool, demotes, self.groups.is_chained)
        self.lookup = Lookup(coordinator, self.groups, self.order)
        self.doubted: dict[int, int] = {}
        """By id of a block that a load failed to read: the first load id that could begin after
        the failure was known."""

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool, vLLM's null block included."""
        return len(self.pool.blocks)

    def grow(self, num_blocks: int) -> None:
        """Have ``num_blocks`` blocks from now on, vLLM's null block included. Fewer than there
        are already change nothing. The new ones are the next to be allocated, lowest id first,
        so that what is stored together lies together."""
        with _collector_paused():
            new = [KVCacheBlock(block_id) for block_id in range(self.num_blocks, num_blocks)]
        self.pool.blocks.extend(new)
        self.order.grow()
        self.pool.num_gpu_blocks = self.num_blocks
        self.pool.free_block_queue.prepend_n(new)

    def slots(self, blocks: Iterable[KVCacheBlock]) -> list[int]:
        """Where the parts of ``blocks`` lie in each rank's host memory, in order. The first
        ``num_parts`` slots are the null block's."""
        count = self.groups.num_parts
        if count == 1:
            return [block.block_id for block in blocks]
        return [block.block_id * count + part for block in blocks for part in range(count)]

    def blocks_at(self, slots: Iterable[int]) -> list[KVCacheBlock]:
        """The blocks that these slots belong to, each once."""
        count = self.groups.num_parts
        return [self.pool.blocks[i] for i in dict.fromkeys(slot // count for slot in slots)]

    def num_blocks_at(self, slots: Sequence[int]) -> int:
        """How many those are. No slot may be there twice."""
        return len(slots) if self.groups.num_parts == 1 else len(self.blocks_at(slots))

    # Holding

    def pin(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Add a reference to each block: it cannot be evicted. Null blocks must not be among
        them (vLLM 0.32 counts references to those)."""
        self.order.pin(blocks)

    def protect(self, blocks: Sequence[KVCacheBlock]) -> None:
        """A request has found these blocks: what none has found will be evicted before them.
        They must be pinned, with what precedes them in their chains, as they are in a hit."""
        if self.groups.is_one_chain:
            self.order.segments.protect_chain(blocks)
        else:
            self.order.segments.protect(blocks)

    def unpin(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Drop a reference to each block, parents before children. What nobody refers to any
        more joins the free queue, in its place in the order of eviction."""
        self.order.unpin(blocks)

    def protect_first(self, block_hashes: list[BlockHash], group: int, count: int) -> None:
        """A request has found its first ``count`` blocks of a chained group: ``protect`` those
        that are there. No block is looked at that is protected."""

        def is_new(index: int) -> bool:
            num_tokens = (index + 1) * self.groups.block_sizes[group]
            block = self.lookup.get(self.groups.key_at(block_hashes, group, num_tokens))
            return block is None or not self.order.is_protected(block)

        if count and is_new(count - 1):
            first = bisect_left(range(count), True, key=is_new)
            self.order.protect(self.lookup.blocks(block_hashes, group, first, count))

    def refresh(self, block_hashes: list[BlockHash], group: int, count: int) -> None:
        """Make the first ``count`` blocks of a request of a chained group, as far as they are
        there and not demoted, the most recently used."""
        if count == 0:
            return
        size = self.groups.block_sizes[group]
        head = self.lookup.get(self.groups.key_at(block_hashes, group, size))
        last = self.lookup.get(self.groups.key_at(block_hashes, group, count * size))
        if last is None:
            # The last ones may not have arrived yet.
            self.refresh(block_hashes, group, self.lookup.count_first(block_hashes, group, count))
            return
        if not self.order.renew_pieces(head, last, count):
            self.order.renew_chain(self.lookup.first_blocks(block_hashes, group, count))

    @property
    def demotes(self) -> bool:
        """Whether ``demote`` may be used."""
        return self.order.demotes

    def demote(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Let ``blocks`` (parents before children), which the device has too, be evicted before
        all others."""
        self.order.demote(blocks)

    def promote(self, key: BlockHashWithGroupId) -> None:
        """Make the block of ``key`` and what precedes it the most recently used, if it is demoted:
        the device will not have it much longer."""
        demoted = self.order.demoted
        if demoted and (block := self.lookup.get(key)) and block.block_id in demoted:
            self.order.renew(block)

    # Filling

    def allocate(
        self, count: int, keep: Callable[[], Container[BlockHashWithGroupId]] = frozenset
    ) -> list[KVCacheBlock]:
        """Up to ``count`` pinned blocks to be filled, fewer where there is no room.

        Evicts blocks in their order, but stops at one that holds a key in ``keep()``,
        which is asked for then only: the tier is full of the very chain that wants to grow.
        """
        blocks = block_pool.take_empty(self.pool, count)
        if len(blocks) == count:
            return blocks
        evicted, num_lost = self.order.evict(count - len(blocks), keep())
        if evicted:
            self.version += 1
            self.trust(evicted)
            self._lose(num_lost, "lru")
        return blocks + evicted

    def commit_all(self, filled: Iterable[tuple[Run, Sequence[KVCacheBlock]]]) -> list[list[int]]:
        """Make blocks, whose bytes are complete on every rank, findable by what they hold, and
        unpin them. Parents come before their children.

        Returns for each run the places in it of those that could never be part of a hit: the
        chain's head has left meanwhile, or another block holds the key. They are free and empty.
        """
        useless: list[list[int]] = []
        renewed: list[KVCacheBlock] = []
        count = 0
        for run, blocks in filled:
            bare = [] if self._commit_run(run, blocks) else self._commit_singly(run, blocks)
            useless.append(bare)
            count += len(blocks) - len(bare)
            if self.order.early:
                renewed += self.order.arrive(run.keys)
        self.version += count
        self.num_used += count
        self.meter.add(metrics.STORED, count)
        for block in renewed:
            self.order.renew(block)  # what follows it stands anywhere, it had better stand last
        return useless

    def _commit_run(self, run: Run, blocks: Sequence[KVCacheBlock]) -> bool:
        """Commit all blocks of the run at once; False, with nothing done, if that is not the
        way."""
        keys, parent = run.keys, run.parent
        before = self.lookup.get(parent) if parent is not None else None
        if parent is not None and before is None and self.groups.is_chained(keys[0]):
            return False  # an orphan
        if run.inner_keys or not self.lookup.has_none(keys):
            return False
        if before is not None:
            parent = before.block_hash  # equal, but to follow it takes no comparison
        self.order.fill(blocks, keys, parent)
        self.order.queue(blocks, before)
        return True

    def _commit_singly(self, run: Run, blocks: Sequence[KVCacheBlock]) -> list[int]:
        """``_commit_run``, block by block; the places of those that were not committed."""
        useless, has = [], self.lookup.has
        for place, (key, block) in enumerate(zip(run.keys, blocks, strict=True)):
            parent = run.keys[place - 1] if place else run.parent
            orphaned = parent is not None and not has(parent) and self.groups.is_chained(key)
            if (orphaned and not (run.early and place == 0)) or has(key):
                useless.append(place)
                continue
            self.order.fill((block,), (key,), parent)
            for inner_key in run.inner_keys[place] if run.inner_keys else ():
                self.pool._insert_block_hash(inner_key, block, num_tokens=None)
            if parent is not None and orphaned:
                self.order.wait_for(parent, block)
        self.unpin(blocks)
        return useless

    def doubt(self, blocks: Sequence[KVCacheBlock], load_id: int, next_load_id: int) -> None:
        """A load of ``blocks`` has failed. Blocks that an earlier load failed to read, before this
        one began, are dropped. ``next_load_id`` is greater than the id of any load so far.

        One failure says little about the blocks: a load only reads them, and one fault may fail
        all loads under way. Blocks that cannot be read fail the next load too.
        """
        again = [b for b in blocks if self.doubted.get(b.block_id, next_load_id) <= load_id]
        for block in blocks:
            if block.block_hash is not None:
                self.doubted.setdefault(block.block_id, next_load_id)
        if again:
            self.drop(again)

    def trust(self, blocks: Iterable[KVCacheBlock]) -> None:
        """A load of ``blocks`` has not failed, or they hold nothing any more: of what they will
        hold no load has failed."""
        if self.doubted:
            for block in blocks:
                self.doubted.pop(block.block_id, None)

    def drop(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Forget what ``blocks`` hold, at once; references to them stay. With a block go all
        that descend from it, which could not be found any more."""
        self.version += 1
        held = [block.block_id for block in blocks if block.block_hash is not None]
        lost = self.order.descendants(held)
        self._lose(len(lost), "load_failed")
        self.pool.evict_blocks(set(lost))
        for block_id in lost:
            self.order.forget(block_id)
            self.order.queue_first(self.pool.blocks[block_id])
            self.doubted.pop(block_id, None)

    def reset(self) -> None:
        """Forget everything, at once; references stay."""
        self.version += 1
        self.pool.evict_blocks({b.block_id for b in self.pool.blocks if b.block_hash is not None})
        self.order.forget_all()
        self.doubted.clear()
        self._lose(self.num_used, "reset")

    def check_integrity(self) -> None:
        """Raise AssertionError when the free queue, the hash map and the parents disagree.
        Costs time in proportion to the tier: for tests."""
        check_integrity(self)

    # Details

    def _lose(self, count: int, reason: str) -> None:
        """So many blocks lose what they hold."""
        self.num_used -= count
        self.num_lost += count
        self.meter.add(metrics.EVICTED, count, reason)
