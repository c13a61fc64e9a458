"""CpuTier: what is found, what is held, and what makes room."""

from collections.abc import Iterator
from typing import Any

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
    key,
    leave,
    make_tier,
    names,
    prefixes,
    snapshot,
    store,
)


def test_version_grows_when_a_lookup_may_find_something_else() -> None:
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
    tier.pin(blocks(tier, "ab"))
    tier.unpin(blocks(tier, "ab"))
    assert not grew()
    begin(tier, "x")  # evicts "abc"
    assert grew()
    tier.drop(blocks(tier, "a"))
    assert grew()
    tier.reset()
    assert grew()


# Making room


def test_empty_blocks_are_handed_out_before_anything_is_evicted() -> None:
    tier = make_tier(5)
    store(tier, "abc")
    allocated = [begin(tier, "x"), begin(tier, "xy")]
    assert contents(tier) == {"a", "ab", "abc"}
    assert [new.ref_cnt for new in allocated] == [1, 1]
    assert names(allocated) == ["", ""]


def test_allocation_stops_when_everything_is_pinned() -> None:
    tier = make_tier(3)
    store(tier, "abc")
    tier.pin(blocks(tier, "abc"))
    before = snapshot(tier)
    assert tier.allocate(1) == tier.allocate(5) == tier.allocate(1, lambda: {key("abc")}) == []
    assert snapshot(tier) == before


def test_a_chain_that_fills_the_tier_does_not_eat_itself() -> None:
    tier = make_tier(4)
    store(tier, "abcd")
    before = snapshot(tier)
    assert tier.allocate(1, lambda: {key("abcd")}) == []
    assert snapshot(tier) == before
    begin(tier, "x")  # another chain may
    assert contents(tier) == {"a", "ab", "abc"}


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 5, 9])
def test_as_many_blocks_as_there_is_room_for(count: int) -> None:
    """Empty ones first, then the least recently used."""
    tier = make_tier(5)
    store(tier, "abc")
    allocated = tier.allocate(count)
    assert len(allocated) == min(count, 5)
    assert [new.ref_cnt for new in allocated] == [1] * len(allocated)
    assert names(allocated) == [""] * len(allocated)
    assert contents(tier) == set(prefixes("abc")[: 3 - max(0, len(allocated) - 2)])
    tier.check_integrity()


def test_what_is_to_be_kept_is_asked_for_only_when_something_has_to_leave() -> None:
    tier = make_tier(4)
    store(tier, "ab")
    asked: list[None] = []

    def keep() -> set[BlockHashWithGroupId]:
        asked.append(None)
        return {key("a")}

    held = tier.allocate(2, keep)
    assert asked == []
    assert len(tier.allocate(2, keep)) == 1
    assert asked == [None]
    tier.unpin(held)


def test_allocation_stops_at_what_is_to_be_kept() -> None:
    tier = make_tier(6)
    store(tier, "xy", "abc")
    allocated = tier.allocate(6, lambda: {key("ab"), key("abc")})
    assert len(allocated) == 3  # the empty one, "xy" and "x"
    assert contents(tier) == {"a", "ab", "abc"}
    assert tier.allocate(1, lambda: {key("abc")}) == []
    assert len(tier.allocate(6, lambda: {key("ab")})) == 1
    assert contents(tier) == {"a", "ab"}
    tier.check_integrity()


# Growing


def test_new_blocks_are_the_next_to_be_allocated_lowest_first() -> None:
    tier = make_tier(4)
    store(tier, "abc")
    tier.grow(9)
    assert (tier.num_blocks, tier.pool.num_gpu_blocks) == (9, 9)
    assert tier.pool.get_num_free_blocks() == 8
    tier.check_integrity()
    new = [begin(tier, "x" * length) for length in range(1, 5)]
    assert [block.block_id for block in new] == [5, 6, 7, 8]
    assert contents(tier) == {"a", "ab", "abc"}


