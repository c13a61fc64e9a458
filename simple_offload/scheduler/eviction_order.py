"""EvictionOrder: in which order the host blocks that nobody refers to will be evicted."""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from itertools import islice
from typing import Any, cast

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, KVCacheBlock

from simple_offload.scheduler import block_lists


class EvictionOrder:
    """Keeps the pool's free queue so that **a free block always stands before its parent**, the
    block that holds the tokens just before its own. The pool evicts from the front, so the tail
    of a prefix leaves before its head, at any moment and whatever the order of stores: a chain
    without its head could never be found again.

    Blocks are given parents when they are filled (``follow``), and lose them with what they hold
    (``forget``). vLLM's queue takes blocks at its ends only, hence links by hand.
    """

    def __init__(self, pool: BlockPool, demotes: bool) -> None:
        """``demotes``: ``demote`` may be used, for which what follows each block has to be
        counted."""
        self.pool = pool
        self.demotes = demotes
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

    def follow(
        self, blocks: Sequence[KVCacheBlock], parents: Iterable[BlockHashWithGroupId | None]
    ) -> None:
        """These blocks hold what comes after those keys."""
        own = self.parents
        for block, parent in zip(blocks, parents, strict=False):
            own[block.block_id] = parent
            if self.demotes and parent is not None:
                self.num_followers[parent] = self.num_followers.get(parent, 0) + 1

    def wait_for(self, parent: BlockHashWithGroupId, block: KVCacheBlock) -> None:
        """``block`` has been filled before its parent."""
        self.early.setdefault(parent, set()).add(block.block_id)

    def arrive(self, keys: Collection[BlockHashWithGroupId]) -> list[KVCacheBlock]:
        """Those blocks, of which ``keys`` are, that others have been waiting for; no more."""
        arrived = []
        for key in self.early.keys() & keys:
            if (block := self._get(key)) is not None:
                del self.early[key]
                arrived.append(block)
        return arrived

    def forget(self, block_id: int) -> None:
        """A block holds nothing any more."""
        self.demoted.discard(block_id)
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

    def evict(self, count: int) -> list[KVCacheBlock]:
        """The first ``count`` blocks of the queue, pinned, with what they held forgotten."""
        left: list[BlockHashWithGroupId] = []
        if self.num_followers:
            queue = islice(self.pool.free_block_queue.iter_blocks_after(None), count)
            left = [block.block_hash for block in queue if block.block_hash is not None]
        blocks = block_lists.take(self.pool, count)
        if self.demotes or self.early:
            for block in blocks:
                self.forget(block.block_id)
        else:
            for block in blocks:
                self.parents[block.block_id] = None
        for key in left:
            # A load holds a block that came before its parent, which has now come and gone.
            if key in self.num_followers:
                self.early[key] = self.followers_of({key})
        return blocks

    def forget_all(self) -> None:
        """No block holds anything any more."""
        self.parents = [None] * len(self.pool.blocks)
        self.early.clear()
        self.num_followers.clear()
        self.demoted.clear()

    def followers_of(self, keys: Collection[BlockHashWithGroupId | None]) -> set[int]:
        """Ids of the blocks that come right after these."""
        return {
            block_id
            for block_id, parent in enumerate(self.parents)
            if parent is not None and parent in keys
        }

    # Holding

    def pin(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Add a reference to each block. Null blocks must not be among them (vLLM 0.32 counts
        references to those)."""
        block_lists.hold(self.pool, blocks)
        if self.demoted:
            self.demoted.difference_update([block.block_id for block in blocks])

    def unpin(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Drop a reference to each block, parents before children. What nobody refers to any
        more joins the free queue: just before its parent if that is free, else last, and first
        if it holds nothing."""
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

    def queue(self, chain: Sequence[KVCacheBlock], parent: KVCacheBlock | None) -> None:
        """Drop the last reference to each block of a chain, which follows ``parent``."""
        if parent is not None and parent.ref_cnt > 0:
            parent = None
        if parent is not None and parent.block_id in self.demoted:
            self.renew(parent)
        block_lists.queue_chain(self.pool, chain, parent)

    def queue_first(self, block: KVCacheBlock) -> None:
        """Move a block, if it is free, to the front: it holds nothing any more."""
        if block.ref_cnt == 0:
            self.pool.free_block_queue.remove(block)
            self.pool.free_block_queue.prepend_n([block])

    # Moving

    def renew(self, block: KVCacheBlock) -> None:
        """Make ``block`` and what precedes it in its chain the most recently used."""
        lineage: list[KVCacheBlock] = []
        found: KVCacheBlock | None = block
        while found is not None:
            lineage.append(found)
            parent = self.parents[found.block_id]
            found = self._get(parent) if parent is not None else None
        self.pin(lineage)
        self.unpin(reversed(lineage))

    def renew_chain(self, chain: Sequence[KVCacheBlock]) -> None:
        """Make the blocks of a chain, as far as they are not demoted, the most recently used."""
        if self.demoted:
            ids = [block.block_id for block in chain]
            count = next((i for i, each in enumerate(ids) if each in self.demoted), len(ids))
            chain = chain[:count]
        self.pin(chain)
        block_lists.release(self.pool, reversed(chain))  # each before its parent

    def renew_piece(self, last: KVCacheBlock) -> bool:
        """``renew`` where it takes no more than to move a piece of the queue; else False, and
        nothing is done."""
        if last.ref_cnt > 0 or self.demoted:
            return False
        head = self._head_behind(last)
        if head is not None:
            block_lists.move_to_end(self.pool, last, head)
        return head is not None

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
        for block in going.values():
            queue.remove(block)
        queue.prepend_n(list(going.values()))
        self.demoted.update(going)

    # Details

    def _get(self, key: BlockHashWithGroupId) -> KVCacheBlock | None:
        return self.pool.cached_block_hash_to_block.get_one_block(key)

    def _release(self, chain: Sequence[KVCacheBlock]) -> None:
        """Drop the last reference to each block of a chain."""
        if chain:
            key = self.parents[chain[0].block_id]
            self.queue(chain, self._get(key) if key is not None else None)

    def _head_behind(self, last: KVCacheBlock) -> KVCacheBlock | None:
        """The first block of a free block's chain, if all that is between lies between them in
        the queue and nothing else: as mostly."""
        parents = self.parents
        block: Any = last
        while (parent := parents[block.block_id]) is not None:
            block = block.next_free_block
            if block._block_hash != parent:
                return None
        return cast(KVCacheBlock, block)
