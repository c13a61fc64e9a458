"""CpuTier: allocation, commits, drops and references."""

import pytest
from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId

from tests.scheduler.tiers import (
    BLOCK_SIZE,
    begin,
    block,
    blocks,
    commit,
    contents,
    hashes,
    hold,
    key,
    leave,
    make_tier,
    names,
    prefixes,
    snapshot,
    store,
)
from tests.simulation.integrity import check_tier, pool_of


def test_version_grows_when_a_lookup_may_change() -> None:
    tier = make_tier(3)
    seen = [tier.version]

    def grew() -> bool:
        seen.append(tier.version)
        return seen[-1] > seen[-2]

    filled = begin(tier, "a")
    assert not grew()
    commit(tier, filled, "a")
    assert grew()
    store(tier, "ab", "abc")
    assert grew()
    hold(tier, blocks(tier, "ab"))
    tier.unpin(blocks(tier, "ab"))
    assert not grew()
    begin(tier, "x")  # evicts "abc"
    assert grew()
    tier.drop(blocks(tier, "a"))
    assert grew()
    tier.reset()
    assert grew()


# Making room


def test_empty_blocks_are_allocated_before_any_is_evicted() -> None:
    tier = make_tier(5)
    store(tier, "abc")
    allocated = [begin(tier, "x"), begin(tier, "xy")]
    assert contents(tier) == {"a", "ab", "abc"}
    assert [new.ref_cnt for new in allocated] == [1, 1]
    assert names(allocated) == ["", ""]


def test_allocation_stops_when_everything_is_pinned() -> None:
    tier = make_tier(3)
    store(tier, "abc")
    hold(tier, blocks(tier, "abc"))
    before = snapshot(tier)
    assert tier.allocate(1) == tier.allocate(5) == tier.allocate(1, lambda: {key("abc")}) == []
    assert snapshot(tier) == before


def test_a_chain_that_fills_the_tier_does_not_evict_itself() -> None:
    tier = make_tier(4)
    store(tier, "abcd")
    before = snapshot(tier)
    assert tier.allocate(1, lambda: {key("abcd")}) == []
    assert snapshot(tier) == before
    begin(tier, "x")  # another chain may evict its tail
    assert contents(tier) == {"a", "ab", "abc"}


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 5, 9])
def test_blocks_are_allocated_as_far_as_there_is_room(count: int) -> None:
    """Empty blocks first, then the least recently used."""
    tier = make_tier(5)
    store(tier, "abc")
    allocated = tier.allocate(count)
    assert len(allocated) == min(count, 5)
    assert [new.ref_cnt for new in allocated] == [1] * len(allocated)
    assert names(allocated) == [""] * len(allocated)
    assert contents(tier) == set(prefixes("abc")[: 3 - max(0, len(allocated) - 2)])
    check_tier(tier)


def test_keys_to_keep_are_collected_only_for_an_eviction() -> None:
    tier = make_tier(4)
    store(tier, "ab")
    calls: list[None] = []

    def keep() -> set[BlockHashWithGroupId]:
        calls.append(None)
        return {key("a")}

    held = tier.allocate(2, keep)
    assert calls == []
    assert len(tier.allocate(2, keep)) == 1
    assert calls == [None]
    tier.unpin(held)


def test_allocation_stops_at_a_block_to_keep() -> None:
    tier = make_tier(6)
    store(tier, "xy", "abc")
    allocated = tier.allocate(6, lambda: {key("ab"), key("abc")})
    assert len(allocated) == 3  # the empty one, "xy" and "x"
    assert contents(tier) == {"a", "ab", "abc"}
    assert tier.allocate(1, lambda: {key("abc")}) == []
    assert len(tier.allocate(6, lambda: {key("ab")})) == 1
    assert contents(tier) == {"a", "ab"}
    check_tier(tier)


# Growing


