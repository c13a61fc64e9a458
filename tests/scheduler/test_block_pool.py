"""block_pool: each function leaves the pool as vLLM's own methods do, block by block."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, KVCacheBlock

from simple_offload.scheduler.tier import block_pool
from tests.scheduler.tiers import BLOCK_SIZE, key, make_tier, prefixes
from tests.simulation.integrity import pool_of

NUM_BLOCKS = 12
CHAIN = [key(name) for name in prefixes("abcdefghijkl")]


def snapshot(pool: BlockPool) -> object:
    """The state of the pool and its blocks, links in both directions included."""
    queue = pool.free_block_queue

    def id_of(block: KVCacheBlock | None) -> object:
        return None if block is None else block.block_id

    fields = [
        (
            block.block_id,
            block.ref_cnt,
            block.block_hash,
            block.block_hash_num_tokens,
            id_of(block.prev_free_block),
            id_of(block.next_free_block),
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

    def __init__(self, filled: int) -> None:
        """``filled`` of the blocks hold the chain's first keys. They are free, tail first."""
        self.pools = [pool_of(make_tier(NUM_BLOCKS)) for _ in range(2)]
        for pool in self.pools:
            blocks = pool.get_new_blocks(filled)
            for place, block in enumerate(blocks):
                pool._insert_block_hash(CHAIN[place], block, (place + 1) * BLOCK_SIZE)
            pool.free_blocks(reversed(blocks))
        self.check()

    def do(
        self,
        own: Callable[[BlockPool, list[KVCacheBlock]], Any],
        theirs: Callable[[BlockPool, list[KVCacheBlock]], Any],
        block_ids: Sequence[int] = (),
    ) -> Any:
        """Call both with the blocks of these ids, and compare. Returns the result of ``own``."""
        returned = [
            act(pool, [pool.blocks[i] for i in block_ids])
            for act, pool in zip((own, theirs), self.pools, strict=True)
        ]
        if isinstance(returned[0], list):
            ids = [[each and each.block_id for each in blocks] for blocks in returned]
            assert ids[0] == ids[1]
        self.check()
        return returned[0]

    def check(self) -> None:
        assert snapshot(self.pools[0]) == snapshot(self.pools[1])


IDS = st.lists(st.integers(1, NUM_BLOCKS), unique=True)
FILLED = st.integers(0, NUM_BLOCKS)


@given(FILLED, st.lists(IDS, max_size=4), st.data())
def test_touch_and_free_blocks(filled: int, held: list[list[int]], data: st.DataObject) -> None:
    twins = Twins(filled)
    for ids in held:
        twins.do(block_pool.touch, lambda pool, blocks: pool.touch(blocks), ids)
    for ids in data.draw(st.permutations(held)):
        twins.do(block_pool.free_blocks, lambda pool, blocks: pool.free_blocks(blocks), ids)
    assert twins.pools[0].get_num_free_blocks() == NUM_BLOCKS


@given(FILLED, st.integers(0, NUM_BLOCKS + 2))
def test_get_empty_blocks(filled: int, limit: int) -> None:
    twins = Twins(filled)
    count = min(limit, NUM_BLOCKS - filled)
    blocks = twins.do(
        lambda pool, _: block_pool.get_empty_blocks(pool, limit),
        lambda pool, _: pool.get_new_blocks(count),
    )
    assert len(blocks) == count


@given(FILLED, st.integers(0, NUM_BLOCKS), st.integers(0, NUM_BLOCKS), st.booleans())
def test_get_new_blocks(filled: int, limit: int, kept: int, inner: bool) -> None:
    """``kept``: the place in the queue of a block to keep, if it has contents."""
    twins = Twins(filled)
    removed: list[BlockHashWithGroupId] = []
    block_pool.on_removed(twins.pools[0], removed.extend)
    for pool in twins.pools:
        if inner and filled:  # a block with another key too
            pool._insert_block_hash(key("inside"), pool.blocks[filled], None)
    queued = twins.pools[0].free_block_queue.get_all_free_blocks()
    keep = {each for block in queued[kept : kept + 1] if (each := block.block_hash) is not None}
    count = min(limit, kept if keep else NUM_BLOCKS)
    expected = [each for block in queued[:count] if (each := block.block_hash) is not None]
    evicted: list[BlockHashWithGroupId] = []

    def get_new_blocks(pool: BlockPool, _: object) -> list[KVCacheBlock]:
        blocks, keys = block_pool.get_new_blocks(pool, limit, keep)
        evicted.extend(keys)
        return blocks

    twins.do(get_new_blocks, lambda pool, _: pool.get_new_blocks(count))
    assert evicted == expected
    assert set(removed) - {key("inside")} == set(evicted)
    assert (key("inside") in removed) == (inner and CHAIN[filled - 1] in evicted)


@given(st.integers(1, NUM_BLOCKS))
def test_cache_chain(count: int) -> None:
    twins = Twins(0)
    blocks = twins.do(
        lambda pool, _: block_pool.get_empty_blocks(pool, count),
        lambda pool, _: pool.get_new_blocks(count),
    )

    parents: list[BlockHashWithGroupId | None] = [None] * (NUM_BLOCKS + 1)

    def insert(pool: BlockPool, blocks: list[KVCacheBlock]) -> None:
        for place, block in enumerate(blocks):
            pool._insert_block_hash(CHAIN[place], block, None)

    twins.do(
        lambda pool, blocks: block_pool.cache_chain(
            pool, blocks, CHAIN[:count], parents, key("before")
        ),
        insert,
        [block.block_id for block in blocks],
    )
    assert [parents[block.block_id] for block in blocks] == [key("before"), *CHAIN[: count - 1]]


