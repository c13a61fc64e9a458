"""Whole lists of blocks in vLLM's ``BlockPool``: the one file that uses its private members.

A prompt of 128K tokens has 8,192 blocks, and each of them passes through here some five times.
The pool's own methods check every block for conditions that hold for a whole list. Each function
names the method that it stands for, and leaves the pool as that method would: tests compare the
two, link by link. Null blocks must not be among the blocks of any call.
"""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from itertools import islice, takewhile
from operator import attrgetter, truth
from typing import Any, cast

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager

Key = BlockHashWithGroupId

# References


def touch(pool: BlockPool, blocks: Sequence[KVCacheBlock]) -> None:
    """Add a reference to each block, as ``touch`` does."""
    if pool.metrics_collector is not None:
        pool.touch(blocks)
        return
    # A chain lies in the queue tail first and mostly in one piece, which is cut out as a whole.
    num_removed = 0
    before: Any = None
    after: Any = None
    for block in blocks:
        if block.ref_cnt == 0:
            if block is not before:
                if before is not None:
                    before.next_free_block, after.prev_free_block = after, before
                after = block.next_free_block
            before = block.prev_free_block
            block.prev_free_block = block.next_free_block = None
            num_removed += 1
        block.ref_cnt += 1
    if before is not None:
        before.next_free_block, after.prev_free_block = after, before
    pool.free_block_queue.num_free_blocks -= num_removed


def free_blocks(pool: BlockPool, blocks: Iterable[KVCacheBlock]) -> None:
    """Drop a reference to each block, as ``free_blocks`` does. Blocks without references join the
    free queue, in this order."""
    queue = pool.free_block_queue
    tail = queue.fake_free_list_tail
    empty: list[KVCacheBlock] = []
    of_other_pools: list[KVCacheBlock] = []
    num_appended = 0
    last: Any = tail.prev_free_block
    for block in blocks:
        if block.ref_cnt > 1:
            block.ref_cnt -= 1
        elif block.pool is not pool and block.pool is not None:
            of_other_pools.append(block)
        else:
            block.ref_cnt = 0
            if block._block_hash is None:
                empty.append(block)
            else:
                last.next_free_block, block.prev_free_block = block, last
                last = block
                num_appended += 1
    last.next_free_block, tail.prev_free_block = tail, last
    queue.num_free_blocks += num_appended
    queue.prepend_n(empty)
    if of_other_pools:
        pool.free_blocks(of_other_pools)


def free_blocks_first(pool: BlockPool, blocks: Sequence[KVCacheBlock]) -> None:
    """Drop the last reference to each block, and put all to the front of the free queue, in this
    order."""
    for block in blocks:
        block.ref_cnt = 0
    pool.free_block_queue.prepend_n(list(blocks))


def free_chain(
    pool: BlockPool, chain: Sequence[KVCacheBlock], successor: KVCacheBlock | None = None
) -> None:
    """Drop the last reference to each block of a chain, parents before children. They are queued
    children first, just before ``successor``, which is free, or at the end."""
    queue = pool.free_block_queue
    after = successor or queue.fake_free_list_tail
    before: Any = after.prev_free_block
    for block in chain:
        block.ref_cnt = 0
        block.next_free_block, after.prev_free_block = after, block
        after = block
    after.prev_free_block, before.next_free_block = before, after
    queue.num_free_blocks += len(chain)


def unpinned_chains(
    pool: BlockPool, blocks: Iterable[KVCacheBlock], parents: Sequence[Key | None]
) -> Iterator[list[KVCacheBlock]]:
    """Drop a reference to each block, parents before children, except the last reference to blocks
    with contents. Those are returned as chains. ``parents``: by block id, the parent's key."""
    chain: list[KVCacheBlock] = []
    last_key = None  # of the chain's last block
    for block in blocks:
        key = block._block_hash if block.ref_cnt == 1 else None
        if key is None:
            pool.free_blocks((block,))
            continue
        if last_key is None or parents[block.block_id] != last_key:
            if chain:
                yield chain
            chain = []
        chain.append(block)
        last_key = key
    if chain:
        yield chain


def free_first_blocks(manager: SingleTypeKVCacheManager, request_id: str, count: int) -> None:
    """Free the first ``count`` blocks of a request's table in one group. Null blocks stand for
    them from now on."""
    manager._remove_blocks_in_range(request_id, 0, count)


# New blocks


def add_blocks(pool: BlockPool, num_blocks: int) -> None:
    """Give the pool ``num_blocks`` more blocks, which are the next to be allocated, lowest id
    first."""
    first = len(pool.blocks)
    new = [KVCacheBlock(block_id) for block_id in range(first, first + num_blocks)]
    pool.blocks.extend(new)
    pool.num_gpu_blocks = len(pool.blocks)
    pool.free_block_queue.prepend_n(new)


