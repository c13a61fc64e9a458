"""block_pool: each function leaves the pool as vLLM's own methods do, link by link."""

from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import (
    BlockHashWithGroupId,
    FreeKVCacheBlockQueue,
    KVCacheBlock,
)

from simple_offload.scheduler.tier import block_pool
from tests.scheduler.tiers import BLOCK_SIZE, key, make_tier, prefixes
from tests.simulation.integrity import pool_of

NUM_BLOCKS = 12
CHAIN = [key(name) for name in prefixes("abcdefghijkl")]
Call = Callable[[BlockPool, list[KVCacheBlock]], Any]


def snapshot(pool: BlockPool) -> object:
    """The state of the pool and its blocks, links in both directions included."""
    queue = pool.free_block_queue
    fields = [
        (
            block.block_id,
            block.ref_cnt,
            block.block_hash,
            block.block_hash_num_tokens,
            block.prev_free_block and block.prev_free_block.block_id,
            block.next_free_block and block.next_free_block.block_id,
        )
        for block in (*pool.blocks, queue.fake_free_list_head, queue.fake_free_list_tail)
    ]
    cached = {
        key: sorted(found) if isinstance(found, dict) else found.block_id
        for key, found in pool.cached_block_hash_to_block._cache.items()
    }
    inner = {block_id: set(keys) for block_id, keys in pool.cached_block_hashes_by_block.items()}
    return fields, cached, inner, queue.num_free_blocks


class Twins:
    """Two equal pools: our functions change one, vLLM's own methods the other."""

    def __init__(self, filled: int = NUM_BLOCKS) -> None:
        """``filled`` of the blocks hold the chain's first keys. They are free, tail first."""
        self.pools = [pool_of(make_tier(NUM_BLOCKS)) for _ in range(2)]
        for pool in self.pools:
            blocks = pool.get_new_blocks(filled)
            for place, block in enumerate(blocks):
                pool._insert_block_hash(CHAIN[place], block, (place + 1) * BLOCK_SIZE)
            pool.free_blocks(reversed(blocks))

    def do(self, own: Call, theirs: Call, block_ids: Sequence[int] = ()) -> Any:
        """Call both with the blocks of these ids, and compare. Returns the result of ``own``."""
        returned = [
            act(pool, [pool.blocks[i] for i in block_ids])
            for act, pool in zip((own, theirs), self.pools, strict=True)
        ]
        if isinstance(returned[0], list):
            ids = [[each and each.block_id for each in blocks] for blocks in returned]
            assert ids[0] == ids[1]
        assert snapshot(self.pools[0]) == snapshot(self.pools[1])
        return returned[0]


IDS = st.lists(st.integers(1, NUM_BLOCKS), unique=True)
COUNT = st.integers(0, NUM_BLOCKS)


@given(COUNT, st.lists(IDS, max_size=4), st.data())
def test_touch_and_free_blocks(filled: int, held: list[list[int]], data: st.DataObject) -> None:
    twins = Twins(filled)
    for ids in held:
        twins.do(block_pool.touch, lambda pool, blocks: pool.touch(blocks), ids)
    for ids in data.draw(st.permutations(held)):
        twins.do(block_pool.free_blocks, lambda pool, blocks: pool.free_blocks(blocks), ids)
    assert twins.pools[0].get_num_free_blocks() == NUM_BLOCKS


@given(COUNT, COUNT, COUNT, st.booleans())
def test_get_new_blocks(filled: int, limit: int, kept: int, inner: bool) -> None:
    """``kept``: the place in the queue of a block to keep, if it has contents."""
    twins = Twins(filled)
    removed: list[BlockHashWithGroupId] = []
    block_pool.on_removed(twins.pools[0], removed.extend)
    for pool in twins.pools:
        if inner and filled:  # a block with another key too
            pool._insert_block_hash(key("inside"), pool.blocks[filled], None)
    queued = twins.pools[0].free_block_queue.get_all_free_blocks()
    keep = {block.block_id for block in queued[kept : kept + 1]}
    is_full = any(block.block_hash is not None for block in queued[kept : kept + 1])
    count = min(limit, kept if is_full else NUM_BLOCKS)
    expected = [each for block in queued[:count] if (each := block.block_hash) is not None]
    evicted: list[BlockHashWithGroupId] = []

    def get_new_blocks(pool: BlockPool, _: object) -> list[KVCacheBlock]:
        blocks, keys = block_pool.get_new_blocks(pool, pool.free_block_queue, limit, keep)
        evicted.extend(keys)
        return blocks

    twins.do(get_new_blocks, lambda pool, _: pool.get_new_blocks(count))
    assert evicted == expected
    assert set(removed) - {key("inside")} == set(evicted)
    assert (key("inside") in removed) == (inner and CHAIN[filled - 1] in evicted)


