"""EvictionOrder: which free host block leaves the tier next."""

from collections.abc import Container, Iterable, Sequence
from itertools import islice

import numpy as np
from numpy.typing import NDArray
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import (
    BlockHashWithGroupId,
    FreeKVCacheBlockQueue,
    KVCacheBlock,
)

from simple_offload.scheduler.tier import block_pool
from simple_offload.transfer import BlockIds, as_array

DUPLICATES_SHARE = 1 / 4
"""Share of the tier that duplicates may keep although others need room. As many are stored before
eviction, at most: the rest is for contents that the device has lost. Each duplicate that leaves
costs a second store, when the device loses its block. Each that stays takes the room of contents
that nothing else has (Wong and Wilkes, "My cache or yours?", USENIX 2002)."""
PROTECTED_AGE = 1.25
"""Protected contents stay this many times as long as contents on probation. Less follows a change
of requests sooner: a user who has left. More keeps contents that return late among prompts that
come once."""

_PROBATION, _PROTECTED, _RESERVED, _EMPTY, _DUPLICATES = range(5)
"""Queues. The first four are also segments: each block belongs to one, pinned or free."""
_SEGMENT = 3
"""Bits of a block's code: its segment."""
_DUPLICATE = 4
"""Bit of a block's code: the device has its contents too."""
_LOST = 8
"""Bit of a block's code: the device has lost its contents. It is still among the duplicates."""
_WHEN_LOST = np.array(
    [
        [_LOST | max(code & _SEGMENT, hit) if code & _DUPLICATE else code for code in range(16)]
        for hit in range(2)
    ],
    np.uint8,
)
"""By whether a request has hit it, and by code: the code of a block whose contents the device
loses. For the few blocks of a step, numpy looks up a table sooner than it computes."""
_QUEUE_OF = [min(code, _DUPLICATES) for code in range(16)]
"""By code."""