def get_empty_blocks(pool: BlockPool, limit: int) -> list[KVCacheBlock]:
    """Up to ``limit`` blocks from the front of the free queue, as ``get_new_blocks`` returns them,
    up to the first one with contents."""
    queue = pool.free_block_queue
    blocks: list[KVCacheBlock] = []
    head = queue.fake_free_list_head
    block: Any = head.next_free_block
    for _ in range(min(limit, queue.num_free_blocks)):
        if block._block_hash is not None:
            break
        blocks.append(block)
        following = block.next_free_block
        block.ref_cnt = 1
        block.prev_free_block = block.next_free_block = None
        block = following
    head.next_free_block, block.prev_free_block = block, head
    queue.num_free_blocks -= len(blocks)
    return blocks


def get_new_blocks(
    pool: BlockPool, limit: int, keep: Container[Key]
) -> tuple[list[KVCacheBlock], list[Key]]:
    """Up to ``limit`` blocks from the front of the free queue, as ``get_new_blocks`` returns them,
    up to the first one with a key in ``keep``; and the keys that they had."""
    queue = pool.free_block_queue
    limit = min(limit, queue.num_free_blocks)
    evicted: list[Key] = []
    if pool.cached_block_hashes_by_block or pool.metrics_collector is not None:
        front = islice(queue.iter_blocks_after(None), limit)
        old = [block._block_hash for block in takewhile(lambda b: b._block_hash not in keep, front)]
        evicted += [key for key in old if key is not None]
        return pool.get_new_blocks(len(old)), evicted
    cached = pool.cached_block_hash_to_block._cache
    blocks: list[KVCacheBlock] = []
    head = queue.fake_free_list_head
    block: Any = head.next_free_block
    for _ in range(limit):
        if (key := block._block_hash) is not None:
            if key in keep:
                break
            del cached[key]
            evicted.append(key)
            block._block_hash = block._block_hash_num_tokens = None
        blocks.append(block)
        following = block.next_free_block
        block.ref_cnt = 1
        block.prev_free_block = block.next_free_block = None
        block = following
    head.next_free_block, block.prev_free_block = block, head
    queue.num_free_blocks -= len(blocks)
    if evicted:
        pool._emit_block_removed_events(evicted)
    return blocks, evicted


def on_removed(pool: BlockPool, callback: Callable[[Sequence[Key]], None]) -> None:
    """Call ``callback`` with the keys of all blocks that lose them, in whatever way."""
    setattr(pool, "_emit_block_removed_events", callback)  # noqa: B010


# The order of the free queue


def first_free(pool: BlockPool) -> KVCacheBlock:
    """The first block of the free queue; ``queue_end`` if none is free."""
    return cast(KVCacheBlock, pool.free_block_queue.fake_free_list_head.next_free_block)


def queue_end(pool: BlockPool) -> KVCacheBlock:
    """The mark behind the last block of the free queue."""
    return pool.free_block_queue.fake_free_list_tail


def next_free(block: KVCacheBlock) -> KVCacheBlock:
    """The next block of the free queue, or its end."""
    return cast(KVCacheBlock, block.next_free_block)


def free_blocks_from(
    block: KVCacheBlock, count: int, end: KVCacheBlock
) -> tuple[list[KVCacheBlock], KVCacheBlock]:
    """Up to ``count`` blocks of the free queue from ``block`` on, before its ``end``; and the next
    block, or ``end``."""
    blocks: list[KVCacheBlock] = []
    current: Any = block
    while len(blocks) < count and current is not end:
        blocks.append(current)
        current = current.next_free_block
    return blocks, current


def free_blocks_after(
    pool: BlockPool, block: KVCacheBlock | None
) -> Iterator[tuple[KVCacheBlock, Key | None]]:
    """The blocks of the free queue behind ``block``, or from its front on, and their keys."""
    queue = pool.free_block_queue
    current: Any = queue.fake_free_list_head if block is None else block
    end = queue.fake_free_list_tail
    while (current := current.next_free_block) is not end:
        yield current, current._block_hash


def move(
    pool: BlockPool,
    first: KVCacheBlock,
    last: KVCacheBlock,
    successor: KVCacheBlock | None = None,
) -> None:
    """Move a piece of the free queue, ``first`` to ``last``, as ``touch`` and then ``free_blocks``
    do: to just before ``successor``, which is not in it, or to the end."""
    tail = successor or pool.free_block_queue.fake_free_list_tail
    before: Any = first.prev_free_block
    after: Any = last.next_free_block
    before.next_free_block, after.prev_free_block = after, before
    end: Any = tail.prev_free_block
    end.next_free_block, first.prev_free_block = first, end
    last.next_free_block, tail.prev_free_block = tail, last


