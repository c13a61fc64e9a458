"""CpuTier: the host blocks, managed by vLLM's own coordinator and block pool.

The free queue of the pool is kept so that **a free block always stands before its parent**,
the block that holds the tokens just before its own. Blocks are evicted from the front, so the
tail of a prefix leaves before its head, at any moment and whatever the order of stores: a
chain without its head could never be found again.

A block may come before its parent does, while only the device has that: a hit then goes on from
the device's blocks with the tier's.

A host block may hold several device blocks, its **parts**: as many in every group. The ranks know
nothing of that. They have slots of a device block each, and a host block's are neighbours. Block
sizes, keys and hits here are those of whole host blocks.
"""

import gc
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice, takewhile
from typing import NamedTuple, Protocol

from vllm.utils.math_utils import cdiv
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    BlockHashWithGroupId,
    KVCacheBlock,
    get_group_id,
    make_block_hash_with_group_id,
    resolve_block_hashes,
)
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

from simple_offload import metrics


class HostHit(NamedTuple):
    """What the tier holds of a prefix beyond the tokens the device has."""

    blocks: tuple[list[KVCacheBlock], ...]
    """For each group the host blocks from ``CpuTier.start_of`` the device's tokens on; null
    blocks where attention does not look (outside a sliding window)."""

    num_tokens: int
    """How many tokens they add to the device's. 0: no hit, and nothing to pin. It may end inside
    a host block; then of each group's last block as much counts."""


class Content(Protocol):
    """What a host block holds."""

    @property
    def key(self) -> BlockHashWithGroupId:
        """By which it is found."""

    @property
    def parent(self) -> BlockHashWithGroupId | None:
        """The key of the tokens just before its own."""

    @property
    def num_tokens(self) -> int:
        """Of the prefix that ends with it."""

    @property
    def inner_keys(self) -> Iterable[BlockHashWithGroupId]:
        """Of prefixes that end inside it, by which it shall be found too."""

    @property
    def early(self) -> bool:
        """Whether it may be there before its parent is."""