@given(COUNT, IDS, COUNT, st.booleans())
def test_all_contents_are_evicted(filled: int, held: list[int], queued: int, inner: bool) -> None:
    """``queued`` of the free blocks are in a queue of their own."""
    twins = Twins(filled)
    twins.do(block_pool.touch, lambda pool, blocks: pool.touch(blocks), held)
    removed: list[list[BlockHashWithGroupId]] = []
    block_pool.on_removed(twins.pools[0], lambda keys: removed.append([*keys]))
    cached = block_pool.cached(twins.pools[0])
    for pool in twins.pools:
        if inner and filled:  # a block with another key too
            pool._insert_block_hash(key("inside"), pool.blocks[filled], None)
    keys = [*cached]
    queued = min(queued, NUM_BLOCKS - len(held))

    def evict_all(pool: BlockPool, _: object) -> None:
        other = FreeKVCacheBlockQueue([])
        other.append_n(pool.free_block_queue.popleft_n(queued))
        block_pool.evict_all_blocks(pool, [pool.free_block_queue, other])
        assert not other.get_all_free_blocks()
        assert not other.num_free_blocks

    def evict_each(pool: BlockPool, _: object) -> None:
        pool.evict_blocks({*range(1, NUM_BLOCKS + 1)})
        free = pool.free_block_queue.popleft_n(NUM_BLOCKS - len(held))
        pool.free_block_queue.append_n(sorted(free, key=lambda block: block.block_id))

    twins.do(evict_all, evict_each)
    assert removed == [keys] * bool(keys)
    assert not cached


@given(COUNT, st.sets(st.integers(0, NUM_BLOCKS)))
def test_empty_blocks_get_keys(filled: int, known: set[int]) -> None:
    twins = Twins(filled)
    count = NUM_BLOCKS - filled
    blocks = twins.do(
        lambda pool, _: pool.get_new_blocks(count), lambda pool, _: pool.get_new_blocks(count)
    )
    # Some are the keys of other blocks, or come twice.
    own = [key(name) for name in prefixes("xyzuvwxyzuvw"[:count])]
    pool = twins.pools[0]
    keys = [pool.blocks[i].block_hash or own[0] if i in known else own[i - 1] for i in range(count)]

    useless: list[list[int]] = []

    def insert_all(pool: BlockPool, blocks: list[KVCacheBlock]) -> None:
        useless.append(block_pool.cache_blocks(pool, blocks, keys))

    def insert(pool: BlockPool, blocks: list[KVCacheBlock]) -> None:
        useless.append([])
        for place, (block, own_key) in enumerate(zip(blocks, keys, strict=True)):
            if pool.cached_block_hash_to_block.get_one_block(own_key) is None:
                pool._insert_block_hash(own_key, block, None)
            else:
                useless[-1].append(place)

    twins.do(insert_all, insert, [block.block_id for block in blocks])
    assert useless[0] == useless[1]


@given(COUNT, st.lists(st.sampled_from([*CHAIN, key("nowhere")])), st.booleans())
def test_find_blocks_and_find_chain_and_blocks_with(
    filled: int, keys: list[BlockHashWithGroupId], twice: bool
) -> None:
    twins = Twins(filled)
    if twice and filled > 1:
        for pool in twins.pools:  # two blocks with the same key
            pool._insert_block_hash(CHAIN[0], pool.blocks[2], None)

    def one_by_one(pool: BlockPool, _: object) -> list[KVCacheBlock | None]:
        return [pool.cached_block_hash_to_block.get_one_block(key) for key in keys]

    found = twins.do(lambda pool, _: block_pool.find_blocks(pool, keys), one_by_one)
    pool = twins.pools[0]
    chain = block_pool.find_chain(pool, keys)
    assert chain == found[: found.index(None) if None in found else len(found)]
    # Both, of a key that two blocks hold.
    both = [pool.blocks[i] for i in (1, 2)] if twice and filled > 1 else []
    all_found = [
        block
        for each, block in zip(keys, found, strict=True)
        for block in (both if both and each == CHAIN[0] else [block])
        if block is not None
    ]
    assert block_pool.blocks_with(pool, keys) == all_found


def test_touch_calls_the_metrics_collector() -> None:
    """vLLM's residency metrics see every touch."""

    class Collector:
        def __init__(self) -> None:
            self.accessed: list[int] = []

        def on_block_accessed(self, block: KVCacheBlock) -> None:
            self.accessed.append(block.block_id)

    pool = pool_of(make_tier(4))
    pool.metrics_collector = collector = Collector()  # type: ignore[assignment]
    block_pool.touch(pool, pool.blocks[1:3])
    assert collector.accessed == [1, 2]


def test_a_block_of_another_pool_goes_back_there() -> None:
    mine, other = pool_of(make_tier(4)), pool_of(make_tier(4))
    (foreign,) = other.get_new_blocks(1)
    foreign.pool = other
    block_pool.free_blocks(mine, [foreign])
    assert mine.get_num_free_blocks() == other.get_num_free_blocks() == 4
