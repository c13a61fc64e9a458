"""Segments: which free host block leaves the tier next."""

import time
from collections.abc import Callable, Container, Iterable, Sequence
from itertools import compress, islice, takewhile

import numpy as np
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import (
    BlockHashWithGroupId,
    FreeKVCacheBlockQueue,
    KVCacheBlock,
)

from simple_offload.scheduler.tier import block_pool
from simple_offload.scheduler.tier.ghosts import Ghosts
from simple_offload.scheduler.tier.leases import Lease, Leases
from simple_offload.scheduler.tier.let_go import LetGo
from simple_offload.transfer import BlockIds, as_array

COPIES_SHARE = 3 / 16
"""Share of the tier's blocks that copies may keep although others need room. Each copy that leaves
costs a second store, when the device lets go of its block. Each that stays takes the room of
contents that nothing else has (Wong and Wilkes, "My cache or yours?", USENIX 2002)."""
FEW_WANTED = 1 / 32
"""While requests want back a smaller share of what has left, copies stay longer than what is on
probation. Their room would keep contents that nothing wants, and each would be stored a second time
(docs/measurements.md, "Recorded requests")."""
MANY_WANTED = 0.4
"""While requests want back a greater share, all copies make room. With a smaller limit, more is
stored where that helps few prompts (likewise)."""
KEPT_SHARE = 0.25
"""Share of the tier's blocks that may be kept: requests that wish for it leave as much room to what
others find."""
PROTECTED_AGE = 1.5
"""Protected contents stay this many times as long as those on probation. Less follows a change of
requests sooner: a user who has left. More keeps what comes back late among prompts that come
once."""

_MOST_LOOKED_AT = 4
"""Copies that are looked at for each block that should leave."""

_PROBATION, _PROTECTED, _KEPT, _RELEASED, _EXPECTED, _COPY = range(6)
"""Queues, and segments of blocks that are not copies."""
_NEW_COPY, _FOUND_COPY = _COPY + _PROBATION, _COPY + _PROTECTED
_KEPT_COPY, _RELEASED_COPY = _COPY + _KEPT, _COPY + _RELEASED
_EXPECTED_COPY = _COPY + _EXPECTED
"""Segments of copies: the other segments that they will belong to, beyond ``_COPY``."""
_NUM_SEGMENTS = 2 * _COPY
_IF_FOUND = bytes([_PROTECTED, _PROTECTED, _KEPT, _PROTECTED, _EXPECTED] * 2)
"""By segment, the one (of blocks that are not copies) that a request's find leads to."""
_IF_FOUND_ARRAY = np.frombuffer(_IF_FOUND, np.uint8)
"""The same, for many blocks at once."""


class _EveryKey(Container[BlockHashWithGroupId]):
    """Lets ``get_new_blocks`` evict nothing."""

    def __contains__(self, key: object) -> bool:
        return True