def test_new_blocks_are_the_next_to_be_allocated_lowest_first() -> None:
    tier = make_tier(4)
    store(tier, "abc")
    tier.grow(9)
    assert (tier.num_blocks, pool_of(tier).num_gpu_blocks) == (9, 9)
    assert pool_of(tier).get_num_free_blocks() == 8
    check_tier(tier)
    new = [begin(tier, "x" * length) for length in range(1, 5)]
    assert [block.block_id for block in new] == [5, 6, 7, 8]
    assert contents(tier) == {"a", "ab", "abc"}


def test_growing_keeps_contents_and_references() -> None:
    tier = make_tier(4)
    store(tier, "abcd")
    pinned = blocks(tier, "ab")
    hold(tier, pinned)
    version = tier.version
    assert tier.allocate(1, lambda: {key("abcd")}) == []
    tier.grow(7)
    assert tier.version == version  # lookups find the same as before
    assert contents(tier) == {"a", "ab", "abc", "abcd"}
    assert [held.ref_cnt for held in pinned] == [1, 1]
    store(tier, "abcdef")
    tier.unpin(pinned)
    check_tier(tier)
    assert leave(tier) == ["abcdef", "abcde", "abcd", "abc", "ab", "a"]


@pytest.mark.parametrize("num_blocks", [0, 1, 4, 5])
def test_a_tier_does_not_shrink(num_blocks: int) -> None:
    tier = make_tier(4)
    store(tier, "ab")
    before = snapshot(tier)
    tier.grow(num_blocks)
    assert snapshot(tier) == before
    assert tier.num_blocks == 5
    check_tier(tier)


def test_a_tier_may_begin_without_blocks() -> None:
    tier = make_tier(0)
    assert (tier.num_blocks, pool_of(tier).get_num_free_blocks()) == (1, 0)
    assert tier.lookup(hashes("abc"), 0, 100).num_tokens == 0
    assert tier.allocate(1) == []
    tier.reset()
    check_tier(tier)
    tier.grow(4)
    store(tier, "abc")
    assert contents(tier) == {"a", "ab", "abc"}


# Filling


def test_a_block_is_found_once_it_is_committed() -> None:
    tier = make_tier(4)
    filled = begin(tier, "a")
    assert contents(tier) == set()
    assert commit(tier, filled, "a")
    assert contents(tier) == {"a"}
    assert filled.ref_cnt == 0


def test_an_orphan_is_not_kept() -> None:
    tier = make_tier(4)
    store(tier, "ab")
    filled = begin(tier, "abc")
    tier.drop([block(tier, "ab")])
    assert not commit(tier, filled, "abc")
    assert contents(tier) == {"a"}
    assert (filled.ref_cnt, filled.block_hash) == (0, None)
    check_tier(tier)
    assert tier.allocate(1) == [filled]  # the next to be allocated
    assert contents(tier) == {"a"}


def test_a_window_needs_no_head() -> None:
    tier = make_tier(8, windows=(0, 8))
    store(tier, "ab", group=1)
    filled = begin(tier, "abc", group=1)
    tier.drop([block(tier, "ab", group=1)])
    assert commit(tier, filled, "abc", group=1)
    assert contents(tier, group=1) == {"a", "abc"}
    check_tier(tier)


def test_a_key_is_held_once() -> None:
    tier = make_tier(4)
    first, second = begin(tier, "a"), begin(tier, "a")
    assert commit(tier, first, "a")
    assert not commit(tier, second, "a")
    assert block(tier, "a") is first
    assert (second.ref_cnt, second.block_hash) == (0, None)
    check_tier(tier)
    assert tier.allocate(1) == [second]


def test_groups_do_not_find_each_others_blocks() -> None:
    tier = make_tier(8, windows=(0, 8))
    store(tier, "abc", group=0)
    assert contents(tier, group=1) == set()
    assert tier.lookup(hashes("abc"), 0, 100).num_tokens == 0
    store(tier, "abc", group=1)
    assert tier.lookup(hashes("abc"), 0, 100).num_tokens == 3 * BLOCK_SIZE


# Doubt