def test_growing_forgets_and_lets_go_of_nothing() -> None:
    tier = make_tier(4)
    store(tier, "abcd")
    pinned = blocks(tier, "ab")
    tier.pin(pinned)
    version = tier.version
    assert tier.allocate(1, lambda: {key("abcd")}) == []
    tier.grow(7)
    assert tier.version == version  # a lookup finds what it found
    assert contents(tier) == {"a", "ab", "abc", "abcd"}
    assert [held.ref_cnt for held in pinned] == [1, 1]
    store(tier, "abcdef")
    tier.unpin(pinned)
    tier.check_integrity()
    assert leave(tier) == ["abcdef", "abcde", "abcd", "abc", "ab", "a"]


@pytest.mark.parametrize("num_blocks", [0, 1, 4, 5])
def test_a_tier_does_not_shrink(num_blocks: int) -> None:
    tier = make_tier(4)
    store(tier, "ab")
    before = snapshot(tier)
    tier.grow(num_blocks)
    assert snapshot(tier) == before
    assert tier.num_blocks == 5
    tier.check_integrity()


def test_a_tier_may_begin_with_nothing() -> None:
    tier = make_tier(0)
    assert (tier.num_blocks, tier.pool.get_num_free_blocks()) == (1, 0)
    assert tier.lookup.hit(hashes("abc"), 0, 100).num_tokens == 0
    assert tier.allocate(1) == []
    tier.reset()
    tier.check_integrity()
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
    tier.check_integrity()
    assert tier.allocate(1) == [filled]  # it is the first to be used again
    assert contents(tier) == {"a"}


def test_a_window_needs_no_head() -> None:
    tier = make_tier(8, windows=(0, 8))
    store(tier, "ab", group=1)
    filled = begin(tier, "abc", group=1)
    tier.drop([block(tier, "ab", group=1)])
    assert commit(tier, filled, "abc", group=1)
    assert contents(tier, group=1) == {"a", "abc"}
    tier.check_integrity()


def test_a_key_is_held_once() -> None:
    tier = make_tier(4)
    first, second = begin(tier, "a"), begin(tier, "a")
    assert commit(tier, first, "a")
    assert not commit(tier, second, "a")
    assert block(tier, "a") is first
    assert (second.ref_cnt, second.block_hash) == (0, None)
    tier.check_integrity()
    assert tier.allocate(1) == [second]


def test_groups_do_not_find_each_others_blocks() -> None:
    tier = make_tier(8, windows=(0, 8))
    store(tier, "abc", group=0)
    assert contents(tier, group=1) == set()
    assert tier.lookup.hit(hashes("abc"), 0, 100).num_tokens == 0
    store(tier, "abc", group=1)
    assert tier.lookup.hit(hashes("abc"), 0, 100).num_tokens == 3 * BLOCK_SIZE


# Doubting


def test_doubt_is_of_what_a_block_holds() -> None:
    """A block that is filled again is like any other."""
    tier = make_tier(2)
    for name in ("a", "x"):
        store(tier, name, f"{name}y")
        tier.doubt(blocks(tier, f"{name}y"), load_id=1, next_load_id=2)
        tier.check_integrity()
    tier.reset()
    store(tier, "ab")
    tier.doubt(blocks(tier, "ab"), load_id=2, next_load_id=3)
    assert contents(tier) == {"a", "ab"}
    tier.doubt([block(tier, "ab")], load_id=3, next_load_id=4)
    assert contents(tier) == {"a"}
    tier.check_integrity()


# Forgetting


def test_what_is_dropped_takes_its_descendants_along() -> None:
    tier = make_tier(10)
    store(tier, "abcd", "abxy", "pq")
    lost = [*blocks(tier, "abcd")[1:], *blocks(tier, "abxy")[2:]]
    tier.drop([block(tier, "ab")])
    assert contents(tier) == {"a", "p", "pq"}
    tier.check_integrity()
    # Empty blocks are used before anything else leaves.
    again = [begin(tier, name) for name in ("m", "mn", "mno", "mnop", "mnopq")]
    assert {new.block_id for new in lost} <= {new.block_id for new in again}
    assert contents(tier) == {"a", "p", "pq"}
    assert leave(tier) == ["a", "pq", "p"]


