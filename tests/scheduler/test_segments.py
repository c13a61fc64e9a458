"""The order of eviction: blocks that no request has found leave before found ones."""

from unittest.mock import patch

import pytest

from simple_offload.scheduler.tier import segmented_lru as segments
from simple_offload.scheduler.tier.cpu_tier import CpuTier
from simple_offload.scheduler.tier.eviction import EvictionOrder
from tests.scheduler.tiers import (
    allocate,
    begin,
    block,
    blocks,
    commit,
    commit_as,
    contents,
    hashes,
    hold,
    key,
    leave,
    make_tier,
    names,
    prefixes,
    protect,
    protect_first,
    refresh,
    store,
)
from tests.simulation.integrity import check_tier, pool_of


@pytest.fixture(autouse=True)
def _nothing_goes_back_with_evictions() -> object:
    """Evictions do not shrink the protected segment, except where a test patches this."""
    with patch.object(segments, "EVICTIONS_PER_RETURN", 1_000_000):
        yield


def find(tier: CpuTier, *chains: str) -> None:
    """Find the chains as a request that loads them."""
    for chain in chains:
        found = blocks(tier, chain)
        hold(tier, found)
        protect(tier, found)
        check_tier(tier)
        tier.unpin(found)
        check_tier(tier)


def protected(tier: CpuTier) -> list[str]:
    """Names of the protected free blocks, the next to leave first."""
    free = names(pool_of(tier).free_block_queue.get_all_free_blocks())
    return [name for name in free if name and tier._queue.is_protected[block(tier, name).block_id]]


def test_blocks_that_were_never_found_leave_first() -> None:
    tier = make_tier(12)
    store(tier, "ab", "pq")
    find(tier, "ab")
    store(tier, "xy")
    assert leave(tier) == ["pq", "p", "xy", "x", "ab", "a"]


def test_blocks_used_once_do_not_displace_found_ones() -> None:
    tier = make_tier(6)
    store(tier, "abc")
    find(tier, "abc")
    for chain in ("kl", "mn", "op", "qr", "st", "uv", "xy"):
        store(tier, chain)
    assert contents(tier) == {"a", "ab", "abc", "x", "xy", "u"}


def test_the_least_recently_found_blocks_leave_first_among_found_ones() -> None:
    tier = make_tier(12)
    store(tier, "ab", "pq", "xy")
    find(tier, "ab", "xy", "pq", "xy")
    assert leave(tier) == ["ab", "a", "pq", "p", "xy", "x"]


def test_a_new_tail_is_on_probation() -> None:
    tier = make_tier(12)
    store(tier, "ab", "pq")
    find(tier, "ab")
    store(tier, "abcd")
    assert protected(tier) == ["ab", "a"]
    assert leave(tier) == ["pq", "p", "abcd", "abc", "ab", "a"]


def test_a_tail_is_protected_once_it_is_found() -> None:
    tier = make_tier(12)
    store(tier, "ab", "pq")
    find(tier, "ab")
    store(tier, "abcd")
    find(tier, "abcd")
    assert leave(tier) == ["pq", "p", "abcd", "abc", "ab", "a"]
    assert not tier._queue.num_protected


def test_blocks_beyond_the_limit_return_to_probation_as_the_most_recently_used() -> None:
    """Half of the tier may be protected."""
    tier = make_tier(10)
    store(tier, "abcd", "xy", "pq")
    find(tier, "abcd", "xy")
    assert protected(tier) == ["abc", "ab", "a", "xy", "x"]
    assert leave(tier) == ["pq", "p", "abcd", "abc", "ab", "a", "xy", "x"]


def test_held_blocks_do_not_return_to_probation() -> None:
    tier = make_tier(6)
    store(tier, "abcd", "xy")
    held = blocks(tier, "abcd")
    hold(tier, held)
    protect(tier, held)
    check_tier(tier)
    assert tier._queue.num_protected == 4
    find(tier, "xy")
    assert protected(tier) == []
    tier.unpin(held)
    check_tier(tier)
    assert protected(tier) == ["abc", "ab", "a"]


