"""Lists of blocks go through the pool as they would block by block, by vLLM's own methods."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, KVCacheBlock

from simple_offload.scheduler.tier import block_pool
from tests.scheduler.tiers import BLOCK_SIZE, key, make_tier, prefixes

NUM_BLOCKS = 12
CHAIN = [key(name) for name in prefixes("abcdefghijkl")]


def snapshot(pool: BlockPool) -> object:
    """Everything that the pool and its blocks say, links in both directions included."""
    queue = pool.free_block_queue

    def said(block: KVCacheBlock | None) -> object:
        return None if block is None else block.block_id

    fields = [
        (
            block.block_id,
            block.ref_cnt,
            block.block_hash,
            block.block_hash_num_tokens,
            said(block.prev_free_block),
            said(block.next_free_block),
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
    """Two pools alike: with one the functions deal, with the other vLLM's own methods."""

    def __init__(self, filled: int) -> None:
        """``filled`` of the blocks hold the chain's first keys and are free, tail first."""
        self.pools = [make_tier(NUM_BLOCKS).pool for _ in range(2)]
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
        """What ``own`` returns; both get the blocks of these ids."""
        returned = [
            act(pool, [pool.blocks[i] for i in block_ids])
            for act, pool in zip((own, theirs), self.pools, strict=True)
        ]
        if isinstance(returned[0], list):
            told = [[each and each.block_id for each in found] for found in returned]
            assert told[0] == told[1]
        self.check()
        return returned[0]

    def check(self) -> None:
        assert snapshot(self.pools[0]) == snapshot(self.pools[1])


IDS = st.lists(st.integers(1, NUM_BLOCKS), unique=True)
FILLED = st.integers(0, NUM_BLOCKS)


@given(FILLED, st.lists(IDS, max_size=4), st.data())
def test_hold_and_release(filled: int, held: list[list[int]], data: st.DataObject) -> None:
    twins = Twins(filled)
    for ids in held:
        twins.do(block_pool.hold, lambda pool, blocks: pool.touch(blocks), ids)
    for ids in data.draw(st.permutations(held)):
        twins.do(block_pool.release, lambda pool, blocks: pool.free_blocks(blocks), ids)
    assert twins.pools[0].get_num_free_blocks() == NUM_BLOCKS


@given(FILLED, st.integers(0, NUM_BLOCKS + 2))
def test_take_empty(filled: int, limit: int) -> None:
    twins = Twins(filled)
    count = min(limit, NUM_BLOCKS - filled)
    taken = twins.do(
        lambda pool, _: block_pool.take_empty(pool, limit),
        lambda pool, _: pool.get_new_blocks(count),
    )
    assert len(taken) == count


@given(FILLED, st.integers(0, NUM_BLOCKS), st.booleans())
def test_take(filled: int, count: int, inner: bool) -> None:
    twins = Twins(filled)
    told: list[list[BlockHashWithGroupId]] = []
    for pool in twins.pools:
        if inner and filled:  # a block that is found by another key too
            pool._insert_block_hash(key("inside"), pool.blocks[filled], None)
        if pool is twins.pools[0]:
            setattr(pool, "_emit_block_removed_events", told.append)  # noqa: B010
    evicted: list[BlockHashWithGroupId] = []

    def take(pool: BlockPool, _: object) -> list[KVCacheBlock]:
        blocks, keys = block_pool.take(pool, count)
        evicted.extend(keys)
        return blocks

    twins.do(take, lambda pool, _: pool.get_new_blocks(count))
    assert len(evicted) == max(0, count - (NUM_BLOCKS - filled))
    assert {key for keys in told for key in keys} - {key("inside")} == set(evicted)


@given(FILLED, st.integers(0, NUM_BLOCKS), st.integers(0, NUM_BLOCKS - 1), st.booleans())
def test_take_until_something_is_kept(filled: int, limit: int, kept: int, inner: bool) -> None:
    twins = Twins(filled)
    for pool in twins.pools:
        if inner and filled:
            pool._insert_block_hash(key("inside"), pool.blocks[filled], None)
    queued = twins.pools[0].free_block_queue.get_all_free_blocks()
    keep = {held for block in queued[kept : kept + 1] if (held := block.block_hash) is not None}
    count = min(limit, kept if keep else NUM_BLOCKS)
    twins.do(
        lambda pool, _: block_pool.take(pool, limit, keep)[0],
        lambda pool, _: pool.get_new_blocks(count),
    )