class Counting(list[Any]):
    """A list that counts the entries that it has been asked for."""

    num_visited = 0

    def __getitem__(self, index: Any) -> Any:
        self.num_visited += 1
        return super().__getitem__(index)

    def __iter__(self) -> Iterator[Any]:
        for entry in super().__iter__():
            self.num_visited += 1
            yield entry


@pytest.mark.parametrize("depth", [50, 200])
def test_a_drop_visits_each_block_a_few_times(depth: int) -> None:
    """However long the chains are that follow what is dropped: the scheduler waits for it."""
    tier = make_tier(800)
    chain = "".join(chr(ord("A") + place) for place in range(depth))
    store(tier, chain, "ABxyz")
    parents = tier.order.parents = Counting(tier.order.parents)
    tier.drop([block(tier, "A")])
    assert tier.num_lost == depth + 3
    assert parents.num_visited <= 3 * tier.num_blocks
    tier.check_integrity()


def test_dropped_blocks_stay_as_long_as_they_are_pinned() -> None:
    tier = make_tier(4)
    store(tier, "abc")
    pinned = blocks(tier, "abc")
    tier.pin(pinned)
    tier.drop(pinned[1:2])
    assert contents(tier) == {"a"}
    assert [held.ref_cnt for held in pinned] == [1, 1, 1]
    tier.check_integrity()
    new = begin(tier, "x")
    assert new not in pinned
    assert tier.allocate(1) == []
    tier.unpin(pinned)
    tier.check_integrity()
    assert {begin(tier, "y").block_id, begin(tier, "z").block_id} == {
        held.block_id for held in pinned[1:]
    }
    assert contents(tier) == {"a"}


def test_dropping_what_holds_nothing() -> None:
    tier = make_tier(4)
    store(tier, "a")
    held = begin(tier, "x")
    tier.drop([held, tier.pool.blocks[-1]])
    assert contents(tier) == {"a"}
    assert held.ref_cnt == 1
    tier.check_integrity()


def test_reset_forgets_everything_and_holds_what_is_held() -> None:
    tier = make_tier(6)
    store(tier, "abc", "x")
    pinned = blocks(tier, "ab")
    tier.pin(pinned)
    filling = begin(tier, "abcd")
    tier.reset()
    assert contents(tier) == set()
    assert tier.lookup.hit(hashes("abc"), 0, 100).num_tokens == 0
    assert [held.ref_cnt for held in (*pinned, filling)] == [1, 1, 1]
    assert tier.pool.get_num_free_blocks() == 3
    tier.check_integrity()
    tier.unpin([*pinned, filling])
    tier.check_integrity()
    assert tier.pool.get_num_free_blocks() == 6
    store(tier, "abc")  # and it goes on
    assert contents(tier) == {"a", "ab", "abc"}


def test_unpinned_chains_join_the_queue_tail_first() -> None:
    tier = make_tier(12)
    store(tier, "abcd", "abx", "q")
    one, other = blocks(tier, "abcd"), blocks(tier, "abx")
    tier.pin([*one, *other, block(tier, "q")])
    tier.unpin([*one, block(tier, "q")])  # the other still needs "ab"
    queue = tier.pool.free_block_queue
    assert names(queue.get_all_free_blocks())[-3:] == ["abcd", "abc", "q"]
    tier.unpin(other)
    assert names(queue.get_all_free_blocks())[-6:] == ["abcd", "abc", "q", "abx", "ab", "a"]
    tier.check_integrity()


def test_an_unpinned_block_joins_a_parent_that_is_free() -> None:
    tier = make_tier(12)
    store(tier, "abc", "q")
    tier.pin([block(tier, "abc")])
    tier.unpin([block(tier, "abc")])
    assert leave(tier) == ["abc", "ab", "a", "q"]