class Bookmark:
    """Marks a place in a free queue while blocks leave it."""

    def __init__(self) -> None:
        self._node = KVCacheBlock(-1)

    def insert_before(self, block: KVCacheBlock) -> None:
        """Mark the place before ``block``, which is free or the queue's end."""
        node = self._node
        before: Any = block.prev_free_block
        before.next_free_block = block.prev_free_block = node
        node.prev_free_block, node.next_free_block = before, block

    def remove(self) -> KVCacheBlock:
        """Remove the mark. Returns the block behind its place, or the queue's end."""
        before: Any = self._node.prev_free_block
        after: Any = self._node.next_free_block
        before.next_free_block, after.prev_free_block = after, before
        return cast(KVCacheBlock, after)


# Keys


def keys_of(blocks: Iterable[KVCacheBlock]) -> Iterator[Key | None]:
    """The key of each block, None for blocks without contents."""
    return map(_GET_KEY, blocks)


def cached(pool: BlockPool) -> Mapping[bytes, Any]:
    """By key, the block that holds it; a dict of blocks by id where several do. Changes with the
    pool, until the pool is reset as a whole."""
    return cast(Mapping[bytes, Any], pool.cached_block_hash_to_block._cache)


def get_block(pool: BlockPool, key: bytes) -> KVCacheBlock | None:
    """The block that holds ``key``, as ``get_one_block`` finds it."""
    blocks: Any = pool.cached_block_hash_to_block._cache
    found: KVCacheBlock | dict[int, KVCacheBlock] | None = blocks.get(key)
    return next(iter(found.values())) if isinstance(found, dict) else found


def find_blocks(pool: BlockPool, keys: Iterable[bytes]) -> list[KVCacheBlock | None]:
    """``get_block`` for each key."""
    found: list[Any] = list(map(cached(pool).get, keys))
    if dict in set(map(type, found)):
        return [next(iter(each.values())) if isinstance(each, dict) else each for each in found]
    return found


def find_chain(pool: BlockPool, keys: Iterable[bytes]) -> list[KVCacheBlock]:
    """The blocks that hold ``keys``, up to the first key that none holds."""
    found: list[Any] = find_blocks(pool, keys)
    return list(takewhile(truth, found))


def cache_chain(
    pool: BlockPool,
    chain: Sequence[KVCacheBlock],
    keys: Sequence[Key],
    parents: list[Key | None],
    parent: Key | None,
) -> None:
    """Make the blocks of a chain, which are empty, findable by ``keys``, which no block holds, as
    ``_insert_block_hash`` does without a number of tokens. Enters in ``parents``, by block id, the
    key of the block before each; ``parent`` for the first."""
    before = parent
    for block, key in zip(chain, keys, strict=True):
        block._block_hash = key
        parents[block.block_id] = before
        before = key
    pool.cached_block_hash_to_block._cache.update(zip(keys, chain, strict=True))


def add_key(pool: BlockPool, block: KVCacheBlock, key: Key) -> None:
    """Make a block with contents findable by one more key."""
    pool._insert_block_hash(key, block, num_tokens=None)


# Chains that lie in the free queue, where a parent mostly stands right behind its child


def chain_up_to(
    pool: BlockPool, parents: Sequence[Key | None], key: bytes, count: int
) -> list[KVCacheBlock] | None:
    """The ``count`` blocks of a chain up to the one that holds ``key``, in order; None where
    ``parents`` (by block id, the parent's key) do not lead to the first one."""
    blocks: Any = cached(pool)
    block: Any = blocks.get(key)
    chain: list[KVCacheBlock] = []
    for _ in range(count):
        if type(block) is not KVCacheBlock:  # none, or several
            return None
        chain.append(block)
        parent = parents[block.block_id]
        behind = block.next_free_block
        # As a rule the very same key object: identity is faster than equality.
        if behind is None or behind._block_hash is not parent or parent is None:
            behind = blocks.get(parent)
        block = behind
    chain.reverse()
    return chain


def last_ancestor_behind(
    block: KVCacheBlock, parents: Sequence[Key | None], stop: KVCacheBlock
) -> tuple[KVCacheBlock, Key | None]:
    """From a free block on towards the head of its chain: the last block that stands in one piece
    of the free queue with it, before ``stop``; and the key of its parent, if it has one."""
    current: Any = block
    while (parent := parents[current.block_id]) is not None:
        following = current.next_free_block
        if following._block_hash is not parent or following is stop:
            break
        current = following
    return cast(KVCacheBlock, current), parent


def is_one_piece(first: KVCacheBlock, last: KVCacheBlock, count: int) -> bool:
    """Whether ``last`` is the ``count``-th block of the free queue from ``first`` on."""
    block: KVCacheBlock | None = first
    for _ in range(count - 1):
        if block is None:
            return False
        block = block.next_free_block
    return block is last


_GET_KEY: Callable[[KVCacheBlock], Key | None] = attrgetter("_block_hash")