def test_with_evictions_blocks_that_are_not_found_again_return_to_probation() -> None:
    tier = make_tier(8)
    store(tier, "abcd", "wxyz")
    find(tier, "abcd")
    with patch.object(segments, "EVICTIONS_PER_RETURN", 2):
        store(tier, "p", "q", "r")
        assert protected(tier) == ["abc", "ab", "a"]
        store(tier, "s")
        assert protected(tier) == ["ab", "a"]
        store(tier, "t", "u", "k", "l")
        assert protected(tier) == []
        store(tier, *"mnopqrst")
    check_tier(tier)
    assert not contents(tier) & set(prefixes("abcd"))


def test_protected_blocks_leave_when_no_others_are_there() -> None:
    tier = make_tier(6)
    store(tier, "ab", "pqxy")
    find(tier, "ab")
    store(tier, "klmno")
    assert contents(tier) == {*prefixes("klmno"), "a"}
    assert tier._queue.num_protected == 1


@pytest.mark.parametrize("pinned", ["a", "ab", "abc"])
def test_the_boundary_may_be_held(pinned: str) -> None:
    tier = make_tier(12)
    store(tier, "abc", "xy", "pq")
    find(tier, "abc", "xy")
    held = blocks(tier, pinned)
    hold(tier, held)
    check_tier(tier)
    store(tier, "k")
    tier.unpin(held)
    check_tier(tier)
    assert leave(tier)[:3] == ["pq", "p", "k"]


def test_all_protected_blocks_may_be_held() -> None:
    tier = make_tier(12)
    store(tier, "abc", "pq")
    find(tier, "abc")
    held = blocks(tier, "abc")
    hold(tier, held)
    check_tier(tier)
    store(tier, "abcd", "xy")
    tier.unpin(held)
    check_tier(tier)
    assert leave(tier) == ["pq", "p", "abcd", "xy", "x", "abc", "ab", "a"]


@pytest.mark.parametrize("num_found", range(5))
def test_found_blocks_are_protected(num_found: int) -> None:
    tier = make_tier(16)
    store(tier, "abcd", "pq", "xy")
    find(tier, "xy")
    refresh(tier, hashes("abcd"), 0, 4)
    protect_first(tier, hashes("abcd"), 0, num_found)
    check_tier(tier)
    assert protected(tier) == ["xy", "x", *prefixes("abcd")[:num_found][::-1]]
    tails = prefixes("abcd")[num_found:][::-1]
    assert leave(tier) == ["pq", "p", *tails, "xy", "x", *prefixes("abcd")[:num_found][::-1]]


def test_newly_protected_blocks_join_their_parents() -> None:
    tier = make_tier(16)
    store(tier, "abcd", "pq")
    find(tier, "ab", "pq")
    protect_first(tier, hashes("abcd"), 0, 3)
    check_tier(tier)
    assert leave(tier) == ["abcd", "abc", "ab", "a", "pq", "p"]


