"""CpuTier: the host blocks, managed by vLLM's own coordinator and block pool.

The tail of a prefix is evicted before its head (``eviction_order.py``): a chain without its head
could never be found again.

A block may come before its parent does, while only the device has that: a hit then goes on from
the device's blocks with the tier's.

A host block may hold several device blocks, its **parts**: as many in every group. The ranks know
nothing of that. They have slots of a device block each, and a host block's are neighbours. Block
sizes, keys and hits here are those of whole host blocks.
"""

import gc
from bisect import bisect_left
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from vllm.utils.math_utils import cdiv
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    BlockHashWithGroupId,
    KVCacheBlock,
    make_block_hash_with_group_id,
    resolve_block_hashes,
)
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

from simple_offload import metrics
from simple_offload.scheduler import block_lists
from simple_offload.scheduler.chains import Chains, Hashes, make_keys
from simple_offload.scheduler.eviction_order import EvictionOrder
from simple_offload.scheduler.integrity import check_integrity
from simple_offload.scheduler.runs import Run

_LENGTH_OF_KEY_END = len(make_block_hash_with_group_id(BlockHash(b""), 0))


class HostHit(NamedTuple):
    """What the tier holds of a prefix beyond the tokens the device has."""

    blocks: tuple[list[KVCacheBlock], ...]
    """For each group the host blocks from ``CpuTier.start_of`` the device's tokens on; null
    blocks where attention does not look (outside a sliding window)."""

    num_tokens: int
    """How many tokens they add to the device's. 0: no hit, and nothing to pin. It may end inside
    a host block; then of each group's last block as much counts."""


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
        self.key_ends = [
            make_block_hash_with_group_id(BlockHash(b""), group)
            for group in range(len(self.block_sizes))
        ]
        """By group, what makes a hash a key: of a long prefix there are thousands to make."""
        self._chained_key_ends = {self.key_ends[group] for group in self.chained_group_ids}
        self._is_one_chain = (
            [type(manager) for manager in coordinator.single_type_managers]
            == [FullAttentionManager]
            and self.group_ids == (0,)
            and not coordinator.eagle_group_ids
            and self.block_sizes[0] == coordinator.block_pool.hash_block_size
        )
        """Whether a lookup is a walk along one chain, as for most models, which takes a fraction
        of the time of ``find_longest_cache_hit``."""
        self.version = 0
        """Grows whenever a lookup might find something else than before."""
        self.order = EvictionOrder(self.pool, demotes)
        self._chains = Chains(self.order)

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
        count = self.num_parts
        if count == 1:
            return [block.block_id for block in blocks]
        return [block.block_id * count + part for block in blocks for part in range(count)]

    def blocks_at(self, slots: Iterable[int]) -> list[KVCacheBlock]:
        """The blocks that these slots belong to, each once."""
        return [self.pool.blocks[i] for i in dict.fromkeys(s // self.num_parts for s in slots)]

    def num_blocks_at(self, slots: Sequence[int]) -> int:
        """How many those are. No slot may be there twice."""
        return len(slots) if self.num_parts == 1 else len(self.blocks_at(slots))

    # Looking

    def keys(
        self, block_hashes: list[BlockHash], group: int, start: int = 0, stop: int | None = None
    ) -> list[BlockHashWithGroupId]:
        """The keys of a request's blocks ``start`` to ``stop`` of ``group``, as far as their
        hashes are known."""
        hashes, end = self._hashes(block_hashes, group), self.key_ends[group]
        return make_keys(hashes[start:stop], end)

    def num_keys(self, block_hashes: list[BlockHash], group: int) -> int:
        """How many of a request's blocks of ``group`` have a key."""
        return len(block_hashes) * self.hash_block_size // self.block_sizes[group]

    def key_at(
        self, block_hashes: list[BlockHash], group: int, num_tokens: int
    ) -> BlockHashWithGroupId:
        """The key of what ends with the prefix of ``num_tokens`` tokens, a multiple of the hash
        block size: inside a block, perhaps."""
        block_hash = block_hashes[num_tokens // self.hash_block_size - 1]
        return BlockHashWithGroupId(block_hash + self.key_ends[group])

    def part_keys(
        self, block_hashes: list[BlockHash], group: int, start: int, stop: int
    ) -> list[BlockHashWithGroupId]:
        """The keys by which the device knows the parts of a request's host blocks ``start`` to
        ``stop``, whose hashes must be known."""
        hashes = self.part_hashes(block_hashes, group, start, stop)
        return make_keys(hashes, self.key_ends[group])

    def part_hashes(
        self, block_hashes: list[BlockHash], group: int, start: int, stop: int
    ) -> list[BlockHash]:
        """What becomes ``part_keys`` with ``key_ends[group]`` added to each."""
        num_parts = self.num_parts
        stride = self.block_sizes[group] // num_parts // self.hash_block_size  # hashes a part
        first, last = start * num_parts * stride, stop * num_parts * stride
        return block_hashes[first + stride - 1 : last : stride]

    def is_chained(self, key: BlockHashWithGroupId) -> bool:
        """Whether a hit needs what precedes the block of ``key``."""
        return key[-_LENGTH_OF_KEY_END:] in self._chained_key_ends

    def start_of(self, num_computed_tokens: int) -> int:
        """Where a lookup beyond ``num_computed_tokens`` begins: there, or as many tokens earlier
        as the device has of the next host block of some group."""
        if self.num_parts == 1:
            return num_computed_tokens
        return num_computed_tokens - num_computed_tokens % self.coordinator.scheduler_block_size

    def get(self, key: BlockHashWithGroupId) -> KVCacheBlock | None:
        """The block that holds ``key``, if any. Changes nothing."""
        return self._chains.get(key)

    def has(self, key: BlockHashWithGroupId) -> bool:
        """Whether a block holds ``key``."""
        return self._chains.has(key)

    def count_first(
        self,
        block_hashes: list[BlockHash],
        group: int,
        limit: int,
        is_coming: Callable[[bytes], bool] | None = None,
    ) -> int:
        """How many of the first ``limit`` blocks of a request of a chained group are there, or
        coming."""
        hashes = self._hashes(block_hashes, group)
        return self._chains.count(hashes, self.key_ends[group], limit, is_coming)

    def has_none(self, keys: Sequence[BlockHashWithGroupId]) -> bool:
        """Whether no block holds one of ``keys``, at least one, of blocks that follow each other
        in a chain."""
        cached = self.pool.cached_block_hash_to_block._cache
        if not self.order.early and self.is_chained(keys[0]):
            return keys[0] not in cached  # nor is there what follows it, then
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
        blocks: tuple[list[KVCacheBlock], ...]
        if self._is_one_chain:
            size = self.block_sizes[0]
            limit = min(max_tokens // size, len(remaining))
            chain = self._chains.longest(remaining, self.key_ends[0], limit)
            blocks, num_tokens = (chain,), len(chain) * size
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
            ancestors += self._first_blocks(block_hashes, group, count)
        return ancestors

    # Holding

    def pin(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Add a reference to each block: it cannot be evicted. Null blocks must not be among
        them (vLLM 0.32 counts references to those)."""
        self.order.pin(blocks)

    def protect(self, blocks: Sequence[KVCacheBlock]) -> None:
        """A request has found these blocks: what none has found will be evicted before them.
        They must be pinned, with what precedes them in their chains, as they are in a hit."""
        if self._is_one_chain:
            self.order.segments.protect_chain(blocks)
        else:
            self.order.segments.protect(blocks)

    def unpin(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Drop a reference to each block, parents before children. What nobody refers to any
        more joins the free queue, in its place in the order of eviction."""
        self.order.unpin(blocks)

    def refresh(
        self, block_hashes: list[BlockHash], group: int, count: int, num_found: int = 0
    ) -> None:
        """Make the first ``count`` blocks of a request of a chained group, as far as they are
        there and not demoted, the most recently used; and protect the first ``num_found``, which
        it has not stored itself."""
        if count == 0:
            return
        size = self.block_sizes[group]
        head = self.get(self.key_at(block_hashes, group, size))
        last = self.get(self.key_at(block_hashes, group, count * size))
        if last is None:
            # The last ones may not have arrived yet.
            count = self.count_first(block_hashes, group, count)
            self.refresh(block_hashes, group, count, min(num_found, count))
            return
        if not self.order.renew_pieces(head, last, count):
            self.order.renew_chain(self._first_blocks(block_hashes, group, count))
        if num_found:
            self._protect_first(block_hashes, group, num_found)

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
        if self.order.demoted and (block := self.get(key)) and block.block_id in self.order.demoted:
            self.order.renew(block)

    # Filling

    def allocate(
        self, count: int, keep: Callable[[], Container[BlockHashWithGroupId]] = frozenset
    ) -> list[KVCacheBlock]:
        """Up to ``count`` pinned blocks to be filled, fewer where there is no room.

        Evicts blocks in their order, but stops at one that holds a key in ``keep()``,
        which is asked for then only: the tier is full of the very chain that wants to grow.
        """
        blocks = block_lists.take_empty(self.pool, count)
        if len(blocks) == count:
            return blocks
        queue = self.pool.free_block_queue
        limit = min(count - len(blocks), queue.num_free_blocks)
        block: Any = queue.fake_free_list_head.next_free_block
        kept = keep()
        num_taken = num_evicted = 0
        while num_taken < limit and block._block_hash not in kept:
            num_evicted += block._block_hash is not None
            num_taken += 1
            block = block.next_free_block
        if num_taken:
            self.version += 1
            self._lose(num_evicted, "lru")
            blocks += self.order.evict(num_taken)
        return blocks

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
        before = self.get(parent) if parent is not None else None
        if parent is not None and before is None and self.is_chained(keys[0]):
            return False  # an orphan
        if run.inner_keys or not self.has_none(keys):
            return False
        if before is not None:
            parent = before.block_hash  # equal, but to follow it takes no comparison
        block_lists.give_keys(self.pool, blocks, keys)
        self.order.follow(blocks, parent)
        self.order.queue(blocks, before)
        return True

    def _commit_singly(self, run: Run, blocks: Sequence[KVCacheBlock]) -> list[int]:
        """``_commit_run``, block by block; the places of those that were not committed."""
        useless = []
        for place, (key, block) in enumerate(zip(run.keys, blocks, strict=True)):
            parent = run.keys[place - 1] if place else run.parent
            orphaned = parent is not None and self.get(parent) is None and self.is_chained(key)
            if (orphaned and not (run.early and place == 0)) or self.get(key) is not None:
                useless.append(place)
                continue
            block.set_block_hash(key)
            self.pool.cached_block_hash_to_block.insert(key, block)
            for inner_key in run.inner_keys[place] if run.inner_keys else ():
                self.pool._insert_block_hash(inner_key, block, num_tokens=None)
            self.order.follow((block,), parent)
            if parent is not None and orphaned:
                self.order.wait_for(parent, block)
        self.unpin(blocks)
        return useless

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
                self.order.forget(block_id)
                self.order.queue_first(self.pool.blocks[block_id])
            lost = self.order.followers_of(lost_keys)
            lost_keys = {self.pool.blocks[block_id].block_hash for block_id in lost}

    def reset(self) -> None:
        """Forget everything, at once; references stay."""
        self.version += 1
        self.pool.evict_blocks({b.block_id for b in self.pool.blocks if b.block_hash is not None})
        self.order.forget_all()
        self._lose(self.num_used, "reset")

    def check_integrity(self) -> None:
        """Raise AssertionError when the free queue, the hash map and the parents disagree.
        Costs time in proportion to the tier: for tests."""
        check_integrity(self)

    # Details

    def _hashes(self, block_hashes: list[BlockHash], group: int) -> Hashes:
        hashes: Hashes = resolve_block_hashes(
            block_hashes, self.hash_block_size, self.block_sizes[group]
        )
        return hashes

    def _first_blocks(
        self, block_hashes: list[BlockHash], group: int, count: int
    ) -> list[KVCacheBlock]:
        """The first ``count`` blocks of a request of a chained group, as far as they are
        there."""
        hashes = self._hashes(block_hashes, group)
        return self._chains.first(hashes, self.key_ends[group], count)

    def _protect_first(self, block_hashes: list[BlockHash], group: int, count: int) -> None:
        """Protect the first ``count`` blocks of a request of a chained group; no block is looked
        at that is protected."""

        def is_new(index: int) -> bool:
            num_tokens = (index + 1) * self.block_sizes[group]
            block = self.get(self.key_at(block_hashes, group, num_tokens))
            return block is None or not self.order.is_protected(block)

        if is_new(count - 1):
            first = bisect_left(range(count), True, key=is_new)
            self.order.protect(self._chains.present(self.keys(block_hashes, group, first, count)))

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
            found[group] = self._chains.present(self.keys(block_hashes, group, first, stop))
            if len(found[group]) < stop - first:
                return num_tokens
        for group, more in found.items():
            blocks[group][num_tokens // self.block_sizes[group] :] = more
        return limit

    def _lose(self, count: int, reason: str) -> None:
        """So many blocks lose what they hold."""
        self.num_used -= count
        self.meter.add(metrics.EVICTED, count, reason)
