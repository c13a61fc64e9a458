"""Segments: the two parts of the host tier's free queue."""

from bisect import bisect_left
from collections.abc import Container, Iterable, Sequence
from itertools import groupby
from typing import Any

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, KVCacheBlock

from simple_offload.scheduler.tier import block_pool

PROTECTED_SHARE = 0.5
"""Of the tier's blocks, how many may be protected."""
EVICTIONS_PER_RETURN = 10
"""With as many evictions one block goes from protected back on probation."""


class Segments:
    """A segmented LRU queue (Karedla, Love and Wherry: "Caching strategies to improve disk system
    performance", IEEE Computer 27(3), 1994) within the pool's free queue: ``[probation]
    [protected]``, each with its least recently used blocks first.

    What is stored goes **on probation**, and what a request has found since is **protected**: it
    stays while much passes through that nobody asks for twice. There is a limit to how many
    blocks are protected, and they do not stay so for ever: beyond the limit, and with evictions,
    the least recently used of them go back on probation, as the most recently used there. So
    what was found often and is never asked for again leaves in the end.

    Which blocks are protected is known of those too that somebody refers to, and so are not in
    the queue. Nothing here takes time in proportion to the tier.
    """

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self._place = KVCacheBlock(-1)
        """Holds a place in the queue for a moment."""
        self._num_evicted = 0
        """Since a block has gone back for it."""
        self.clear()

    def clear(self) -> None:
        """No block is protected any more."""
        self.is_protected = bytearray(len(self.pool.blocks))
        """By block id."""
        self.num_protected = 0
        self.boundary: Any = self._end
        """The first protected block in the queue; the queue's end where there is none."""
        self.grow()

    def grow(self) -> None:
        """The pool has more blocks."""
        num_blocks = len(self.pool.blocks)
        self.is_protected.extend(bytes(num_blocks - len(self.is_protected)))
        self.limit = int(PROTECTED_SHARE * (num_blocks - 1))  # vLLM's null block is none of them
        """How many blocks may be protected, but while somebody refers to them."""

    # Who belongs where

    def protect(self, blocks: Iterable[KVCacheBlock]) -> None:
        """A request has found these, and what precedes them in their chains. Somebody must refer
        to each of them; once nobody does, the limit holds."""
        flags = self.is_protected
        new = [block_id for block in blocks if not flags[block_id := block.block_id]]
        for block_id in new:
            flags[block_id] = 1
        self.num_protected += len(new)

    def protect_chain(self, chain: Sequence[KVCacheBlock]) -> None:
        """``protect`` for a chain from its head on: no block is touched that is protected."""
        flags = self.is_protected
        first = bisect_left(chain, True, key=lambda block: not flags[block.block_id])
        for block in chain[first:]:
            flags[block.block_id] = 1
        self.num_protected += len(chain) - first

    def unprotect(self, block: KVCacheBlock) -> None:
        """The block is on probation from now on. Where it is free, it must be the boundary, or
        be moved."""
        if self.is_protected[block.block_id]:
            self.is_protected[block.block_id] = 0
            self.num_protected -= 1
            if block is self.boundary:
                self.boundary = block.next_free_block

    def split(self, chain: Sequence[KVCacheBlock]) -> list[Sequence[KVCacheBlock]]:
        """A chain in pieces of one segment each: mostly the protected blocks and those that follow
        them, as whoever finds a block has found what precedes it."""
        flags = self.is_protected
        if flags[chain[0].block_id] == flags[chain[-1].block_id]:
            return [chain]
        return [list(piece) for _, piece in groupby(chain, lambda each: flags[each.block_id])]

    def keep_limit(self) -> None:
        """Let go back what is too much; not before all of a chain is free that is to be: what
        follows a block that goes back must stand before it."""
        if self.num_protected > self.limit:
            self._return(self.num_protected - self.limit)

    def age(self, num_evicted: int) -> None:
        """So many blocks have been evicted."""
        count, self._num_evicted = divmod(self._num_evicted + num_evicted, EVICTIONS_PER_RETURN)
        self._return(count)

    # The queue

    def hold(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Add a reference to each block: none of them is in the queue any more."""
        place, after = self._place, self.boundary
        before: Any = after.prev_free_block
        before.next_free_block = after.prev_free_block = place
        place.prev_free_block, place.next_free_block = before, after
        block_pool.hold(self.pool, blocks)
        before, after = place.prev_free_block, place.next_free_block
        before.next_free_block, after.prev_free_block = after, before
        self.boundary = after

    def queue(self, chain: Sequence[KVCacheBlock], parent: KVCacheBlock | None) -> None:
        """Drop the last reference to each block of a chain, which all belong to one segment: they
        join it just before ``parent``, if that is free and belongs to it too, else last."""
        flags = self.is_protected
        is_protected = flags[chain[0].block_id]
        if parent is not None and (parent.ref_cnt > 0 or flags[parent.block_id] != is_protected):
            parent = None
        if not is_protected:
            block_pool.queue_chain(self.pool, chain, parent or self.boundary)
            return
        block_pool.queue_chain(self.pool, chain, parent)
        if self.boundary is (parent or self._end):
            self.boundary = chain[-1]

    def renew(self, first: KVCacheBlock, last: KVCacheBlock) -> None:
        """Make a stretch of the queue within one segment, ``first`` to ``last``, its end."""
        if not self.is_protected[first.block_id]:
            block_pool.move(self.pool, first, last, self.boundary)
            return
        if first is self.boundary and last.next_free_block is not self._end:
            self.boundary = last.next_free_block
        block_pool.move(self.pool, first, last)

    def put_first(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Put free blocks on probation, and first in the queue."""
        queue = self.pool.free_block_queue
        for block in blocks:
            self.unprotect(block)
            queue.remove(block)
        queue.prepend_n(list(blocks))

    def take(
        self, limit: int, keep: Container[BlockHashWithGroupId]
    ) -> tuple[list[KVCacheBlock], list[BlockHashWithGroupId]]:
        """The first blocks of the queue and what they held, as of ``block_pool.take``."""
        blocks, evicted = block_pool.take(self.pool, limit, keep)
        if self.boundary.ref_cnt > 0:  # all on probation, and more
            for block in blocks:
                self.unprotect(block)
            self.boundary = self.pool.free_block_queue.fake_free_list_head.next_free_block
        return blocks, evicted

    def check_integrity(self) -> None:
        """Raise AssertionError when the boundary is not where it should be, or blocks have been
        miscounted. Costs time in proportion to the tier: for tests."""
        free = self.pool.free_block_queue.get_all_free_blocks()
        flags = self.is_protected
        count = sum(flags[block.block_id] for block in free)
        assert not any(flags[block.block_id] for block in free[: len(free) - count]), (
            "a protected block stands on probation"
        )
        boundary = free[-count] if count else self._end
        assert self.boundary is boundary, f"{boundary}: should be the boundary"
        assert len(flags) == len(self.pool.blocks) and sum(flags) == self.num_protected, (
            "protected blocks miscounted"
        )
        assert count <= self.limit, "too many blocks are protected"
        for block in self.pool.blocks:
            assert block.block_hash is not None or not flags[block.block_id], (
                f"{block}: empty, yet protected"
            )

    # Details

    @property
    def _end(self) -> KVCacheBlock:
        return self.pool.free_block_queue.fake_free_list_tail

    def _return(self, count: int) -> None:
        """Let up to ``count`` blocks go back on probation."""
        flags, block, end = self.is_protected, self.boundary, self._end
        for _ in range(count):
            if block is end:
                break
            flags[block.block_id] = 0
            self.num_protected -= 1
            block = block.next_free_block
        self.boundary = block