class _Content(NamedTuple):
    key: BlockHashWithGroupId
    parent: BlockHashWithGroupId | None
    num_tokens: int
    inner_keys: Iterable[BlockHashWithGroupId]
    early: bool


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
        """``hash_block_size``: how many tokens each of a request's hashes covers; the
        coordinator's hashes and blocks are to cover ``num_parts`` times as many as the device's.
        ``demotes``: ``demote`` may be used, for which what follows each block has to be counted.
        """
        self.demotes = demotes
        self.coordinator = coordinator
        self.meter = meter or metrics.Meter()
        self.num_used = 0
        """Blocks that hold something."""
        self.pool: BlockPool = coordinator.block_pool
        self.hash_block_size = hash_block_size
        self.num_parts = num_parts
        self.group_ids: tuple[int, ...] = coordinator.kv_cache_config.prefix_cacheable_group_ids
        self.block_sizes = coordinator.group_block_sizes  # tokens, by group
        self.chained_group_ids = tuple(
            group
            for group in self.group_ids
            if isinstance(coordinator.single_type_managers[group], FullAttentionManager)
        )
        """Groups of which a hit needs every block from the first token on."""
        self._key_ends = [
            make_block_hash_with_group_id(BlockHash(b""), group)
            for group in range(len(self.block_sizes))
        ]
        """By group, what makes a hash a key: of a long prefix there are thousands to make."""
        self._is_one_chain = (
            [type(manager) for manager in coordinator.single_type_managers]
            == [FullAttentionManager]
            and self.group_ids == (0,)
            and not coordinator.eagle_group_ids
            and self.block_sizes[0] == coordinator.block_pool.hash_block_size
        )
        """Whether a lookup is a walk along one chain, as for most models."""
        self.version = 0
        """Grows whenever a lookup might find something else than before."""
        self._parents: dict[int, BlockHashWithGroupId] = {}
        """By id of a cached block that is not a chain's first: the key of its parent."""
        self._early: dict[BlockHashWithGroupId, set[int]] = {}
        """By key of a parent that has not come yet: the ids of the blocks that follow it."""
        self._num_followers: dict[BlockHashWithGroupId, int] = {}
        """By key of a parent, come yet or not: how many blocks follow it."""
        self._demoted: set[int] = set()
        """Ids of free blocks that ``demote`` has put first."""

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
        self.pool.num_gpu_blocks = self.num_blocks
        self.pool.free_block_queue.prepend_n(new)

    def slots(self, blocks: Iterable[KVCacheBlock]) -> list[int]:
        """Where the parts of ``blocks`` lie in each rank's host memory, in order. The first
        ``num_parts`` slots are the null block's."""
        count = self.num_parts
        if count == 1:
            return [block.block_id for block in blocks]
        return [block.block_id * count + part for block in blocks for part in range(count)]

    def blocks_at(self, slots: Iterable[int]) -> list[KVCacheBlock]:
        """The blocks that these slots belong to, each once."""
        return [self.pool.blocks[i] for i in dict.fromkeys(s // self.num_parts for s in slots)]

    # Looking

    def keys(
        self, block_hashes: list[BlockHash], group: int, start: int = 0, stop: int | None = None
    ) -> list[BlockHashWithGroupId]:
        """The keys of a request's blocks ``start`` to ``stop`` of ``group``, as far as their
        hashes are known."""
        hashes = resolve_block_hashes(block_hashes, self.hash_block_size, self.block_sizes[group])
        stop = len(hashes) if stop is None else min(stop, len(hashes))
        end = self._key_ends[group]
        return [BlockHashWithGroupId(hashes[i] + end) for i in range(start, stop)]

    def key_at(
        self, block_hashes: list[BlockHash], group: int, num_tokens: int
    ) -> BlockHashWithGroupId:
        """The key of what ends with the prefix of ``num_tokens`` tokens, a multiple of the hash
        block size: inside a block, perhaps."""
        return make_block_hash_with_group_id(
            block_hashes[num_tokens // self.hash_block_size - 1], group
        )

    def part_keys(
        self, block_hashes: list[BlockHash], group: int, index: int
    ) -> list[BlockHashWithGroupId]:
        """The keys by which the device knows the parts of a request's host block ``index``."""
        size = self.block_sizes[group] // self.num_parts
        first = index * self.num_parts
        return [
            self.key_at(block_hashes, group, (first + part + 1) * size)
            for part in range(self.num_parts)
        ]

    def start_of(self, num_computed_tokens: int) -> int:
        """Where a lookup beyond ``num_computed_tokens`` begins: there, or as many tokens earlier
        as the device has of the next host block of some group."""
        if self.num_parts == 1:
            return num_computed_tokens
        return num_computed_tokens - num_computed_tokens % self.coordinator.scheduler_block_size

    def get(self, key: BlockHashWithGroupId) -> KVCacheBlock | None:
        """The block that holds ``key``, if any. Changes nothing."""
        return self.pool.cached_block_hash_to_block.get_one_block(key)

    def has_none(self, keys: Iterable[BlockHashWithGroupId]) -> bool:
        """Whether no block holds one of ``keys``."""
        cached = self.pool.cached_block_hash_to_block._cache
        return cached.keys().isdisjoint(keys)

    def lookup(
        self, block_hashes: list[BlockHash], num_computed_tokens: int, max_tokens: int
    ) -> HostHit:
        """The longest prefix beyond ``num_computed_tokens`` that every group can supply, at most
        ``max_tokens`` tokens. Changes nothing.

        Only the part that the device lacks is looked up: a window that reaches back over its
        start is served by the device blocks in front of it.
        """
        start = self.start_of(num_computed_tokens)
        first = start // self.hash_block_size
        remaining = block_hashes[first + self.num_parts - 1 :: self.num_parts]
        if not remaining or max_tokens <= 0:
            return HostHit((), 0)
        max_tokens += num_computed_tokens - start
        if self._is_one_chain:
            blocks, num_tokens = self._longest_chain(remaining, max_tokens)
        else:
            blocks, num_tokens, _ = self.coordinator.find_longest_cache_hit(remaining, max_tokens)
        if self.num_parts > 1:
            num_tokens = self._extend(block_hashes, start, blocks, num_tokens, max_tokens)
        return HostHit(blocks, max(0, start + num_tokens - num_computed_tokens))

    def lineage(
        self, block_hashes: list[BlockHash], num_computed_tokens: int
    ) -> list[KVCacheBlock]:
        """The blocks that precede a hit in its chains, in order, as far as they are there: they
        have to stay as long as the hit does, although the device has its own copies."""
        ancestors = []
        for group in self.chained_group_ids:
            count = self.start_of(num_computed_tokens) // self.block_sizes[group]
            ancestors += self._present(self.keys(block_hashes, group, stop=count))
        return ancestors

    # Holding

    def pin(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Add a reference to each block: it cannot be evicted. Null blocks must not be among
        them (vLLM 0.32 counts references to those)."""
        self.pool.touch(blocks)
        if self._demoted:
            self._demoted.difference_update([block.block_id for block in blocks])

    def unpin(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Drop a reference to each block, parents before children. What nobody refers to any
        more joins the free queue: just before its parent if that is free, else last, and first
        if it holds nothing."""
        run: list[KVCacheBlock] = []  # a chain, each the parent of the next
        for block in blocks:
            last = block.ref_cnt == 1
            if last and run and self._parents.get(block.block_id) == run[-1].block_hash:
                run.append(block)
                continue
            if run:
                self._release(run)
                run = []
            if last and block.block_hash is not None:
                run.append(block)
            else:
                self.pool.free_blocks((block,))
        if run:
            self._release(run)

    def refresh(self, keys: Iterable[BlockHashWithGroupId]) -> None:
        """Make the blocks of a chain of a chained group (``keys`` from its first block on), as
        far as it is there and not demoted, the most recently used."""
        chain = self._present(keys)
        if self._demoted:
            chain = list(takewhile(lambda block: block.block_id not in self._demoted, chain))
        self.pin(chain)
        self.pool.free_blocks(reversed(chain))  # each before its parent

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
            if self._num_followers.get(key, 0) == num_going[key]:
                going[block.block_id] = block
                if (parent := self._parents.get(block.block_id)) is not None:
                    num_going[parent] += 1
        for block in going.values():
            queue.remove(block)
        queue.prepend_n(list(going.values()))
        self._demoted.update(going)

    def promote(self, key: BlockHashWithGroupId) -> None:
        """Make the block of ``key`` and what precedes it the most recently used, if it is demoted:
        the device will not have it much longer."""
        if self._demoted and (block := self.get(key)) and block.block_id in self._demoted:
            self._renew(block)

    # Filling

    def allocate(
        self, count: int, keep: Container[BlockHashWithGroupId] = frozenset()
    ) -> list[KVCacheBlock]:
        """Up to ``count`` pinned blocks to be filled, fewer where there is no room.

        Evicts the least recently used blocks, but stops at one that holds a key in ``keep``:
        then the tier is full of the very chain that wants to grow.
        """
        queue = self.pool.free_block_queue
        limit = min(count, queue.num_free_blocks)
        block = queue.fake_free_list_head.next_free_block
        room, evicts = 0, 0
        while room < limit:
            assert block is not None
            if block.block_hash is not None:
                if block.block_hash in keep:
                    break
                evicts += 1
            block = block.next_free_block
            room += 1
        if room == 0:
            return []
        if not evicts:
            # What get_new_blocks does, less its look at every block for what to evict.
            empty: list[KVCacheBlock] = queue.popleft_n(room)
            for block in empty:
                block.ref_cnt = 1
            return empty
        self.version += 1
        self._lose(evicts, "lru")
        blocks: list[KVCacheBlock] = self.pool.get_new_blocks(room)
        for evicted in blocks:
            self._forget_parent(evicted.block_id)
        return blocks

    def commit(
        self,
        block: KVCacheBlock,
        key: BlockHashWithGroupId,
        parent: BlockHashWithGroupId | None,
        num_tokens: int,
        inner_keys: Iterable[BlockHashWithGroupId] = (),
        early: bool = False,
    ) -> bool:
        """``commit_all`` for one block."""
        (useful,) = self.commit_all([(_Content(key, parent, num_tokens, inner_keys, early), block)])
        return useful

    def commit_all(self, filled: Sequence[tuple["Content", KVCacheBlock]]) -> list[bool]:
        """Make blocks, whose bytes are complete on every rank, findable by what they hold, and
        unpin them. Parents come before their children.

        By block False, with the block free and empty, where it could never be part of a hit: its
        chain's head has left meanwhile, or another block holds the key.
        """
        # What _insert_block_hash does for an empty block and a key that none has, at a third.
        cached = self.pool.cached_block_hash_to_block._cache
        useful: list[bool] = []
        renewed: list[KVCacheBlock] = []
        before = None  # what has just been committed
        for content, block in filled:
            key, parent = content.key, content.parent
            orphaned = (
                parent is not None
                and parent != before
                and parent not in cached
                and self._is_chained(key)
            )
            if (orphaned and not content.early) or key in cached:
                useful.append(False)
                continue
            useful.append(True)
            block.set_block_hash(key, content.num_tokens)
            cached[key] = block
            for inner_key in content.inner_keys:
                self.pool._insert_block_hash(inner_key, block, num_tokens=None)
            if parent is not None:
                self._parents[block.block_id] = parent
                if self.demotes:
                    self._num_followers[parent] = self._num_followers.get(parent, 0) + 1
                if orphaned:
                    self._early.setdefault(parent, set()).add(block.block_id)
            if self._early and self._early.pop(key, None) is not None:
                renewed.append(block)
            before = key
        count = sum(useful)
        self.version += count
        self.num_used += count
        self.meter.add(metrics.STORED, count)
        self.unpin([block for _, block in filled])
        for block in renewed:
            self._renew(block)  # what follows it stands anywhere, it had better stand last
        return useful

    def drop(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Forget what ``blocks`` hold, at once; references to them stay. With a block go all
        that descend from it, which could not be found any more."""
        self.version += 1
        lost = {block.block_id for block in blocks if block.block_hash is not None}
        lost_keys = {self.pool.blocks[block_id].block_hash for block_id in lost}
        while lost:
            self._lose(len(lost), "load_failed")
            self.pool.evict_blocks(lost)
            for block_id in lost:
                self._forget_parent(block_id)
                self._queue_first(self.pool.blocks[block_id])
            lost = {child for child, parent in self._parents.items() if parent in lost_keys}
            lost_keys = {self.pool.blocks[block_id].block_hash for block_id in lost}

    def reset(self) -> None:
        """Forget everything, at once; references stay."""
        self.version += 1
        self.pool.evict_blocks({b.block_id for b in self.pool.blocks if b.block_hash is not None})
        self._parents.clear()
        self._early.clear()
        self._num_followers.clear()
        self._demoted.clear()
        self._lose(self.num_used, "reset")

    def check_integrity(self) -> None:
        """Raise AssertionError when the free queue, the hash map and the parents disagree.
        Costs time in proportion to the tier: for tests."""
        position = {
            block.block_id: place
            for place, block in enumerate(self.pool.free_block_queue.get_all_free_blocks())
        }
        assert len(position) == self.pool.get_num_free_blocks(), "free queue miscounted"
        for block in self.pool.blocks:
            if block.is_null:
                continue
            free = block.block_id in position
            assert free == (block.ref_cnt == 0), f"{block}: free and referred to, or neither"
            for inner_key in self.pool.cached_block_hashes_by_block.get(block.block_id, ()):
                assert block.block_hash is not None and self.get(inner_key) is not None, (
                    f"{block}: has lost a key of a part of it"
                )
            parent_key = self._parents.get(block.block_id)
            if block.block_hash is None:
                assert parent_key is None, f"{block}: empty, yet has a parent"
                continue
            found = self.get(block.block_hash)
            assert found is not None and found.block_id == block.block_id, (
                f"{block}: not found by its own key"
            )
            if parent_key is not None and self._is_chained(block.block_hash):
                parent = self.get(parent_key)
                if parent is None:
                    if block.block_id in self._early.get(parent_key, ()):
                        continue
                    raise AssertionError(f"{block}: its chain's head has left the tier")
                later = position.get(parent.block_id, len(position))
                assert position.get(block.block_id, -1) < later, f"{block}: outlives {parent}"
        if self.demotes:
            followers = Counter(self._parents.values())
            assert self._num_followers == followers, "followers miscounted"
        for block_id in self._demoted:
            block = self.pool.blocks[block_id]
            assert block.ref_cnt == 0 and block.block_hash is not None, f"{block}: is demoted"
        num_used = sum(block.block_hash is not None for block in self.pool.blocks)
        assert num_used == self.num_used, f"{num_used} blocks hold something, not {self.num_used}"

    # Details

    def _extend(
        self,
        block_hashes: list[BlockHash],
        start: int,
        blocks: tuple[list[KVCacheBlock], ...],
        num_tokens: int,
        max_tokens: int,
    ) -> int:
        """Let a hit of ``num_tokens`` from ``start`` on go on into the next host block of each
        group, which must be there although not all of it is to be used: a request computes its
        last token itself, and a drafter's block is good up to its last token only. Returns how
        long the hit is then, in whole device blocks; never to the end of the host block.
        """
        block_size = self.coordinator.scheduler_block_size
        limit = min(max_tokens, num_tokens + block_size - 1)
        limit -= limit % (block_size // self.num_parts)
        if limit <= num_tokens:
            return num_tokens
        found = {}
        for group in self.group_ids:
            size = self.block_sizes[group]
            first, stop = (start + num_tokens) // size, cdiv(start + limit, size)
            found[group] = self._present(self.keys(block_hashes, group, first, stop))
            if len(found[group]) < stop - first:
                return num_tokens
        for group, more in found.items():
            blocks[group][num_tokens // self.block_sizes[group] :] = more
        return limit

    def _lose(self, count: int, reason: str) -> None:
        """So many blocks lose what they hold."""
        self.num_used -= count
        self.meter.add(metrics.EVICTED, count, reason)

    def _longest_chain(
        self, block_hashes: Iterable[BlockHash], max_tokens: int
    ) -> tuple[tuple[list[KVCacheBlock], ...], int]:
        """What ``find_longest_cache_hit`` finds where ``_is_one_chain``, in a third of the time."""
        get, end = self.pool.cached_block_hash_to_block.get_one_block, self._key_ends[0]
        blocks = []
        for each in islice(block_hashes, max_tokens // self.block_sizes[0]):
            if (block := get(BlockHashWithGroupId(each + end))) is None:
                break
            blocks.append(block)
        return (blocks,), len(blocks) * self.block_sizes[0]

    def _present(self, keys: Iterable[BlockHashWithGroupId]) -> list[KVCacheBlock]:
        """The blocks of those ``keys`` that are there."""
        return [block for key in keys if (block := self.get(key)) is not None]

    def _forget_parent(self, block_id: int) -> None:
        self._demoted.discard(block_id)
        parent = self._parents.pop(block_id, None)
        if parent is None:
            return
        if self.demotes:
            self._num_followers[parent] -= 1
            if not self._num_followers[parent]:
                del self._num_followers[parent]
        if (early := self._early.get(parent)) is not None:
            early.discard(block_id)
            if not early:
                del self._early[parent]

    def _renew(self, block: KVCacheBlock) -> None:
        """Make ``block`` and what precedes it in its chain the most recently used."""
        lineage: list[KVCacheBlock] = []
        found: KVCacheBlock | None = block
        while found is not None:
            lineage.append(found)
            parent = self._parents.get(found.block_id)
            found = self.get(parent) if parent is not None else None
        self.pin(lineage)
        self.unpin(reversed(lineage))

    def _is_chained(self, key: BlockHashWithGroupId) -> bool:
        return int(get_group_id(key)) in self.chained_group_ids

    def _release(self, chain: Sequence[KVCacheBlock]) -> None:
        """Drop the last reference to each block of a chain."""
        successor = self._free_parent(chain[0])
        if successor is not None and successor.block_id in self._demoted:
            self._renew(successor)
        if successor is None:
            self.pool.free_blocks(reversed(chain))
            return
        for block in chain:
            block.ref_cnt -= 1
            self._queue_before(block, successor)
            successor = block

    def _free_parent(self, block: KVCacheBlock) -> KVCacheBlock | None:
        if block.block_hash is None or (key := self._parents.get(block.block_id)) is None:
            return None
        parent = self.get(key)
        return parent if parent is not None and parent.ref_cnt == 0 else None

    def _queue_before(self, block: KVCacheBlock, successor: KVCacheBlock) -> None:
        """vLLM's queue takes blocks at its ends only, hence the links by hand."""
        predecessor = successor.prev_free_block
        assert predecessor is not None
        block.prev_free_block, block.next_free_block = predecessor, successor
        predecessor.next_free_block = successor.prev_free_block = block
        self.pool.free_block_queue.num_free_blocks += 1

    def _queue_first(self, block: KVCacheBlock) -> None:
        """Move a free block that holds nothing any more to the front."""
        if block.ref_cnt == 0:
            self.pool.free_block_queue.remove(block)
            self.pool.free_block_queue.prepend_n([block])
