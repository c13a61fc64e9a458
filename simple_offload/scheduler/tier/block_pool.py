"""Whole lists of blocks in vLLM's ``BlockPool``: the one file that uses its private members.

A prompt of 128K tokens has 8,192 blocks, and each of them passes through here some five times.
The pool's own methods check every block for conditions that hold for a whole list. Each function
names the method that it stands for, and leaves the pool as that method would: tests compare the
two, link by link. Null blocks must not be among the blocks of any call.
"""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence, Set
from itertools import chain, islice, takewhile
from operator import attrgetter, truth
from typing import Any, cast

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import (
    BlockHashWithGroupId,
    FreeKVCacheBlockQueue,
    KVCacheBlock,
)
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager

Key = BlockHashWithGroupId

# References


def touch(pool: BlockPool, blocks: Sequence[KVCacheBlock]) -> None:
    """Add a reference to each block, as ``touch`` does."""
    if pool.metrics_collector is not None:
        pool.touch(blocks)
        return
    free: list[KVCacheBlock] = []
    for block in blocks:
        if block.ref_cnt == 0:
            free.append(block)
        block.ref_cnt += 1
    unlink(free)
    pool.free_block_queue.num_free_blocks -= len(free)


def unlink(blocks: Iterable[KVCacheBlock]) -> None:
    """Take free blocks out of their queues, whose counts stay as they are. A chain lies in a queue
    tail first and mostly in one piece, which is cut out as a whole."""
    before: Any = None
    after: Any = None
    for block in blocks:
        if block is not before:
            if before is not None:
                before.next_free_block, after.prev_free_block = after, before
            after = block.next_free_block
        before = block.prev_free_block
        block.prev_free_block = block.next_free_block = None
    if before is not None:
        before.next_free_block, after.prev_free_block = after, before


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


def return_blocks(
    pool: BlockPool, blocks: Sequence[KVCacheBlock], preceding: KVCacheBlock | None
) -> None:
    """Drop the last reference to each block, and put all into the free queue behind
    ``preceding``, in this order; None: to the front."""
    queue = pool.free_block_queue
    before: Any = preceding or queue.fake_free_list_head
    after = before.next_free_block
    for block in blocks:
        block.ref_cnt = 0
        before.next_free_block, block.prev_free_block = block, before
        before = block
    before.next_free_block, after.prev_free_block = after, before
    queue.num_free_blocks += len(blocks)


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


def get_new_blocks(
    pool: BlockPool, queue: FreeKVCacheBlockQueue, limit: int, keep: Container[int]
) -> tuple[list[KVCacheBlock], list[Key]]:
    """Up to ``limit`` blocks from the front of a queue of free blocks, as ``get_new_blocks``
    returns them, up to the first one whose id is in ``keep``; and the keys that they had."""
    cached = pool.cached_block_hash_to_block._cache
    has_more_keys = bool(pool.cached_block_hashes_by_block)
    blocks: list[KVCacheBlock] = []
    evicted: list[Key] = []
    head = queue.fake_free_list_head
    block: Any = head.next_free_block
    for _ in range(min(limit, queue.num_free_blocks)):
        if (key := block._block_hash) is not None:
            if block.block_id in keep:
                break
            evicted.append(key)
            if has_more_keys:
                pool.evict_blocks({block.block_id})
            else:
                del cached[key]
                block._block_hash = block._block_hash_num_tokens = None
        blocks.append(block)
        following = block.next_free_block
        block.ref_cnt = 1
        block.prev_free_block = block.next_free_block = None
        block = following
    head.next_free_block, block.prev_free_block = block, head
    queue.num_free_blocks -= len(blocks)
    if evicted and not has_more_keys:
        pool._emit_block_removed_events(evicted)
    return blocks, evicted


def evict_all_blocks(pool: BlockPool, queues: Iterable[FreeKVCacheBlockQueue]) -> None:
    """Evict all contents, as ``evict_blocks`` does. The free blocks of all ``queues`` are then in
    the pool's free queue, lowest id first, so that blocks stored together lie together."""
    free = pool.free_block_queue
    for queue in queues:
        if queue is not free:
            append_all(free, queue)
    cached = pool.cached_block_hash_to_block._cache
    keys = list(cached)
    cached.clear()  # in place: ``cached`` has given it away
    pool.cached_block_hashes_by_block.clear()
    before: Any = free.fake_free_list_head
    end = free.fake_free_list_tail
    for block in islice(pool.blocks, 1, None):  # the first is the null block
        block._block_hash = block._block_hash_num_tokens = None
        if block.ref_cnt == 0:
            before.next_free_block, block.prev_free_block = block, before
            before = block
    before.next_free_block, end.prev_free_block = end, before
    if keys:
        pool._emit_block_removed_events(keys)


def on_new_blocks(pool: BlockPool, callback: Callable[[list[KVCacheBlock]], None]) -> None:
    """Call ``callback`` with all blocks that the pool gives away, whatever asks for them: its
    ``get_new_blocks`` is the only way to a free block that nothing has found."""
    get_new_blocks = pool.get_new_blocks

    def watched(num_blocks: int) -> list[KVCacheBlock]:
        blocks = get_new_blocks(num_blocks)
        callback(blocks)
        return blocks

    setattr(pool, "get_new_blocks", watched)  # noqa: B010


