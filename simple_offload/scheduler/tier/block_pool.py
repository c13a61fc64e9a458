"""What vLLM's BlockPool does block by block, for whole lists of blocks.

A prompt of 128K tokens has 8,192 blocks, and each of them passes through here some five times.
The pool's own methods ask at every block what holds for the whole list. What these functions
leave behind is what the pool's methods would have: tests compare the two, link by link.
"""

from collections.abc import Container, Iterable, Sequence
from itertools import islice, takewhile
from operator import truth
from typing import Any

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, KVCacheBlock


def hold(pool: BlockPool, blocks: Sequence[KVCacheBlock]) -> None:
    """Add a reference to each block, as ``touch`` does. Null blocks must not be among them."""
    if pool.metrics_collector is not None:
        pool.touch(blocks)
        return
    # A chain lies in the queue tail first and mostly in one piece, which is cut out as a whole.
    num_taken = 0
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
            num_taken += 1
        block.ref_cnt += 1
    if before is not None:
        before.next_free_block, after.prev_free_block = after, before
    pool.free_block_queue.num_free_blocks -= num_taken


def release(pool: BlockPool, blocks: Iterable[KVCacheBlock]) -> None:
    """Drop a reference to each block, as ``free_blocks`` does: what nobody refers to any more
    joins the free queue, in this order. Null blocks must not be among them."""
    queue = pool.free_block_queue
    tail = queue.fake_free_list_tail
    first: list[KVCacheBlock] = []
    others: list[KVCacheBlock] = []
    num_last = 0
    last: Any = tail.prev_free_block
    for block in blocks:
        if block.ref_cnt > 1:
            block.ref_cnt -= 1
        elif block.pool is not pool and block.pool is not None:
            others.append(block)
        else:
            block.ref_cnt = 0
            if block._block_hash is None:
                first.append(block)
            else:
                last.next_free_block, block.prev_free_block = block, last
                last = block
                num_last += 1
    last.next_free_block, tail.prev_free_block = tail, last
    queue.num_free_blocks += num_last
    queue.prepend_n(first)
    if others:
        pool.free_blocks(others)


def take_empty(pool: BlockPool, limit: int) -> list[KVCacheBlock]:
    """Up to ``limit`` blocks from the front of the free queue, as ``get_new_blocks`` returns
    them, as far as they hold nothing."""
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


def take(
    pool: BlockPool, limit: int, keep: Container[BlockHashWithGroupId] = ()
) -> tuple[list[KVCacheBlock], list[BlockHashWithGroupId]]:
    """Up to ``limit`` blocks from the front of the free queue, as ``get_new_blocks`` returns
    them, as far as they hold nothing that is in ``keep``; and what they held, which is
    forgotten."""
    queue = pool.free_block_queue
    limit = min(limit, queue.num_free_blocks)
    evicted: list[BlockHashWithGroupId] = []
    if pool.cached_block_hashes_by_block or pool.metrics_collector is not None:
        front = islice(queue.iter_blocks_after(None), limit)
        held = [
            block._block_hash for block in takewhile(lambda b: b._block_hash not in keep, front)
        ]
        evicted += [key for key in held if key is not None]
        return pool.get_new_blocks(len(held)), evicted
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


def give_keys(
    pool: BlockPool,
    chain: Sequence[KVCacheBlock],
    keys: Sequence[BlockHashWithGroupId],
    parents: list[BlockHashWithGroupId | None],
    parent: BlockHashWithGroupId | None,
) -> None:
    """Make the blocks of a chain, which hold nothing, findable by ``keys``, which no block holds,
    as ``_insert_block_hash`` does; of how many tokens a prefix has, they say nothing. And note in
    ``parents``, by block id, the key of the block before, which is ``parent`` for the first."""
    before = parent
    for block, key in zip(chain, keys, strict=True):
        block._block_hash = key
        parents[block.block_id] = before
        before = key
    pool.cached_block_hash_to_block._cache.update(zip(keys, chain, strict=True))


def queue_chain(
    pool: BlockPool, chain: Sequence[KVCacheBlock], successor: KVCacheBlock | None = None
) -> None:
    """Drop the last reference to each block of a chain, parents before children, and queue it
    the other way around, just before ``successor``, which is free, or at the end."""
    queue = pool.free_block_queue
    after = successor or queue.fake_free_list_tail
    before: Any = after.prev_free_block
    for block in chain:
        block.ref_cnt = 0
        block.next_free_block, after.prev_free_block = after, block
        after = block
    after.prev_free_block, before.next_free_block = before, after
    queue.num_free_blocks += len(chain)


def move(
    pool: BlockPool,
    first: KVCacheBlock,
    last: KVCacheBlock,
    successor: KVCacheBlock | None = None,
) -> None:
    """Let a stretch of the free queue, ``first`` to ``last``, stand just before ``successor``,
    which is none of them, or at the end: what ``touch`` and ``free_blocks`` do in turn."""
    tail = successor or pool.free_block_queue.fake_free_list_tail
    before: Any = first.prev_free_block
    after: Any = last.next_free_block
    before.next_free_block, after.prev_free_block = after, before
    end: Any = tail.prev_free_block
    end.next_free_block, first.prev_free_block = first, end
    last.next_free_block, tail.prev_free_block = tail, last


def find(pool: BlockPool, keys: Iterable[BlockHashWithGroupId]) -> list[KVCacheBlock | None]:
    """For each key the block that holds it, as ``get_one_block`` finds it."""
    found: list[Any] = list(map(pool.cached_block_hash_to_block._cache.get, keys))
    if dict in set(map(type, found)):  # of blocks that hold the same
        found = [
            next(iter(block.values())) if isinstance(block, dict) else block for block in found
        ]
    return found


def find_chain(pool: BlockPool, keys: Iterable[BlockHashWithGroupId]) -> list[KVCacheBlock]:
    """The blocks that hold ``keys``, up to the first that is missing."""
    found: list[Any] = find(pool, keys)
    return list(takewhile(truth, found))