@pytest.mark.parametrize("num_found", [0, 2])
def test_refresh_moves_a_piece_in_each_segment(
    num_found: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The queue does not visit each block of a long prefix that was found before."""
    tier = make_tier(16)
    store(tier, "ab", "xy")
    find(tier, "ab", "xy")
    store(tier, "abcd", "pq")
    monkeypatch.setattr(EvictionOrder, "renew_chain", None)
    refresh(tier, hashes("abcd"), 0, 4)
    protect_first(tier, hashes("abcd"), 0, num_found)
    check_tier(tier)
    assert leave(tier) == ["pq", "p", "abcd", "abc", "xy", "x", "ab", "a"]


def test_refresh_of_the_only_chain() -> None:
    tier = make_tier(8)
    store(tier, "ab")
    find(tier, "ab")
    store(tier, "abcd")
    refresh(tier, hashes("abcd"), 0, 4)
    protect_first(tier, hashes("abcd"), 0, 2)
    check_tier(tier)
    assert protected(tier) == ["ab", "a"]
    assert leave(tier) == ["abcd", "abc", "ab", "a"]


@pytest.mark.proves("I9")
def test_refresh_of_more_than_may_be_protected() -> None:
    """A block that returns to probation stands before its parent and after its child."""
    tier = make_tier(8)
    store(tier, "abcdef", "xy")
    refresh(tier, hashes("abcdef"), 0, 6)
    protect_first(tier, hashes("abcdef"), 0, 5)
    check_tier(tier)
    assert protected(tier) == ["abcd", "abc", "ab", "a"]
    assert leave(tier) == ["xy", "x", *prefixes("abcdef")[::-1]]


def test_dropped_blocks_are_not_protected() -> None:
    tier = make_tier(10)
    store(tier, "abc", "xy")
    find(tier, "abc", "xy")
    tier.drop(blocks(tier, "abc")[1:2])
    check_tier(tier)
    assert protected(tier) == ["a", "xy", "x"]


def test_blocks_dropped_while_held_are_not_protected_either() -> None:
    tier = make_tier(10)
    store(tier, "abc")
    held = blocks(tier, "abc")
    hold(tier, held)
    protect(tier, held)
    tier.drop(held[1:2])
    check_tier(tier)
    tier.unpin(held)
    check_tier(tier)
    assert protected(tier) == ["a"]


def test_the_boundary_is_reset_too() -> None:
    tier = make_tier(8)
    store(tier, "abc", "xy")
    find(tier, "abc")
    tier.reset()
    check_tier(tier)
    store(tier, "pq")
    assert leave(tier) == ["pq", "p"]


def test_a_chain_in_both_segments_that_is_torn() -> None:
    tier = make_tier(12)
    store(tier, "abcd", "abcxy", "abcdef", "pq")
    find(tier, "ab")
    refresh(tier, hashes("abcdef"), 0, 6)
    check_tier(tier)
    assert protected(tier) == ["ab", "a"]
    assert leave(tier) == [
        *["abcxy", "abcx", "pq", "p"],
        *["abcdef", "abcde", "abcd", "abc", "ab", "a"],
    ]


def test_nothing_is_protected_after_a_reset() -> None:
    tier = make_tier(8)
    store(tier, "abc", "xy")
    find(tier, "abc")
    held = blocks(tier, "abc")
    hold(tier, held)
    tier.reset()
    check_tier(tier)
    tier.unpin(held)
    check_tier(tier)
    assert tier._queue.num_protected == 0
    store(tier, "pq")
    assert leave(tier) == ["pq", "p"]


def test_a_larger_tier_protects_more() -> None:
    tier = make_tier(4)
    store(tier, "abcd")
    find(tier, "abcd")
    assert protected(tier) == ["ab", "a"]
    tier.grow(9)
    check_tier(tier)
    find(tier, "abcd")
    assert protected(tier) == ["abcd", "abc", "ab", "a"]


def test_the_parent_of_a_found_block_is_protected() -> None:
    """The parent is stored after its child. A request has found that child, with the parent on the
    device."""
    tier = make_tier(8)
    early = allocate(tier)
    assert early is not None
    assert commit_as(tier, early, key("ab"), key("a"), 8, early=True)
    find_alone = [block(tier, "ab")]
    hold(tier, find_alone)
    tier._queue.protect(find_alone)
    tier.unpin(find_alone)
    store(tier, "x")
    assert commit(tier, begin(tier, "a"), "a")
    check_tier(tier)
    assert leave(tier) == ["x", "ab", "a"]


def test_promoted_blocks_are_protected() -> None:
    """Only loaded blocks are demoted."""
    tier = make_tier(6)
    store(tier, "pq", "ab", "xy")
    find(tier, "ab")
    tier.demote(blocks(tier, "ab"))
    check_tier(tier)
    assert protected(tier) == []
    tier.promote([key("ab")])
    check_tier(tier)
    assert protected(tier) == ["ab", "a"]
    assert leave(tier) == ["pq", "p", "xy", "x", "ab", "a"]