def on_reset(
    pool: BlockPool, before: Callable[[], None], after: Callable[[list[bytes]], None]
) -> None:
    """Call ``before`` when the pool's contents are to be reset, which fails while a block has a
    reference, and ``after`` with their keys when they are."""
    reset_prefix_cache = pool.reset_prefix_cache

    def watched() -> bool:
        keys = list(cached(pool))
        before()
        is_reset = reset_prefix_cache()
        if is_reset:
            after(keys)
        return is_reset

    setattr(pool, "reset_prefix_cache", watched)  # noqa: B010


def on_removed(pool: BlockPool, callback: Callable[[Sequence[Key]], None]) -> None:
    """Call ``callback`` with the keys of all blocks that lose them, in whatever way."""
    setattr(pool, "_emit_block_removed_events", callback)  # noqa: B010


# The free queue


def append_all(target: FreeKVCacheBlockQueue, source: FreeKVCacheBlockQueue) -> None:
    """Move all blocks of a queue behind those of another, in one piece, as ``popleft_n`` and
    ``append_n`` do."""
    if source.num_free_blocks == 0:
        return
    head, end = source.fake_free_list_head, source.fake_free_list_tail
    tail = target.fake_free_list_tail
    first: Any = head.next_free_block
    last: Any = end.prev_free_block
    before: Any = tail.prev_free_block
    before.next_free_block, first.prev_free_block = first, before
    last.next_free_block, tail.prev_free_block = tail, last
    head.next_free_block, end.prev_free_block = end, head
    target.num_free_blocks += source.num_free_blocks
    source.num_free_blocks = 0


def free_blocks_after(
    pool: BlockPool, block: KVCacheBlock | None, limit: int | None = None
) -> Iterator[KVCacheBlock]:
    """Up to ``limit`` blocks of the free queue behind ``block``, or from its front on."""
    return islice(pool.free_block_queue.iter_blocks_after(block), limit)


# Keys


def keys_of(blocks: Iterable[KVCacheBlock]) -> Iterator[Key | None]:
    """The key of each block, None for blocks without contents."""
    return map(_GET_KEY, blocks)


def cached(pool: BlockPool) -> Mapping[bytes, Any]:
    """By key, the block that holds it; a dict of blocks by id where several do. Changes with the
    pool, until the pool is reset as a whole."""
    return cast("Mapping[bytes, Any]", pool.cached_block_hash_to_block._cache)


def find_blocks(pool: BlockPool, keys: Iterable[bytes]) -> list[KVCacheBlock | None]:
    """For each key the block that holds it, as ``get_one_block`` finds it."""
    found: list[Any] = list(map(cached(pool).get, keys))
    if dict in set(map(type, found)):
        return [next(iter(each.values())) if isinstance(each, dict) else each for each in found]
    return found


def ids_with_keys_of(
    blocks: Sequence[KVCacheBlock], pool: BlockPool, block_ids: Set[int]
) -> set[int]:
    """Ids of the ``blocks``, of another pool, whose key a block of ``pool`` with one of
    ``block_ids`` has too."""
    holders: Iterable[Any] = map(cached(pool).get, cast("Iterator[bytes]", keys_of(blocks)))
    return {
        block.block_id
        for block, held in zip(blocks, holders, strict=True)
        if held is not None
        and not block_ids.isdisjoint(held if isinstance(held, dict) else (held.block_id,))
    }


def repeated(pool: BlockPool, keys: Iterable[Key]) -> set[Key]:
    """The ``keys`` that several blocks hold."""
    found = cached(pool)
    return {key for key in keys if isinstance(found.get(key), dict)}


def blocks_with(pool: BlockPool, keys: Iterable[bytes]) -> list[KVCacheBlock]:
    """All blocks that hold one of ``keys``."""
    found = [each for each in map(cached(pool).get, keys) if each is not None]
    if dict not in set(map(type, found)):
        return found
    parts = [each.values() if isinstance(each, dict) else (each,) for each in found]
    return list(chain.from_iterable(parts))


def find_chain(pool: BlockPool, keys: Iterable[bytes]) -> list[KVCacheBlock]:
    """The blocks that hold ``keys``, up to the first key that none holds."""
    found: list[Any] = find_blocks(pool, keys)
    return found if all(found) else list(takewhile(truth, found))


def cache_blocks(pool: BlockPool, blocks: list[KVCacheBlock], keys: Sequence[Key]) -> list[int]:
    """Make empty blocks findable by ``keys``, as ``_insert_block_hash`` does without a number of
    tokens. Returns the places of blocks whose key another block holds: they stay empty."""
    found = list(map(pool.cached_block_hash_to_block._cache.setdefault, keys, blocks))
    for block, key in zip(blocks, keys, strict=True):
        block._block_hash = key
    if found == blocks:
        return []
    places = [i for i, block in enumerate(blocks) if found[i] is not block]
    for place in places:
        blocks[place]._block_hash = None
    return places


def add_key(pool: BlockPool, block: KVCacheBlock, key: Key) -> None:
    """Make a block with contents findable by one more key."""
    pool._insert_block_hash(key, block, num_tokens=None)


_GET_KEY: Callable[[KVCacheBlock], Key | None] = attrgetter("_block_hash")