class Segments:
    """The tier's free blocks in queues. Each block with contents belongs to one of them, also
    while it is pinned and in none::

        empty, then probation     protected     kept     released     expected     copies

    **Copies** hold what the device has too. Those beyond ``max_copies`` leave first, from the front
    of their queue: the device will let go of their blocks last. The others hold contents that
    nothing else has, in the order in which the device let go of them. They are a segmented LRU
    queue (Karedla, Love and Wherry: "Caching strategies to improve disk system performance", IEEE
    Computer 27(3), 1994): contents that a request has found are **protected** and leave after those
    on **probation**. So they stay while many contents pass through that are used once. A protected
    block that is ``PROTECTED_AGE`` times as old as the oldest on probation leaves before it:
    requests have changed.

    Two queues are for wishes. What a request wants protected for some time is **kept**, and leaves
    after protected blocks. Beyond a limit, and when its time is over, it becomes protected. What
    has been **released** leaves before all others, unless a request finds it.

    What requests in vLLM's queue will find is **expected**, and leaves after all others: first
    what was expected last.

    The device lets go of a prefix tail first, and the head was found whenever the tail was. So the
    tail leaves the tier before the head, without which it could not be found. This holds for copies
    too, as the second store of a head may come too late.
    """

    clock: Callable[[], float] = staticmethod(time.monotonic)

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._protected = FreeKVCacheBlockQueue([])
        self._kept = FreeKVCacheBlockQueue([])
        self._released = FreeKVCacheBlockQueue([])
        self._expected = FreeKVCacheBlockQueue([])
        self._copies = FreeKVCacheBlockQueue([])
        self._queues = (
            pool.free_block_queue,
            self._protected,
            self._kept,
            self._released,
            self._expected,
            self._copies,
        )
        self._leases = Leases()
        """Of the blocks that are kept."""
        self._num_evicted = 0
        """Evicted contents that were no copies, since the start: the clock of ages."""
        self._ghosts = Ghosts()
        """Of the contents that this clock counts."""
        self._since = np.zeros(0, np.int64)
        """By block id, this clock when its contents were last used, or let go of."""
        self._of = bytearray()
        """By block id."""
        self.num_copies = 0
        """Blocks that are copies, pinned or free. ``settle`` brings it up to date."""
        self.num_others = 0
        """Blocks that another one stands for (``CpuTier.allocate_for``). They are in no queue."""
        self._let_go = LetGo()
        self._twins: dict[int, None] = {}
        """Ids of copies that the device has let go of in one block, and finds in another. That one
        may be unknown: its request was preempted before it was recorded."""
        self.device_keys: Callable[[], Container[bytes]] = frozenset
        """The keys that the device finds, though it has let go of them in one block."""
        self.grow()

    def grow(self) -> None:
        """Cover the blocks that the pool has by now."""
        num_blocks = len(self._pool.blocks)
        self._of.extend(bytes(num_blocks - len(self._of)))
        self._since.resize(num_blocks, refcheck=False)
        self._let_go.grow(num_blocks)

    @property
    def max_contents(self) -> int:
        """Blocks, without vLLM's null block, and without those that another one stands for."""
        return len(self._pool.blocks) - 1 - self.num_others

    @property
    def max_copies(self) -> int:
        """Copies that need not leave before what is on probation, by what requests want back."""
        wanted = self._ghosts.share_wanted
        if wanted < FEW_WANTED:
            return self.max_contents
        return self._copies_share if wanted < MANY_WANTED else 0

    @property
    def num_free(self) -> int:
        """Blocks in the queues."""
        return sum(queue.num_free_blocks for queue in self._queues)

    # Segments

    def add(self, blocks: Sequence[KVCacheBlock], *, copies: bool) -> None:
        """Drop the last reference to blocks that have just been filled, parents before children.
        ``copies``: the device has their contents too, and will let go of them soon."""
        of, segment = self._of, _NEW_COPY if copies else _PROBATION
        for block in blocks:
            block.ref_cnt = 0
            of[block.block_id] = segment
        if copies:
            self.num_copies += len(blocks)
            self._copies.append_n(list(reversed(blocks)))
        else:
            self._note_use(blocks)
            self._pool.free_block_queue.append_n(list(reversed(blocks)))

    def add_copies(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Requests have found the contents of ``blocks``, parents before children, each once, and
        the device has them too. They are the first copies to leave."""
        ids = as_array([block.block_id for block in blocks])
        of = np.frombuffer(self._of, np.uint8)
        before = of[ids]
        of[ids] = _COPY + _IF_FOUND_ARRAY[before]
        self.num_copies += int(np.count_nonzero(before < _COPY))
        is_free = [block.ref_cnt == 0 for block in blocks]
        free = list(compress(blocks, is_free))
        queues = np.minimum(before[is_free], _COPY)
        self._take_out(free, np.bincount(queues, minlength=len(self._queues)).tolist())
        self._copies.prepend_n(free[::-1])

    def on_copies_found(self, block_ids: BlockIds) -> None:
        """Requests have found the contents of those of these blocks that are copies."""
        of = np.frombuffer(self._of, np.uint8)
        copies = block_ids[of[block_ids] >= _COPY]
        of[copies] = _COPY + _IF_FOUND_ARRAY[of[copies]]

    def on_let_go(self, block_ids: BlockIds) -> None:
        """The device has let go of the contents of these blocks, in this order, if they are
        copies. ``settle`` moves them: mostly requests find them before their order matters."""
        self._let_go.add(block_ids)
        while len(self._let_go) > len(self._of):
            self._settle_oldest()

    def settle(self) -> None:
        """Move the copies that the device has let go of to the segments they belong to now."""
        while len(self._let_go):
            self._settle_oldest()
        self._let_go.add(as_array([*self._twins]))  # to look again
        self._twins.clear()

    def on_request(self, block_hashes: Sequence[bytes]) -> None:
        """A request wants contents with ``block_hashes``, in the tier or not."""
        self._ghosts.on_request(block_hashes)

    def was_found(self, block_id: int) -> bool:
        """Whether a request has found the contents of a block, or expects them."""
        segment = self._of[block_id] % _COPY
        return _IF_FOUND[segment] == segment

    def unfound(self, block_ids: BlockIds) -> list[BlockHashWithGroupId]:
        """The keys of those of the blocks that no request has found."""
        blocks = self._pool.blocks
        new = [blocks[i] for i in block_ids.tolist() if not self.was_found(i)]
        return [key for key in block_pool.keys_of(new) if key is not None]

    def remove_all_copies(self) -> None:
        """The device has let go of the contents of all copies. They go on probation, unless they
        are kept or expected, in the order in which they would have left."""
        self._let_go.clear()
        self._twins.clear()
        self._since[np.frombuffer(self._of, np.uint8) >= _COPY] = self._num_evicted
        for segment in (_KEPT, _EXPECTED):
            if _COPY + segment in self._of:
                queued = self._copies.iter_blocks_after(None)
                blocks = [b for b in queued if self._of[b.block_id] == _COPY + segment]
                self._take_out(blocks, self._count(blocks))
                self._queues[segment].append_n(blocks)
        copies = bytes([_NEW_COPY, _FOUND_COPY, _RELEASED_COPY, _KEPT_COPY, _EXPECTED_COPY])
        others = bytes([_PROBATION, _PROBATION, _PROBATION, _KEPT, _EXPECTED])
        self._of = self._of.translate(bytes.maketrans(copies, others))
        self.num_copies = 0
        block_pool.append_all(self._pool.free_block_queue, self._copies)
        self._limit_kept()

    def empty_all(self) -> None:
        """Evict all contents. The free blocks are the next to be allocated, lowest id first."""
        block_pool.evict_all_blocks(self._pool, self._queues)
        self._of = bytearray(len(self._of))
        self._leases = Leases()
        self.num_copies = 0

    def on_emptied(self, blocks: Sequence[KVCacheBlock]) -> None:
        """``blocks`` have lost their contents. The free ones are the next to be allocated."""
        free = [block for block in blocks if block.ref_cnt == 0]
        self._take_out(free, self._count(free))
        self._forget(blocks)
        self._pool.free_block_queue.prepend_n(free)

    # References

    def pin(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Add a reference to each block. A request has found their contents, and the device lacks
        them."""
        of = self._of
        free: list[KVCacheBlock] = []
        counts = [0] * _NUM_SEGMENTS
        for block in blocks:
            block_id = block.block_id
            segment = of[block_id]
            if block.ref_cnt == 0:
                free.append(block)
                counts[segment] += 1
            block.ref_cnt += 1
            if segment != _PROTECTED:
                of[block_id] = _IF_FOUND[segment]
                self.num_copies -= segment >= _COPY
        self._take_out(free, [*counts[:_COPY], sum(counts[_COPY:])])

    def unpin_copies(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Drop a reference to each block, parents before children. Requests have found their
        contents, and the device has got them. They are the first copies to leave."""
        of = self._of
        free: list[KVCacheBlock] = []
        num_copies = 0
        for block in blocks:
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                free.append(block)
            block_id = block.block_id
            if of[block_id] < _COPY:
                num_copies += 1
            of[block_id] = _COPY + _IF_FOUND[of[block_id]]
        self.num_copies += num_copies
        self._copies.prepend_n(free[::-1])

    def unpin(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Drop a reference to each block, parents before children. Those without references become
        the last to leave in their segment, children first, but copies the first; empty ones are
        allocated next."""
        if not blocks:
            return
        freed: list[list[KVCacheBlock]] = [[] for _ in self._queues]
        of = self._of
        for block in reversed(blocks):
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                freed[min(of[block.block_id], _COPY)].append(block)
        self._note_use(blocks)
        for segment, of_segment in enumerate(freed):
            if segment == _COPY:
                self._copies.prepend_n(of_segment)
            elif segment != _PROBATION:
                self._queues[segment].append_n(of_segment)
            else:
                keys = list(block_pool.keys_of(of_segment))
                empty = [b for b, key in zip(of_segment, keys, strict=True) if key is None]
                full = [b for b, key in zip(of_segment, keys, strict=True) if key is not None]
                self._pool.free_block_queue.append_n(full)
                self._pool.free_block_queue.prepend_n(empty)
        self._limit_kept()

    def renew(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Make the free ones of ``blocks``, parents before children, the last to leave in their
        segment, children first."""
        free = [block for block in blocks if block.ref_cnt == 0]
        self._take_out(free, self._count(free))
        for block in free:
            block.ref_cnt += 1
        self.unpin(free)

    def get_new_blocks(
        self, limit: int, keep: Container[BlockHashWithGroupId]
    ) -> tuple[list[KVCacheBlock], list[BlockHashWithGroupId], list[BlockHashWithGroupId]]:
        """Up to ``limit`` pinned, empty blocks; the evicted keys of copies, and those of others.
        ``keep``: keys that must stay, with those behind them in their segment. Copies among them
        become the last to leave."""
        pool, copies = self._pool, self._copies
        blocks: list[KVCacheBlock] = []
        keys: dict[bool, list[BlockHashWithGroupId]] = {True: [], False: []}

        def evict(
            queue: FreeKVCacheBlockQueue, count: int, keep: Container[BlockHashWithGroupId]
        ) -> None:
            count = min(count, limit - len(blocks))
            if count > 0 and queue.num_free_blocks:
                new, evicted = block_pool.get_new_blocks(pool, queue, count, keep)
                if evicted:
                    self._forget(new)
                    keys[queue is copies].extend(evicted)
                blocks.extend(new)

        def evict_copies(count: int) -> None:
            num_left = min(copies.num_free_blocks, _MOST_LOOKED_AT * limit)
            stop = min(limit, len(blocks) + count)
            while num_left > 0 and len(blocks) < stop:
                # The device will let go of these next.
                num_kept = block_pool.count_first(copies, keep, num_left)
                copies.append_n(copies.popleft_n(num_kept))
                num_left -= num_kept
                num_before = len(blocks)
                evict(copies, min(num_left, stop - num_before), keep)
                num_left -= len(blocks) - num_before

        evict(pool.free_block_queue, limit, _EveryKey())
        if len(blocks) < limit:
            self.settle()
            self._end_leases()
            evict(self._released, limit, keep)
            evict_copies(self.num_copies - self.max_copies)
            evict(self._protected, self._num_old(limit), keep)
            evict(pool.free_block_queue, limit, keep)
            evict_copies(self.num_copies - self._copies_share)
            evict(self._protected, limit, keep)
            evict(self._kept, limit, keep)
            evict_copies(limit)
            evict(self._expected, limit, keep)
        lifetime = max(self.num_copies, self._copies_share)  # room that copies could make
        self._ghosts.add(keys[False], self._num_evicted, lifetime)
        self._num_evicted += len(keys[False])
        return blocks, keys[True], keys[False]

    def add_others(self, count: int) -> None:
        """Another block stands for ``count`` more: with less room for contents, fewer may be
        kept."""
        self.num_others += count
        self._limit_kept()

    # vLLM's queue

    def expect(self, block_ids: Iterable[int]) -> None:
        """Requests in vLLM's queue want the contents of these blocks. Those that are not kept leave
        last until ``stop_expecting``."""
        self._move(block_ids, (_PROBATION, _PROTECTED, _RELEASED), _EXPECTED)

    def stop_expecting(self, block_ids: Iterable[int]) -> None:
        """No request in vLLM's queue wants the contents of these blocks any more, parents before
        children. They become protected."""
        self._move(block_ids, (_EXPECTED,), _PROTECTED)

    # Wishes

    def lease(self, block_ids: Iterable[int], lease: Lease) -> None:
        """Keep or release these blocks, which have contents, parents before children. A release
        passes over blocks that are in use or expected, and those that another session wants
        kept."""
        ids = list(dict.fromkeys(block_ids))
        if lease.is_release:
            ids = [block_id for block_id in ids if self._may_release(block_id, lease)]
            self._leases.end(ids)
            self._move(ids, range(_COPY), _RELEASED)
        else:
            self._leases.extend(ids, lease)
            self._move(ids, range(_COPY), _KEPT)
        self._limit_kept()

    def lease_of(self, block_id: int) -> Lease | None:
        """The lease of a block that is kept."""
        return self._leases.get(block_id)

    def is_released(self, block_id: int) -> bool:
        """Whether a block has been released, and not found since."""
        return self._of[block_id] in (_RELEASED, _RELEASED_COPY)

    # Details

    @property
    def _copies_share(self) -> int:
        return int(COPIES_SHARE * self.max_contents)

    def _note_use(self, blocks: Sequence[KVCacheBlock]) -> None:
        """The contents of ``blocks`` are the last to have been used, or let go of."""
        self._since[as_array([block.block_id for block in blocks])] = self._num_evicted

    def _num_old(self, limit: int) -> int:
        """How many protected blocks, up to ``limit``, leave before the first one on probation. That
        one would have stayed longer in the room of copies beyond their share."""
        now, since = self._num_evicted, self._since
        first = next(iter(self._pool.free_block_queue.iter_blocks_after(None)), None)
        if first is None:
            return 0
        age = now - since[first.block_id] + max(0, self.num_copies - self._copies_share)
        blocks = islice(self._protected.iter_blocks_after(None), limit)
        before = now - PROTECTED_AGE * age
        return sum(1 for _ in takewhile(lambda block: since[block.block_id] < before, blocks))

    def _may_release(self, block_id: int, lease: Lease) -> bool:
        if self._pool.blocks[block_id].ref_cnt or self._of[block_id] in (_EXPECTED, _EXPECTED_COPY):
            return False
        known = self._leases.get(block_id)
        return known is None or known.session == lease.session

    def _move(self, block_ids: Iterable[int], sources: Container[int], target: int) -> None:
        """Move those of these blocks that belong to one of the segments ``sources``, or will when
        they are no copies any more, to the end of another, children first; expected ones to the
        front of theirs: requests are taken up in the order of vLLM's queue."""
        of = self._of
        blocks = [self._pool.blocks[i] for i in block_ids if of[i] % _COPY in sources]
        free = [b for b in blocks if b.ref_cnt == 0 and of[b.block_id] < _COPY]
        self._take_out(free, self._count(free))
        for block in blocks:
            of[block.block_id] += target - of[block.block_id] % _COPY
        self._note_use(free)
        queue = self._queues[target]
        (queue.prepend_n if target == _EXPECTED else queue.append_n)(free[::-1])

    def _end_leases(self) -> None:
        """Blocks whose time is over become protected, as if a request had found them now."""
        if not self._leases:
            return
        self._move(self._leases.pop_over(self.clock()), (_KEPT,), _PROTECTED)

    def _settle_oldest(self) -> None:
        """Move the copies that the device has let go of first."""
        of, blocks, on_device = self._of, self._pool.blocks, self.device_keys()
        let_go = self._let_go.pop_oldest()
        copies = [blocks[block_id] for block_id in let_go if of[block_id] >= _COPY]
        free: tuple[list[KVCacheBlock], ...] = tuple([] for _ in range(_COPY))
        for block, key in zip(copies, block_pool.keys_of(copies), strict=True):
            segment = of[block.block_id] - _COPY
            if key in on_device:
                self._twins[block.block_id] = None
            elif segment >= 0:
                of[block.block_id] = segment
                self.num_copies -= 1
                if block.ref_cnt == 0:
                    free[segment].append(block)
        for queue, of_queue in zip(self._queues, free, strict=False):
            # From the last on, as a piece of the queue is cut out from its end.
            block_pool.unlink(reversed(of_queue))
            self._copies.num_free_blocks -= len(of_queue)
            self._note_use(of_queue)
            queue.append_n(of_queue)
        self._limit_kept()

    def _count(self, blocks: Iterable[KVCacheBlock]) -> list[int]:
        """By queue, how many of ``blocks`` belong to it."""
        segments = [min(self._of[block.block_id], _COPY) for block in blocks]
        return [segments.count(segment) for segment in range(len(self._queues))]

    def _take_out(self, free: Iterable[KVCacheBlock], counts: Sequence[int]) -> None:
        """Take free blocks out of their queues. ``counts``: by queue, how many."""
        block_pool.unlink(free)
        for queue, count in zip(self._queues, counts, strict=True):
            queue.num_free_blocks -= count

    def _forget(self, blocks: Iterable[KVCacheBlock]) -> None:
        """``blocks`` have lost their contents, and so their segment."""
        of = self._of
        for block in blocks:
            self.num_copies -= of[block.block_id] >= _COPY
            of[block.block_id] = _PROBATION
        if self._leases:
            self._leases.end([block.block_id for block in blocks])

    def _limit_kept(self) -> None:
        kept = self._kept
        count = kept.num_free_blocks - int(KEPT_SHARE * self.max_contents)
        if count > 0:
            blocks = kept.popleft_n(count)
            for block in blocks:
                self._of[block.block_id] = _PROTECTED
            self._leases.end([block.block_id for block in blocks])
            self._note_use(blocks)
            self._protected.append_n(blocks)