class EvictionOrder:
    """The tier's free blocks in queues. They leave from left to right::

        empty    duplicates    probation    protected    reserved
                 beyond their
                 share

    - **Duplicates** hold contents that the device has too. Nothing is lost with them.
    - The next two queues hold contents that the device lacks, in the order in which it lost them.
      Contents that a request has hit are **protected**, and leave after contents on **probation**
      (Karedla, Love and Wherry: "Caching strategies to improve disk system performance", IEEE
      Computer 27(3), 1994). So they stay while many prompts pass through that come once. A
      protected block that is ``PROTECTED_AGE`` times as old as one on probation leaves before
      it: requests have changed.
    - **Reserved** contents are for requests in vLLM's queue, or a request wants them protected.
      The last reserved leaves first.

    A queue is in order of use, and a prefix lies in it tail first: without its head, a tail could
    not be found.

    The caller guarantees: a block is told of once a change, parents before children; only blocks
    with contents are pinned or reserved; the device loses a tail before its head.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._queues = queues = [FreeKVCacheBlockQueue([]) for _ in range(5)]
        queues[_EMPTY] = pool.free_block_queue
        self._probation, self._protected, self._reserved, self._empty, self._duplicates = queues
        self._codes = bytearray()
        """By block id."""
        self.num_evicted = 0
        """Evicted contents that were no duplicates, since the start."""
        self._num_added = 0
        """Contents that the tier has got since the start: the clock of ages."""
        self._used_at = np.zeros(0, np.int64)
        """By block id, this clock when its contents were last used, or lost by the device."""
        self._lost: list[BlockIds] = []
        """Ids in the order in which the device has lost their contents, until ``_settle``."""
        self._num_lost = 0
        self._places = np.zeros(0, np.int64)
        """Scratch of ``_num_distinct``, by block id."""
        self.num_duplicates = 0
        """Blocks whose contents the device has too, pinned or free."""
        self.max_contents = -1
        """Blocks, without vLLM's null block, and without those that another one stands for
        (``CpuTier.allocate_for``), which are in no queue."""
        self.grow()

    def grow(self) -> None:
        """Cover the blocks that the pool has by now."""
        num_blocks = len(self._pool.blocks)
        num_more = num_blocks - len(self._codes)
        self.max_contents += num_more
        self._codes.extend(bytes([_EMPTY]) * num_more)
        self._used_at.resize(num_blocks, refcheck=False)
        self._places.resize(num_blocks, refcheck=False)

    @property
    def num_free(self) -> int:
        """Blocks in the queues."""
        return sum(queue.num_free_blocks for queue in self._queues)

    # Contents

    def add(self, blocks: Sequence[KVCacheBlock], *, duplicates: bool) -> None:
        """Drop the last reference to blocks that have just been filled. ``duplicates``: the device
        has their contents too, and loses them soon."""
        self._num_added += len(blocks)
        code = _DUPLICATE if duplicates else _PROBATION
        codes = self._codes
        for block in blocks:
            block.ref_cnt = 0
            codes[block.block_id] = code
        if duplicates:
            self.num_duplicates += len(blocks)
            self._duplicates.append_n(list(reversed(blocks)))
        else:
            self._note_use(blocks)
            self._probation.append_n(list(reversed(blocks)))

    def evict(
        self, limit: int, keep: Container[int]
    ) -> tuple[list[KVCacheBlock], list[BlockHashWithGroupId], list[BlockHashWithGroupId]]:
        """Up to ``limit`` pinned, empty blocks; the evicted keys of duplicates, and of others.
        ``keep``: never evict these block ids, nor a block behind one of them."""
        blocks: list[KVCacheBlock] = []
        lost: dict[bool, list[BlockHashWithGroupId]] = {True: [], False: []}

        def take(queue: FreeKVCacheBlockQueue, count: int) -> None:
            count = min(count, limit - len(blocks))
            if count > 0 and queue.num_free_blocks:
                new, keys = block_pool.get_new_blocks(self._pool, queue, count, keep)
                if keys:
                    self._forget(new)
                    lost[queue is self._duplicates].extend(keys)
                blocks.extend(new)

        take(self._empty, limit)
        if len(blocks) < limit:
            self._settle()
            # Nothing is lost with a duplicate.
            take(self._duplicates, self.num_duplicates - int(DUPLICATES_SHARE * self.max_contents))
            # Requests have changed, or these would have been found by now.
            take(self._protected, self._num_old(limit - len(blocks)))
            take(self._probation, limit)
            take(self._protected, limit)
            take(self._duplicates, limit)
            take(self._reserved, limit)
        self.num_evicted += len(lost[False])
        return blocks, lost[True], lost[False]

    def first_out(self, limit: int) -> list[KVCacheBlock]:
        """The next blocks with contents of each queue: ``evict(limit, ...)`` evicts no others."""
        if (limit := limit - self._empty.num_free_blocks) <= 0:
            return []
        self._settle()
        queues = (self._duplicates, self._probation, self._protected, self._reserved)
        return [block for queue in queues for block in islice(queue.iter_blocks_after(None), limit)]

    def on_emptied(self, blocks: Sequence[KVCacheBlock]) -> None:
        """``blocks`` have lost their contents. The free ones are the next to be allocated."""
        free = [block for block in blocks if block.ref_cnt == 0]
        self._take_out(free)
        self._forget(blocks)
        self._empty.prepend_n(free)

    def empty_all(self) -> None:
        """Evict all contents. The free blocks are the next to be allocated, lowest id first."""
        block_pool.evict_all_blocks(self._pool, self._queues)
        self._codes = bytearray([_EMPTY]) * len(self._codes)
        self._lost.clear()
        self._num_lost = self.num_duplicates = 0

    # References

    def pin(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Add a reference to each block. A request has hit their contents, and the device lacks
        them."""
        codes, num_duplicates = self._codes, 0
        free: list[KVCacheBlock] = []
        counts = [0] * 16
        for block in blocks:
            block_id = block.block_id
            code = codes[block_id]
            if not block.ref_cnt:
                free.append(block)
                counts[code] += 1
            block.ref_cnt += 1
            if code != _PROTECTED:
                codes[block_id] = code & _RESERVED or _PROTECTED
                if code & _DUPLICATE:
                    num_duplicates += 1
        self.num_duplicates -= num_duplicates
        self._unlink(free, [*counts[:_DUPLICATES], sum(counts[_DUPLICATES:])])

    def unpin(self, blocks: Sequence[KVCacheBlock], *, duplicates: bool = False) -> None:
        """Drop a reference to each block. Those without references become the last to leave in
        their segment, but duplicates the first; empty ones are allocated next. ``duplicates``: the
        device has loaded their contents."""
        if not blocks:
            return
        codes, free = self._codes, []
        for block in reversed(blocks):
            block.ref_cnt -= 1
            if not block.ref_cnt:
                free.append(block)
        if duplicates:
            num_duplicates = 0
            for block in blocks:
                code = codes[block.block_id]
                if not code & _DUPLICATE:
                    num_duplicates += 1
                codes[block.block_id] = _DUPLICATE | code & _SEGMENT
            self.num_duplicates += num_duplicates
            self._duplicates.prepend_n(free)
            return
        self._note_use(blocks)
        self._put_back(self._by_queue(free))

    def renew(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Make the free ones of ``blocks`` the last to leave in their segment."""
        free = [block for block in blocks if block.ref_cnt == 0]
        self._take_out(free)
        self._note_use(free)
        self._put_back(self._by_queue(reversed(free)))

    # The device

    def device_got(self, blocks: Sequence[KVCacheBlock]) -> None:
        """The device has got the contents of ``blocks``, each once, for requests. They become the
        first duplicates to leave: the device loses them last."""
        ids = as_array([block.block_id for block in blocks])
        codes = np.frombuffer(self._codes, np.uint8)
        before = codes[ids]
        free = [block for block in blocks if block.ref_cnt == 0]
        self._take_out(free)
        self.num_duplicates += int(np.count_nonzero(before & _DUPLICATE == 0))
        codes[ids] = _DUPLICATE | np.maximum(before & _SEGMENT, _PROTECTED)
        self._duplicates.prepend_n(free[::-1])

    def device_lost(self, block_ids: BlockIds, hit: NDArray[np.bool_]) -> None:
        """The device has lost the contents of these blocks, in this order, as far as they are
        duplicates. ``hit``: whether a request has hit them there. ``_settle`` moves the blocks:
        mostly requests load them before their order matters."""
        codes = np.frombuffer(self._codes, np.uint8)
        before = codes[block_ids]
        after = _WHEN_LOST[hit.view(np.uint8), before]
        codes[block_ids] = after
        lost = block_ids[after != before]
        self.num_duplicates -= self._num_distinct(lost)
        self._lost.append(lost)
        self._num_lost += len(lost)
        if self._num_lost > len(codes):
            self._settle()

    def on_device_reset(self) -> None:
        """The device has lost all contents at once. Duplicates go on probation, unless they are
        reserved, in the order in which they would have left."""
        self._settle()
        codes = np.frombuffer(self._codes, np.uint8)
        duplicates = codes >= _DUPLICATE
        self._used_at[duplicates] = self._num_added
        codes[duplicates] &= _RESERVED
        if np.any(codes[duplicates]):
            queued = self._duplicates.iter_blocks_after(None)
            reserved = [block for block in queued if codes[block.block_id] == _RESERVED]
            block_pool.unlink(reserved)
            self._duplicates.num_free_blocks -= len(reserved)
            self._reserved.append_n(reserved)
        block_pool.append_all(self._probation, self._duplicates)
        self.num_duplicates = 0

    # Wishes

    def reserve(self, block_ids: Iterable[int]) -> None:
        """These contents leave last, until ``unreserve``."""
        free = self._move(block_ids, (_PROBATION, _PROTECTED), _RESERVED)
        self._reserved.prepend_n(free)

    def unreserve(self, block_ids: Iterable[int]) -> None:
        """These contents are reserved no more. They become protected, as if they were hit now."""
        free = self._move(block_ids, (_RESERVED,), _PROTECTED)
        self._protected.append_n(free)

    def release(self, block_ids: Iterable[int]) -> None:
        """Of the contents that the device lacks, these leave first, unless they are reserved, or a
        load reads them."""
        self._settle()
        blocks = self._pool.blocks
        ids = [i for i in block_ids if blocks[i].ref_cnt == 0 and self._codes[i] < _RESERVED]
        free = self._move(ids, (_PROBATION, _PROTECTED), _PROBATION)
        # As old as can be, or protected contents would count as too old beside them.
        self._used_at[as_array([block.block_id for block in free])] = 0
        self._probation.prepend_n(free)

    # Details

    def _note_use(self, blocks: Sequence[KVCacheBlock]) -> None:
        self._used_at[as_array([block.block_id for block in blocks])] = self._num_added

    def _num_old(self, limit: int) -> int:
        """How many protected blocks are among the next ``limit`` to leave, by their age and that of
        each block on probation."""
        now, used_at = self._num_added, self._used_at
        protected = self._protected.iter_blocks_after(None)
        oldest, count = next(protected, None), 0
        for num_others, block in enumerate(self._probation.iter_blocks_after(None)):
            before = now - PROTECTED_AGE * (now - used_at[block.block_id])
            while oldest and count + num_others < limit and used_at[oldest.block_id] < before:
                oldest, count = next(protected, None), count + 1
            if not oldest or count + num_others >= limit:
                break
        return count

    def _num_distinct(self, block_ids: BlockIds) -> int:
        order = np.arange(len(block_ids))
        self._places[block_ids] = order
        return int(np.count_nonzero(self._places[block_ids] == order))

    def _settle(self) -> None:
        """Move the blocks whose contents the device has lost from the duplicates to the end of
        their segments."""
        if not self._num_lost:
            return
        codes, blocks, settled = self._codes, self._pool.blocks, []
        free: list[list[KVCacheBlock]] = [[] for _ in self._queues]
        # From the last on: a block counts at its last place, and a piece of the queue is cut out
        # from its end.
        for block_id in dict.fromkeys(np.concatenate(self._lost)[::-1].tolist()):
            code = codes[block_id]
            if code & _LOST:
                codes[block_id] = code & _SEGMENT
                settled.append(block_id)
                block = blocks[block_id]
                if block.ref_cnt == 0:
                    free[code & _SEGMENT].append(block)
        self._lost.clear()
        self._num_lost = 0
        self._used_at[as_array(settled)] = self._num_added
        for queue, of_queue in zip(self._queues, free, strict=True):
            block_pool.unlink(of_queue)
            self._duplicates.num_free_blocks -= len(of_queue)
            queue.append_n(of_queue[::-1])

    def _move(
        self, block_ids: Iterable[int], sources: tuple[int, ...], target: int
    ) -> list[KVCacheBlock]:
        """Give the blocks of the segments ``sources`` another segment. Returns those that have to
        change their queue, children first, out of it: free blocks that the device lacks."""
        codes, blocks = self._codes, self._pool.blocks
        moved = [blocks[i] for i in block_ids if codes[i] & _SEGMENT in sources]
        free = [b for b in moved if b.ref_cnt == 0 and codes[b.block_id] < _DUPLICATE]
        self._take_out(free)
        for block in moved:
            codes[block.block_id] = codes[block.block_id] & ~_SEGMENT | target
        self._note_use(free)
        return free[::-1]

    def _by_queue(self, blocks: Iterable[KVCacheBlock]) -> list[list[KVCacheBlock]]:
        codes = self._codes
        parts: list[list[KVCacheBlock]] = [[] for _ in self._queues]
        for block in blocks:
            parts[_QUEUE_OF[codes[block.block_id]]].append(block)
        return parts

    def _take_out(self, free: Sequence[KVCacheBlock]) -> None:
        """Take free blocks out of their queues."""
        self._unlink(free, map(len, self._by_queue(free)))

    def _unlink(self, free: Sequence[KVCacheBlock], counts: Iterable[int]) -> None:
        """Take free blocks out of their queues. ``counts``: by queue, how many."""
        block_pool.unlink(free)
        for queue, count in zip(self._queues, counts, strict=True):
            queue.num_free_blocks -= count

    def _put_back(self, parts: Sequence[list[KVCacheBlock]]) -> None:
        """Put free blocks into their queues. ``parts``: by queue, children first."""
        for segment in (_PROBATION, _PROTECTED, _RESERVED):
            self._queues[segment].append_n(parts[segment])
        self._empty.prepend_n(parts[_EMPTY])
        self._duplicates.prepend_n(parts[_DUPLICATES])

    def _forget(self, blocks: Iterable[KVCacheBlock]) -> None:
        """``blocks`` have lost their contents, and so their segment."""
        codes = self._codes
        for block in blocks:
            self.num_duplicates -= (codes[block.block_id] & _DUPLICATE) > 0
            codes[block.block_id] = _EMPTY