def test_doubt_ends_with_the_contents_of_a_block() -> None:
    tier = make_tier(2)
    for name in ("a", "x"):
        store(tier, name, f"{name}y")
        tier.doubt(blocks(tier, f"{name}y"), load_id=1, next_load_id=2)
        check_tier(tier)
    tier.reset()
    store(tier, "ab")
    tier.doubt(blocks(tier, "ab"), load_id=2, next_load_id=3)
    assert contents(tier) == {"a", "ab"}
    tier.doubt([block(tier, "ab")], load_id=3, next_load_id=4)
    assert contents(tier) == {"a"}
    check_tier(tier)


# Drops and resets


def test_descendants_are_dropped_too() -> None:
    tier = make_tier(10)
    store(tier, "abcd", "abxy", "pq")
    lost = [*blocks(tier, "abcd")[1:], *blocks(tier, "abxy")[2:]]
    tier.drop([block(tier, "ab")])
    assert contents(tier) == {"a", "p", "pq"}
    check_tier(tier)
    # Empty blocks are allocated before any is evicted.
    again = [begin(tier, name) for name in ("m", "mn", "mno", "mnop", "mnopq")]
    assert {new.block_id for new in lost} <= {new.block_id for new in again}
    assert contents(tier) == {"a", "p", "pq"}
    assert leave(tier) == ["a", "pq", "p"]


def test_dropped_blocks_stay_as_long_as_they_are_pinned() -> None:
    tier = make_tier(4)
    store(tier, "abc")
    pinned = blocks(tier, "abc")
    hold(tier, pinned)
    tier.drop(pinned[1:2])
    assert contents(tier) == {"a"}
    assert [held.ref_cnt for held in pinned] == [1, 1, 1]
    check_tier(tier)
    new = begin(tier, "x")
    assert new not in pinned
    assert tier.allocate(1) == []
    tier.unpin(pinned)
    check_tier(tier)
    assert {begin(tier, "y").block_id, begin(tier, "z").block_id} == {
        held.block_id for held in pinned[1:]
    }
    assert contents(tier) == {"a"}


def test_dropping_empty_blocks() -> None:
    tier = make_tier(4)
    store(tier, "a")
    held = begin(tier, "x")
    tier.drop([held, pool_of(tier).blocks[-1]])
    assert contents(tier) == {"a"}
    assert held.ref_cnt == 1
    check_tier(tier)


def test_a_reset_drops_all_contents_and_no_reference() -> None:
    tier = make_tier(6)
    store(tier, "abc", "x")
    pinned = blocks(tier, "ab")
    hold(tier, pinned)
    filling = begin(tier, "abcd")
    tier.reset()
    assert contents(tier) == set()
    assert tier.lookup(hashes("abc"), 0, 100).num_tokens == 0
    assert [held.ref_cnt for held in (*pinned, filling)] == [1, 1, 1]
    assert pool_of(tier).get_num_free_blocks() == 3
    check_tier(tier)
    tier.unpin([*pinned, filling])
    check_tier(tier)
    assert pool_of(tier).get_num_free_blocks() == 6
    store(tier, "abc")  # the tier works as before
    assert contents(tier) == {"a", "ab", "abc"}


def test_unpinned_chains_join_the_queue_tail_first() -> None:
    tier = make_tier(12)
    store(tier, "abcd", "abx", "q")
    one, other = blocks(tier, "abcd"), blocks(tier, "abx")
    hold(tier, [*one, *other, block(tier, "q")])
    tier.unpin([*one, block(tier, "q")])  # the other chain has a reference to "ab"
    queue = pool_of(tier).free_block_queue
    assert names(queue.get_all_free_blocks())[-3:] == ["abcd", "abc", "q"]
    tier.unpin(other)
    assert names(queue.get_all_free_blocks())[-6:] == ["abcd", "abc", "q", "abx", "ab", "a"]
    check_tier(tier)


def test_an_unpinned_block_joins_a_parent_that_is_free() -> None:
    tier = make_tier(12)
    store(tier, "abc", "q")
    hold(tier, [block(tier, "abc")])
    tier.unpin([block(tier, "abc")])
    assert leave(tier) == ["abc", "ab", "a", "q"]
