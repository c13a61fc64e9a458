"""EvictionOrder: in which order the host blocks that nobody refers to will be evicted."""

from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from typing import Any, cast

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, KVCacheBlock

from simple_offload.scheduler.tier import block_pool
from simple_offload.scheduler.tier.segmented_lru import Segments


class EvictionOrder:
    """Keeps the pool's free queue so that **a free block always stands before its parent**, the
    block that holds the tokens just before its own. The pool evicts from the front, so the tail
    of a prefix leaves before its head, at any moment and whatever the order of stores: a chain
    without its head could never be found again.

    Beyond that, what no request has found since it was stored leaves first, and then what was
    used the longest time ago (``segments.py``). Of a chain the first blocks are protected, or
    none: the rest stands before them in any case.

    Blocks are given parents when they are filled (``fill``), and lose them with what they hold
    (``forget``). vLLM's queue takes blocks at its ends only, hence links by hand.
    """

    def __init__(
        self, pool: BlockPool, demotes: bool, is_chained: Callable[[BlockHashWithGroupId], bool]
    ) -> None:
        """``demotes``: ``demote`` may be used, for which what follows each block has to be
        counted. ``is_chained``: as of ``Groups``."""
        self.pool = pool
        self._is_chained = is_chained
        self.demotes = demotes
        self.segments = Segments(pool)
        self.parents: list[BlockHashWithGroupId | None] = [None] * len(pool.blocks)
        """By block id, the key of the parent of what the block holds, if it has one."""
        self.early: dict[BlockHashWithGroupId, set[int]] = {}
        """By key of a parent that has not come yet: the ids of the blocks that follow it."""
        self.num_followers: dict[BlockHashWithGroupId, int] = {}
        """By key of a parent, come yet or not: how many blocks follow it."""
        self.demoted: set[int] = set()
        """Ids of free blocks that ``demote`` has put first."""

    # What follows what

    def grow(self) -> None:
        """The pool has more blocks."""
        self.parents.extend([None] * (len(self.pool.blocks) - len(self.parents)))
        self.segments.grow()

    def fill(
        self,
        chain: Sequence[KVCacheBlock],
        keys: Sequence[BlockHashWithGroupId],
        parent: BlockHashWithGroupId | None,
    ) -> None:
        """The blocks of a chain, which held nothing, are found by ``keys`` from now on, which no
        block had. Each holds what comes after the one before it, and the first what comes after
        ``parent``."""
        block_pool.give_keys(self.pool, chain, keys, self.parents, parent)
        if self.demotes:
            for before in (parent, *keys[:-1]):
                if before is not None:
                    self.num_followers[before] = self.num_followers.get(before, 0) + 1

    def wait_for(self, parent: BlockHashWithGroupId, block: KVCacheBlock) -> None:
        """``block`` has been filled before its parent."""
        self.early.setdefault(parent, set()).add(block.block_id)

    def arrive(self, keys: Collection[BlockHashWithGroupId]) -> list[KVCacheBlock]:
        """Those blocks, of which ``keys`` are, that others have been waiting for; no more."""
        arrived = []
        for key in self.early.keys() & keys:
            if (block := self._get(key)) is not None:
                if any(self.segments.is_protected[i] for i in self.early.pop(key)):
                    self.renew(block, found=True)
                arrived.append(block)
        return arrived

    def forget(self, block_id: int) -> None:
        """A block holds nothing any more."""
        self.demoted.discard(block_id)
        self.segments.unprotect(self.pool.blocks[block_id])
        parent, self.parents[block_id] = self.parents[block_id], None
        if parent is None:
            return
        if self.demotes:
            self.num_followers[parent] -= 1
            if not self.num_followers[parent]:
                del self.num_followers[parent]
        if (early := self.early.get(parent)) is not None:
            early.discard(block_id)
            if not early:
                del self.early[parent]

    def evict(
        self, limit: int, keep: Container[BlockHashWithGroupId]
    ) -> tuple[list[KVCacheBlock], int]:
        """The first blocks of the queue, up to ``limit`` or one that holds a key in ``keep``,
        pinned, with what they held forgotten; and how many of them held something."""
        blocks, evicted = self.segments.take(limit, keep)
        self.segments.age(len(blocks))
        if self.demotes or self.early:
            for block in blocks:
                self.forget(block.block_id)
        else:
            for block in blocks:
                self.parents[block.block_id] = None
        if self.num_followers and (gone := self.num_followers.keys() & evicted):
            # A load holds a block that came before its parent, which has now come and gone.
            for block_id, parent in enumerate(self.parents):
                if parent is not None and parent in gone:
                    self.early.setdefault(parent, set()).add(block_id)
        return blocks, len(evicted)

    def forget_all(self) -> None:
        """No block holds anything any more."""
        self.parents = [None] * len(self.pool.blocks)
        self.early.clear()
        self.num_followers.clear()
        self.demoted.clear()
        self.segments.clear()

    def descendants(self, block_ids: Iterable[int]) -> list[int]:
        """Ids of these blocks and of all that descend from them, parents before children. One
        pass over the tier, however deep they go: the scheduler waits for it."""
        last_child: dict[BlockHashWithGroupId, int] = {}
        sibling = [-1] * len(self.parents)
        for block_id, parent in enumerate(self.parents):
            if parent is not None:
                sibling[block_id] = last_child.get(parent, -1)
                last_child[parent] = block_id
        found = dict.fromkeys(block_ids)
        left = list(found)
        for block_id in left:  # which grows meanwhile
            key = self.pool.blocks[block_id].block_hash
            child = last_child.get(key, -1) if key is not None else -1
            while child >= 0:
                if child not in found:
                    found[child] = None
                    left.append(child)
                child = sibling[child]
        return left

    # Holding

    def pin(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Add a reference to each block. Null blocks must not be among them (vLLM 0.32 counts
        references to those)."""
        self.segments.hold(blocks)
        if self.demoted:
            self.demoted.difference_update([block.block_id for block in blocks])

    def unpin(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Drop a reference to each block, parents before children. What nobody refers to any
        more joins its segment of the free queue: just before its parent if that is free there,
        else last; and it is first of all if it holds nothing."""
        self._unpin(blocks)
        self.segments.keep_limit()

    def queue(self, chain: Sequence[KVCacheBlock], parent: KVCacheBlock | None) -> None:
        """Drop the last reference to each block of a chain, which follows ``parent`` and is all
        of one segment."""
        if parent is not None and parent.block_id in self.demoted:
            self.renew(parent)
        self.segments.queue(chain, parent)

    def queue_first(self, block: KVCacheBlock) -> None:
        """Move a block, if it is free, to the front: it holds nothing any more."""
        if block.ref_cnt == 0:
            self.segments.put_first([block])

    # Protecting

    def is_protected(self, block: KVCacheBlock) -> bool:
        """Whether a request has found it not long ago."""
        return bool(self.segments.is_protected[block.block_id])

    def protect(self, part: Sequence[KVCacheBlock]) -> None:
        """A request has found this part of a chain, and what precedes it."""
        self.pin(part)
        self.segments.protect(part)
        self.unpin(part)

    # Moving

    def renew(self, block: KVCacheBlock, found: bool = False) -> None:
        """Make ``block`` and what precedes it in its chain the most recently used; and protected
        if it has been ``found``, as all has been that is demoted."""
        self._renew(block, found)
        self.segments.keep_limit()

    def renew_chain(self, chain: Sequence[KVCacheBlock]) -> None:
        """Make the blocks of a chain, as far as they are not demoted, the most recently used."""
        if self.demoted:
            ids = [block.block_id for block in chain]
            count = next((i for i, each in enumerate(ids) if each in self.demoted), len(ids))
            chain = chain[:count]
        if chain:
            self.pin(chain)
            for piece in self.segments.split(chain):
                for block in piece:
                    block.ref_cnt -= 1
                if free := [block for block in piece if block.ref_cnt == 0]:
                    self.segments.queue(free, None)

    def renew_pieces(self, head: KVCacheBlock | None, last: KVCacheBlock, count: int) -> bool:
        """``renew_chain`` for the ``count`` blocks from ``head`` to ``last``, where it takes no
        more than to move a piece of the queue in each segment; else False, and nothing is
        done."""
        if self.demoted:
            return False
        if head is not None and self._is_one_piece(head, last, count):
            self.segments.renew(last, head)
            return True
        pieces: list[tuple[KVCacheBlock, KVCacheBlock]] = []
        end: KVCacheBlock | None = last
        while end is not None and end.ref_cnt == 0 and len(pieces) < 2:
            head, parent = self._stretch(end)
            pieces.append((end, head))
            if parent is None:
                for piece in pieces:
                    self.segments.renew(*piece)
                return True
            end = self._get(parent)
        return False

    def demote(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Let ``blocks`` (parents before children), which the device has too, be evicted before
        all others, children first. Those stay where they are that somebody refers to, or that
        others follow which stay. Does nothing while there are blocks that hold nothing."""
        assert self.demotes
        queue = self.pool.free_block_queue
        first = queue.fake_free_list_head.next_free_block
        if first is None or first.block_hash is None:
            return
        going: dict[int, KVCacheBlock] = {}
        num_going: Counter[BlockHashWithGroupId] = Counter()
        for block in reversed(blocks):
            key = block.block_hash
            if key is None or block.ref_cnt or block.block_id in going:
                continue
            if self.num_followers.get(key, 0) == num_going[key]:
                going[block.block_id] = block
                if (parent := self.parents[block.block_id]) is not None:
                    num_going[parent] += 1
        self.segments.put_first(list(going.values()))
        self.demoted.update(going)

    # Details

    def _get(self, key: BlockHashWithGroupId) -> KVCacheBlock | None:
        return self.pool.cached_block_hash_to_block.get_one_block(key)

    def _renew(self, block: KVCacheBlock, found: bool) -> None:
        """``renew``, however much is protected."""
        found = found or block.block_id in self.demoted
        lineage: list[KVCacheBlock] = []
        member: KVCacheBlock | None = block
        while member is not None:
            lineage.append(member)
            parent = self.parents[member.block_id]
            member = self._get(parent) if parent is not None else None
        lineage.reverse()
        self.pin(lineage)
        if found:
            self.segments.protect(lineage)
        self._unpin(lineage)

    def _unpin(self, blocks: Iterable[KVCacheBlock]) -> None:
        """``unpin``, however much is protected."""
        parents = self.parents
        chain: list[KVCacheBlock] = []
        last_key = None  # of the chain's last block
        for block in blocks:
            key = block._block_hash if block.ref_cnt == 1 else None
            if key is None:
                # Nothing in the queue's order depends on it.
                self.pool.free_blocks((block,))
                continue
            if last_key is None or parents[block.block_id] != last_key:
                self._release(chain)
                chain = []
            chain.append(block)
            last_key = key
        self._release(chain)

    def _release(self, chain: Sequence[KVCacheBlock]) -> None:
        """Drop the last reference to each block of a chain."""
        if chain:
            key = self.parents[chain[0].block_id]
            parent = self._get(key) if key is not None else None
            if parent is not None and self._is_ahead(chain[0], parent):
                self._renew(parent, found=True)
            for piece in self.segments.split(chain):
                self.queue(piece, parent)
                parent = None  # is of the other segment

    def _is_ahead(self, block: KVCacheBlock, parent: KVCacheBlock) -> bool:
        """Whether a block of a chain is protected and its parent is not: that came when the block
        was pinned, and has gone back on probation before it. (Of a window nobody need have found
        the parent.)"""
        flags, key = self.segments.is_protected, block._block_hash
        is_ahead = flags[block.block_id] > flags[parent.block_id]
        return is_ahead and key is not None and self._is_chained(key)

    def _is_one_piece(self, head: KVCacheBlock, last: KVCacheBlock, count: int) -> bool:
        """Whether nothing lies in the queue between the ``count`` blocks of a chain, and all of
        them are of one segment. They stand there in order, so it takes no more than counting,
        where none is missing. And none is held: with it, ``head`` would be."""
        flags = self.segments.is_protected
        if self.early or head.ref_cnt > 0 or flags[head.block_id] != flags[last.block_id]:
            return False
        block: KVCacheBlock | None = last
        for _ in range(count - 1):
            if block is None:
                return False
            block = block.next_free_block
        return block is head

    def _stretch(self, last: KVCacheBlock) -> tuple[KVCacheBlock, BlockHashWithGroupId | None]:
        """From a free block on towards the head of its chain: the last block that all between
        lies before in one piece of the queue and one segment, and the key of that one's parent,
        if it has one."""
        parents, boundary = self.parents, self.segments.boundary
        block: Any = last
        while (parent := parents[block.block_id]) is not None:
            following = block.next_free_block
            # As a rule the very same object, which is told faster than equality.
            if following._block_hash is not parent or following is boundary:
                break
            block = following
        return cast(KVCacheBlock, block), parent