@given(st.integers(1, NUM_BLOCKS))
def test_give_keys(count: int) -> None:
    twins = Twins(0)
    blocks = twins.do(
        lambda pool, _: block_pool.take_empty(pool, count),
        lambda pool, _: pool.get_new_blocks(count),
    )

    parents: list[BlockHashWithGroupId | None] = [None] * (NUM_BLOCKS + 1)

    def insert(pool: BlockPool, blocks: list[KVCacheBlock]) -> None:
        for place, block in enumerate(blocks):
            pool._insert_block_hash(CHAIN[place], block, None)

    twins.do(
        lambda pool, blocks: block_pool.give_keys(
            pool, blocks, CHAIN[:count], parents, key("before")
        ),
        insert,
        [block.block_id for block in blocks],
    )
    assert [parents[block.block_id] for block in blocks] == [key("before"), *CHAIN[: count - 1]]


@given(st.integers(1, NUM_BLOCKS))
def test_queue_chain(count: int) -> None:
    """At the end of the queue, tail first."""
    twins = Twins(NUM_BLOCKS)
    ids = range(1, count + 1)
    twins.do(block_pool.hold, lambda pool, blocks: pool.touch(blocks), ids)
    twins.do(block_pool.queue_chain, lambda pool, blocks: pool.free_blocks(reversed(blocks)), ids)


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


@pytest.mark.parametrize("place", range(4))
def test_queue_chain_before_a_block(place: int) -> None:
    pool = make_tier(8).pool
    chain = pool.get_new_blocks(3)
    before = pool.free_block_queue.get_all_free_blocks()
    block_pool.queue_chain(pool, chain, before[place])
    after = pool.free_block_queue.get_all_free_blocks()
    assert after == [*before[:place], *reversed(chain), *before[place:]]
    assert pool.get_num_free_blocks() == len(after)
    assert all(block.ref_cnt == 0 for block in chain)
    backwards, block = [], pool.free_block_queue.fake_free_list_tail.prev_free_block
    while block is not None and block.block_id >= 0:
        backwards.append(block)
        block = block.prev_free_block
    assert backwards == after[::-1]


@given(FILLED, st.lists(st.sampled_from([*CHAIN, key("nowhere")])), st.booleans())
def test_find(filled: int, keys: list[BlockHashWithGroupId], twice: bool) -> None:
    twins = Twins(filled)
    if twice and filled > 1:
        for pool in twins.pools:  # two blocks that hold the same
            pool._insert_block_hash(CHAIN[0], pool.blocks[2], None)

    def one_by_one(pool: BlockPool, _: object) -> list[KVCacheBlock | None]:
        return [pool.cached_block_hash_to_block.get_one_block(key) for key in keys]

    found = twins.do(lambda pool, _: block_pool.find(pool, keys), one_by_one)
    chain = block_pool.find_chain(twins.pools[0], keys)
    end = found.index(None) if None in found else len(found)
    assert chain == found[:end]


def test_a_pool_that_counts_is_told() -> None:
    """vLLM's residency metrics see every touch."""

    class Collector:
        def __init__(self) -> None:
            self.accessed: list[int] = []

        def on_block_accessed(self, block: KVCacheBlock) -> None:
            self.accessed.append(block.block_id)

    pool = make_tier(4).pool
    pool.metrics_collector = collector = Collector()  # type: ignore[assignment]
    block_pool.hold(pool, pool.blocks[1:3])
    assert collector.accessed == [1, 2]


def test_a_block_of_another_pool_goes_back_there() -> None:
    mine, other = make_tier(4).pool, make_tier(4).pool
    (foreign,) = other.get_new_blocks(1)
    foreign.pool = other
    block_pool.release(mine, [foreign])
    assert mine.get_num_free_blocks() == other.get_num_free_blocks() == 4
