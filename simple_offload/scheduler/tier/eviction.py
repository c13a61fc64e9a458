"""EvictionOrder: which free host block leaves the tier next."""

from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Sequence

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, KVCacheBlock

from simple_offload.scheduler.tier import block_pool
from simple_offload.scheduler.tier.segmented_lru import SegmentedQueue


class EvictionOrder:
    """Keeps the free queue so that **a free block always stands before its parent**, the block
    that holds the tokens just before its own. Eviction starts at the front. So the tail of a
    prefix leaves before its head, at any moment and in whatever order blocks were stored: a chain
    without its head can never be found again.

    Within that rule, blocks that no request has found leave first, then the least recently used
    (``segmented_lru.py``). The protected blocks of a chain are its first ones.

    A block gets a parent with its contents (``cache_chain``) and loses both together. vLLM's queue
    takes blocks at its ends only, so chains are linked into it by hand (``block_pool.py``).
    """

    def __init__(
        self,
        pool: BlockPool,
        queue: SegmentedQueue,
        counts_children: bool,
        is_chained: Callable[[BlockHashWithGroupId], bool],
    ) -> None:
        """``counts_children``: needed for ``demote``. ``is_chained``: as in ``Groups``."""
        self._pool = pool
        self._queue = queue
        self._is_chained = is_chained
        self.counts_children = counts_children
        self.parents: list[BlockHashWithGroupId | None] = [None] * len(pool.blocks)
        """By block id, the key of the parent; None for heads and empty blocks."""
        self.early: dict[BlockHashWithGroupId, set[int]] = {}
        """By key of a parent that is not in the tier: ids of its children."""
        self.num_children: dict[BlockHashWithGroupId, int] = {}
        """By key of a parent, in the tier or not: number of its children."""

    # Parents

    def grow(self) -> None:
        """Cover the blocks that the pool has by now."""
        self.parents.extend([None] * (len(self._pool.blocks) - len(self.parents)))

    def cache_chain(
        self,
        chain: Sequence[KVCacheBlock],
        keys: Sequence[BlockHashWithGroupId],
        parent: BlockHashWithGroupId | None,
    ) -> None:
        """Make the blocks of a chain, which are empty and pinned, findable by ``keys``, which no
        block holds. ``parent``: of the first one."""
        block_pool.cache_chain(self._pool, chain, keys, self.parents, parent)
        if self.counts_children:
            for key in (parent, *keys[:-1]):
                if key is not None:
                    self.num_children[key] = self.num_children.get(key, 0) + 1

    def add_early(self, parent: BlockHashWithGroupId, block: KVCacheBlock) -> None:
        """Note that ``block`` came before its parent."""
        self.early.setdefault(parent, set()).add(block.block_id)

    def on_cached(self, keys: Collection[BlockHashWithGroupId]) -> list[KVCacheBlock]:
        """Blocks with ``keys`` are in the tier now. Returns those whose children came earlier."""
        parents = []
        for key in self.early.keys() & keys:
            if (block := block_pool.get_block(self._pool, key)) is not None:
                if any(self._queue.is_protected[child] for child in self.early.pop(key)):
                    self.renew(block, protect=True)
                parents.append(block)
        return parents

    def evict(
        self, limit: int, keep: Container[BlockHashWithGroupId]
    ) -> tuple[list[KVCacheBlock], int]:
        """Up to ``limit`` pinned, empty blocks from the front of the queue, up to the first one
        with a key in ``keep``; and how many of them had contents."""
        blocks, evicted = self._queue.get_new_blocks(limit, keep)
        if self.counts_children or self.early:
            for block in blocks:
                self._remove_parent(block.block_id)
        else:
            for block in blocks:
                self.parents[block.block_id] = None
        if self.num_children and (gone := self.num_children.keys() & evicted):
            # A load has pinned a child that came before its parent.
            for block_id, parent in enumerate(self.parents):
                if parent is not None and parent in gone:
                    self.early.setdefault(parent, set()).add(block_id)
        return blocks, len(evicted)

    def drop(self, block_ids: Iterable[int]) -> list[int]:
        """Empty these blocks and their descendants. References stay; free blocks become the first
        to be allocated. Returns the ids of all. One pass over the tier, however long the chains:
        the scheduler waits for it."""
        dropped = self._with_descendants(block_ids)
        self._pool.evict_blocks(set(dropped))
        for block_id in dropped:
            self._remove_parent(block_id)
        self._queue.on_emptied([self._pool.blocks[block_id] for block_id in dropped])
        return dropped

    def reset(self) -> None:
        """Empty all blocks. References stay."""
        cached = [b.block_id for b in self._pool.blocks if b.block_hash is not None]
        self._pool.evict_blocks(set(cached))
        self.parents = [None] * len(self._pool.blocks)
        self.early.clear()
        self.num_children.clear()
        self._queue.clear()

    # References

    def unpin(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Drop a reference to each block, parents before children. A block without references
        joins its segment of the queue: just before its parent if that is free there, else last.
        An empty block joins the queue's front."""
        self._unpin(blocks)
        self._queue.enforce_limit()

    def free(self, chain: Sequence[KVCacheBlock], parent: KVCacheBlock | None) -> None:
        """Drop the last reference to each block of a chain in one segment, which ``parent``
        precedes."""
        if parent is not None and parent.block_id in self._queue.demoted:
            self.renew(parent)
        self._queue.free(chain, parent)

    # Moves

    def protect(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Protect consecutive blocks of a chain, whose ancestors are protected."""
        self._queue.pin(blocks)
        self._queue.protect(blocks)
        self.unpin(blocks)

    def renew(self, block: KVCacheBlock, protect: bool = False) -> None:
        """Make ``block`` and its ancestors the most recently used. ``protect`` them too; demoted
        blocks, which a request has found, become protected in any case."""
        self._renew(block, protect)
        self._queue.enforce_limit()

    def renew_chain(self, chain: Sequence[KVCacheBlock]) -> None:
        """Make the blocks of a chain, up to the first demoted one, the most recently used."""
        demoted = self._queue.demoted
        if demoted:
            ids = [block.block_id for block in chain]
            chain = chain[: next((i for i, each in enumerate(ids) if each in demoted), len(ids))]
        if chain:
            self._queue.pin(chain)
            for piece in self._queue.split(chain):
                for block in piece:
                    block.ref_cnt -= 1
                if free := [block for block in piece if block.ref_cnt == 0]:
                    self._queue.free(free, None)

    def renew_pieces(self, head: KVCacheBlock | None, last: KVCacheBlock, count: int) -> bool:
        """``renew_chain`` for the ``count`` blocks from ``head`` to ``last``, if it takes only one
        move of a piece of the queue in each segment; else False, and nothing has changed."""
        if self._queue.demoted:
            return False
        if head is not None and self._is_one_piece(head, last, count):
            self._queue.renew(last, head)
            return True
        pieces: list[tuple[KVCacheBlock, KVCacheBlock]] = []
        end: KVCacheBlock | None = last
        while end is not None and end.ref_cnt == 0 and len(pieces) < 2:
            first = end
            ancestor, parent = block_pool.last_ancestor_behind(
                first, self.parents, self._queue.boundary
            )
            pieces.append((first, ancestor))
            if parent is None:
                for piece in pieces:
                    self._queue.renew(*piece)
                return True
            end = block_pool.get_block(self._pool, parent)
        return False

    def demote(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Make ``blocks``, parents before children, the first to be evicted, children first.
        Pinned blocks stay, and so do ancestors of blocks that stay. Without effect while the tier
        has empty blocks."""
        assert self.counts_children
        if block_pool.first_free(self._pool).block_hash is None:  # also if none is free
            return
        going: dict[int, KVCacheBlock] = {}
        num_going: Counter[BlockHashWithGroupId] = Counter()
        for block in reversed(blocks):
            key = block.block_hash
            if key is None or block.ref_cnt or block.block_id in going:
                continue
            if self.num_children.get(key, 0) == num_going[key]:
                going[block.block_id] = block
                if (parent := self.parents[block.block_id]) is not None:
                    num_going[parent] += 1
        self._queue.demote(list(going.values()))

    # Details

    def _remove_parent(self, block_id: int) -> None:
        """A block has lost its contents: it has no parent any more."""
        parent, self.parents[block_id] = self.parents[block_id], None
        if parent is None:
            return
        if self.counts_children:
            self.num_children[parent] -= 1
            if not self.num_children[parent]:
                del self.num_children[parent]
        if (early := self.early.get(parent)) is not None:
            early.discard(block_id)
            if not early:
                del self.early[parent]

    def _with_descendants(self, block_ids: Iterable[int]) -> list[int]:
        """Ids of these blocks and of all their descendants, parents before children."""
        last_child: dict[BlockHashWithGroupId, int] = {}
        sibling = [-1] * len(self.parents)
        for block_id, parent in enumerate(self.parents):
            if parent is not None:
                sibling[block_id] = last_child.get(parent, -1)
                last_child[parent] = block_id
        found = dict.fromkeys(block_ids)
        family = list(found)
        for block_id in family:  # which grows meanwhile
            key = self._pool.blocks[block_id].block_hash
            child = last_child.get(key, -1) if key is not None else -1
            while child >= 0:
                if child not in found:
                    found[child] = None
                    family.append(child)
                child = sibling[child]
        return family

    def _renew(self, block: KVCacheBlock, protect: bool) -> None:
        """``renew`` without regard to the limit."""
        protect = protect or block.block_id in self._queue.demoted
        chain: list[KVCacheBlock] = []
        ancestor: KVCacheBlock | None = block
        while ancestor is not None:
            chain.append(ancestor)
            parent = self.parents[ancestor.block_id]
            ancestor = block_pool.get_block(self._pool, parent) if parent is not None else None
        chain.reverse()
        self._queue.pin(chain)
        if protect:
            self._queue.protect(chain)
        self._unpin(chain)

    def _unpin(self, blocks: Iterable[KVCacheBlock]) -> None:
        """``unpin`` without regard to the limit."""
        for chain in block_pool.unpinned_chains(self._pool, blocks, self.parents):
            self._free_chain(chain)

    def _free_chain(self, chain: Sequence[KVCacheBlock]) -> None:
        """Drop the last reference to each block of a chain."""
        key = self.parents[chain[0].block_id]
        parent = block_pool.get_block(self._pool, key) if key is not None else None
        if parent is not None and self._is_protected_alone(chain[0], parent):
            self._renew(parent, protect=True)
        for piece in self._queue.split(chain):
            self.free(piece, parent)
            parent = None  # stands in the other segment

    def _is_protected_alone(self, block: KVCacheBlock, parent: KVCacheBlock) -> bool:
        """Whether a block of a chain is protected and its parent is not: the parent came while
        the block was pinned, or returned to probation before it. (A window's parent need not have
        been found.)"""
        flags, key = self._queue.is_protected, block.block_hash
        alone = flags[block.block_id] > flags[parent.block_id]
        return alone and key is not None and self._is_chained(key)

    def _is_one_piece(self, head: KVCacheBlock, last: KVCacheBlock, count: int) -> bool:
        """Whether the ``count`` blocks of a chain are one piece of the queue and one segment.
        Children stand before parents, so counting is enough if no block is missing. None is
        pinned if ``head`` is not."""
        flags = self._queue.is_protected
        if self.early or head.ref_cnt > 0 or flags[head.block_id] != flags[last.block_id]:
            return False
        return block_pool.is_one_piece(last, head, count)
