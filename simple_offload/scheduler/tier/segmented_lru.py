"""SegmentedQueue: the host tier's free queue in segments."""

from bisect import bisect_left
from collections.abc import Container, Iterable, Sequence
from itertools import groupby

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, KVCacheBlock

from simple_offload.scheduler.tier import block_pool

PROTECTED_SHARE = 0.5
"""Share of the tier's blocks that may be protected."""
EVICTIONS_PER_RETURN = 10
"""After this many evictions one protected block returns to probation."""


class SegmentedQueue:
    """A segmented LRU queue (Karedla, Love and Wherry: "Caching strategies to improve disk system
    performance", IEEE Computer 27(3), 1994) within the pool's free queue. Eviction starts at the
    left; each segment has its least recently used blocks first::

        [empty] [demoted] [probation] | [protected]
                                      boundary

    A stored block is on **probation**. A block that a request has found since is **protected**: it
    stays while many blocks pass through that are used once. Beyond a limit, and with evictions,
    the least recently used protected blocks return to probation, as the most recently used there.
    So a block that was found often, and is never found again, leaves in the end. **Demoted** blocks
    leave first: the device has their contents too.

    A pinned block, which is outside the queue, keeps its protected flag. No call takes time in
    proportion to the tier, except ``clear``.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._end = block_pool.queue_end(pool)
        self._bookmark = block_pool.Bookmark()
        self._num_evicted = 0
        """Evictions since a block last returned to probation for them."""
        self.demoted: set[int] = set()
        """Ids of the demoted blocks, all of them free."""
        self.clear()

    def clear(self) -> None:
        """Demote and protect no block any more."""
        self.demoted.clear()
        self.is_protected = bytearray(len(self._pool.blocks))
        """By block id."""
        self.num_protected = 0
        self.boundary = self._end
        """The first protected block in the queue; the queue's end if there is none."""
        self.grow()

    def grow(self) -> None:
        """Cover the blocks that the pool has by now."""
        num_blocks = len(self._pool.blocks)
        self.is_protected.extend(bytes(num_blocks - len(self.is_protected)))
        self.limit = int(PROTECTED_SHARE * (num_blocks - 1))  # without vLLM's null block
        """Most blocks that may be protected while they are free."""

    # Segments

    def protect(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Protect ``blocks``, which are pinned, with their ancestors. The limit holds again once
        they are free."""
        flags = self.is_protected
        new = [block_id for block in blocks if not flags[block_id := block.block_id]]
        for block_id in new:
            flags[block_id] = 1
        self.num_protected += len(new)

    def protect_chain(self, chain: Sequence[KVCacheBlock]) -> None:
        """``protect`` for a whole chain: it visits no block that is protected already."""
        flags = self.is_protected
        first = bisect_left(chain, True, key=lambda block: not flags[block.block_id])
        for block in chain[first:]:
            flags[block.block_id] = 1
        self.num_protected += len(chain) - first

    def demote(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Make free ``blocks``, children before parents, the first to be evicted. No block may be
        empty."""
        self._move_first(blocks)
        self.demoted.update([block.block_id for block in blocks])

    def on_emptied(self, blocks: Sequence[KVCacheBlock]) -> None:
        """``blocks`` have lost their contents. The free ones join the empty blocks."""
        self._move_first([block for block in blocks if block.ref_cnt == 0])
        for block in blocks:
            self._unprotect(block)

    def split(self, chain: Sequence[KVCacheBlock]) -> list[Sequence[KVCacheBlock]]:
        """A chain in pieces of one segment each: mostly its protected blocks, then the others,
        since a request that finds a block finds the ancestors too."""
        flags = self.is_protected
        if flags[chain[0].block_id] == flags[chain[-1].block_id]:
            return [chain]
        return [list(piece) for _, piece in groupby(chain, lambda each: flags[each.block_id])]

    def enforce_limit(self) -> None:
        """Return protected blocks beyond the limit to probation. A chain that is being unpinned
        must be free as a whole by now: its blocks must stay before their parents."""
        if self.num_protected > self.limit:
            self._return_to_probation(self.num_protected - self.limit)

    # The queue

    def pin(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Add a reference to each block. None is in the queue any more."""
        self._bookmark.insert_before(self.boundary)
        block_pool.touch(self._pool, blocks)
        self.boundary = self._bookmark.remove()
        if self.demoted:
            self.demoted.difference_update([block.block_id for block in blocks])

    def free(self, chain: Sequence[KVCacheBlock], parent: KVCacheBlock | None) -> None:
        """Drop the last reference to each block of a chain in one segment. They join it just
        before ``parent`` if that is free and in the same segment, else last."""
        flags = self.is_protected
        is_protected = flags[chain[0].block_id]
        if parent is not None and (parent.ref_cnt > 0 or flags[parent.block_id] != is_protected):
            parent = None
        if not is_protected:
            block_pool.free_chain(self._pool, chain, parent or self.boundary)
            return
        block_pool.free_chain(self._pool, chain, parent)
        if self.boundary is (parent or self._end):
            self.boundary = chain[-1]

    def renew(self, first: KVCacheBlock, last: KVCacheBlock) -> None:
        """Make a piece of the queue within one segment, ``first`` to ``last``, the most recently
        used there."""
        if not self.is_protected[first.block_id]:
            block_pool.move(self._pool, first, last, self.boundary)
            return
        behind = block_pool.next_free(last)
        if first is self.boundary and behind is not self._end:
            self.boundary = behind
        block_pool.move(self._pool, first, last)

    def get_new_blocks(
        self, limit: int, keep: Container[BlockHashWithGroupId]
    ) -> tuple[list[KVCacheBlock], list[BlockHashWithGroupId]]:
        """Evict from the front of the queue, as ``block_pool.get_new_blocks`` does."""
        blocks, evicted = block_pool.get_new_blocks(self._pool, limit, keep)
        if self.boundary.ref_cnt > 0:  # all blocks on probation were evicted, and more
            for block in blocks:
                self._unprotect(block)
            self.boundary = block_pool.first_free(self._pool)
        if self.demoted:
            self.demoted.difference_update([block.block_id for block in blocks])
        count, self._num_evicted = divmod(self._num_evicted + len(blocks), EVICTIONS_PER_RETURN)
        self._return_to_probation(count)
        return blocks, evicted

    # Details

    def _move_first(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Move free blocks to the front of the queue, on probation."""
        self.pin(blocks)
        for block in blocks:
            self._unprotect(block)
        block_pool.free_blocks_first(self._pool, blocks)

    def _unprotect(self, block: KVCacheBlock) -> None:
        """Clear the flag of a block outside the queue."""
        if self.is_protected[block.block_id]:
            self.is_protected[block.block_id] = 0
            self.num_protected -= 1

    def _return_to_probation(self, count: int) -> None:
        """Move the boundary behind up to ``count`` protected blocks."""
        blocks, self.boundary = block_pool.free_blocks_from(self.boundary, count, self._end)
        for block in blocks:
            self.is_protected[block.block_id] = 0
        self.num_protected -= len(blocks)