@given(st.integers(1, NUM_BLOCKS))
def test_free_chain(count: int) -> None:
    """At the end of the queue, tail first."""
    twins = Twins(NUM_BLOCKS)
    ids = range(1, count + 1)
    twins.do(block_pool.touch, lambda pool, blocks: pool.touch(blocks), ids)
    twins.do(block_pool.free_chain, lambda pool, blocks: pool.free_blocks(reversed(blocks)), ids)


def backwards(pool: BlockPool) -> list[KVCacheBlock]:
    """The free queue by its links from the end to the front."""
    blocks, block = [], pool.free_block_queue.fake_free_list_tail.prev_free_block
    while block is not None and block.block_id >= 0:
        blocks.append(block)
        block = block.prev_free_block
    return blocks


@given(st.integers(1, NUM_BLOCKS), st.integers(1, NUM_BLOCKS))
def test_move(one: int, other: int) -> None:
    twins = Twins(NUM_BLOCKS)
    head, last = sorted((one, other))

    def block_by_block(pool: BlockPool, blocks: list[KVCacheBlock]) -> None:
        pool.touch(blocks)
        pool.free_blocks(reversed(blocks))

    twins.do(
        lambda pool, blocks: block_pool.move(pool, blocks[-1], blocks[0]),
        block_by_block,
        range(head, last + 1),
    )


@given(st.integers(1, NUM_BLOCKS))
def test_free_blocks_first(count: int) -> None:
    """As vLLM frees empty blocks."""
    twins = Twins(0)
    twins.do(block_pool.touch, lambda pool, blocks: pool.touch(blocks), range(1, count + 1))
    ids = range(count, 0, -1)
    twins.do(block_pool.free_blocks_first, lambda pool, blocks: pool.free_blocks(blocks), ids)


@given(IDS, st.integers(0, NUM_BLOCKS))
def test_a_bookmark_marks_its_place_while_blocks_leave(gone: list[int], place: int) -> None:
    twins = Twins(NUM_BLOCKS)
    pool = twins.pools[0]
    queued = [*pool.free_block_queue.get_all_free_blocks(), block_pool.queue_end(pool)]
    bookmark = block_pool.Bookmark()

    def touch(pool: BlockPool, blocks: list[KVCacheBlock]) -> KVCacheBlock:
        bookmark.insert_before(queued[place])
        block_pool.touch(pool, blocks)
        return bookmark.remove()

    behind = twins.do(touch, lambda pool, blocks: pool.touch(blocks), gone)
    assert behind is next(block for block in queued[place:] if block.ref_cnt == 0)


@given(IDS)
def test_the_order_of_the_free_queue(held: list[int]) -> None:
    pool = Twins(NUM_BLOCKS).pools[0]
    block_pool.touch(pool, [pool.blocks[i] for i in held])
    queued = pool.free_block_queue.get_all_free_blocks()
    found = [(block, block.block_hash) for block in queued]
    assert list(block_pool.free_blocks_after(pool, None)) == found
    assert block_pool.first_free(pool) is next(iter(queued), block_pool.queue_end(pool))
    for place, block in enumerate(queued, 1):
        assert list(block_pool.free_blocks_after(pool, block)) == found[place:]
        following = queued[place] if place < len(queued) else block_pool.queue_end(pool)
        assert block_pool.next_free(block) is following


@pytest.mark.parametrize("place", range(4))
def test_free_chain_before_a_block(place: int) -> None:
    pool = pool_of(make_tier(8))
    chain = pool.get_new_blocks(3)
    before = pool.free_block_queue.get_all_free_blocks()
    block_pool.free_chain(pool, chain, before[place])
    after = pool.free_block_queue.get_all_free_blocks()
    assert after == [*before[:place], *reversed(chain), *before[place:]]
    assert pool.get_num_free_blocks() == len(after)
    assert all(block.ref_cnt == 0 for block in chain)
    assert backwards(pool) == after[::-1]


@pytest.mark.parametrize("place", [0, 1, 4, 5, None])
def test_move_before_a_block(place: int | None) -> None:
    pool = Twins(NUM_BLOCKS).pools[0]
    before = pool.free_block_queue.get_all_free_blocks()
    successor = None if place is None else before[place]
    block_pool.move(pool, before[2], before[3], successor)
    others = [*before[:2], *before[4:]]
    start = len(others) if successor is None else others.index(successor)
    after = pool.free_block_queue.get_all_free_blocks()
    assert after == [*others[:start], *before[2:4], *others[start:]]
    assert backwards(pool) == after[::-1]


@given(FILLED, st.lists(st.sampled_from([*CHAIN, key("nowhere")])), st.booleans())
def test_find_blocks_and_find_chain(
    filled: int, keys: list[BlockHashWithGroupId], twice: bool
) -> None:
    twins = Twins(filled)
    if twice and filled > 1:
        for pool in twins.pools:  # two blocks with the same key
            pool._insert_block_hash(CHAIN[0], pool.blocks[2], None)

    def one_by_one(pool: BlockPool, _: object) -> list[KVCacheBlock | None]:
        return [pool.cached_block_hash_to_block.get_one_block(key) for key in keys]

    found = twins.do(lambda pool, _: block_pool.find_blocks(pool, keys), one_by_one)
    assert [block_pool.get_block(twins.pools[0], key) for key in keys] == found
    chain = block_pool.find_chain(twins.pools[0], keys)
    end = found.index(None) if None in found else len(found)
    assert chain == found[:end]


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
