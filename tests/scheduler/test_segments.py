"""The order of eviction: what no request has found leaves before what one has."""

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
    key,
    leave,
    make_tier,
    names,
    prefixes,
    store,
)


@pytest.fixture(autouse=True)
def _nothing_goes_back_with_evictions() -> object:
    """But where a test says so."""
    with patch.object(segments, "EVICTIONS_PER_RETURN", 1_000_000):
        yield


def find(tier: CpuTier, *chains: str) -> None:
    """As a request does that loads the chain."""
    for chain in chains:
        found = blocks(tier, chain)
        tier.pin(found)
        tier.protect(found)
        tier.check_integrity()
        tier.unpin(found)
        tier.check_integrity()


def protected(tier: CpuTier) -> list[str]:
    """What is protected and free, next to leave first."""
    free = names(tier.pool.free_block_queue.get_all_free_blocks())
    return [name for name in free if name and tier.order.is_protected(block(tier, name))]


def test_what_was_never_found_leaves_first() -> None:
    tier = make_tier(12)
    store(tier, "ab", "pq")
    find(tier, "ab")
    store(tier, "xy")
    assert leave(tier) == ["pq", "p", "xy", "x", "ab", "a"]


def test_what_passes_through_displaces_nothing_that_was_found() -> None:
    tier = make_tier(6)
    store(tier, "abc")
    find(tier, "abc")
    for chain in ("kl", "mn", "op", "qr", "st", "uv", "xy"):
        store(tier, chain)
    assert contents(tier) == {"a", "ab", "abc", "x", "xy", "u"}


def test_the_least_recently_found_leaves_first_of_what_was_found() -> None:
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
    assert not tier.order.segments.num_protected


def test_too_much_goes_back_on_probation_as_the_most_recently_used() -> None:
    """Half of the tier may be protected."""
    tier = make_tier(10)
    store(tier, "abcd", "xy", "pq")
    find(tier, "abcd", "xy")
    assert protected(tier) == ["abc", "ab", "a", "xy", "x"]
    assert leave(tier) == ["pq", "p", "abcd", "abc", "ab", "a", "xy", "x"]


def test_what_is_held_does_not_go_back() -> None:
    tier = make_tier(6)
    store(tier, "abcd", "xy")
    held = blocks(tier, "abcd")
    tier.pin(held)
    tier.protect(held)
    tier.check_integrity()
    assert tier.order.segments.num_protected == 4
    find(tier, "xy")
    assert protected(tier) == []
    tier.unpin(held)
    tier.check_integrity()
    assert protected(tier) == ["abc", "ab", "a"]


def test_evictions_let_what_is_not_found_again_go_back() -> None:
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
    tier.check_integrity()
    assert not contents(tier) & set(prefixes("abcd"))


def test_what_is_protected_leaves_when_nothing_else_is_there() -> None:
    tier = make_tier(6)
    store(tier, "ab", "pqxy")
    find(tier, "ab")
    store(tier, "klmno")
    assert contents(tier) == {*prefixes("klmno"), "a"}
    assert tier.order.segments.num_protected == 1


@pytest.mark.parametrize("part", ["a", "ab", "abc"])
def test_the_boundary_may_be_held(part: str) -> None:
    tier = make_tier(12)
    store(tier, "abc", "xy", "pq")
    find(tier, "abc", "xy")
    held = blocks(tier, part)
    tier.pin(held)
    tier.check_integrity()
    store(tier, "k")
    tier.unpin(held)
    tier.check_integrity()
    assert leave(tier)[:3] == ["pq", "p", "k"]


def test_all_that_is_protected_may_be_held() -> None:
    tier = make_tier(12)
    store(tier, "abc", "pq")
    find(tier, "abc")
    held = blocks(tier, "abc")
    tier.pin(held)
    tier.check_integrity()
    store(tier, "abcd", "xy")
    tier.unpin(held)
    tier.check_integrity()
    assert leave(tier) == ["pq", "p", "abcd", "xy", "x", "abc", "ab", "a"]


@pytest.mark.parametrize("num_found", range(5))
def test_what_was_found_is_protected(num_found: int) -> None:
    tier = make_tier(16)
    store(tier, "abcd", "pq", "xy")
    find(tier, "xy")
    tier.refresh(hashes("abcd"), 0, 4)
    tier.protect_first(hashes("abcd"), 0, num_found)
    tier.check_integrity()
    assert protected(tier) == ["xy", "x", *prefixes("abcd")[:num_found][::-1]]
    tails = prefixes("abcd")[num_found:][::-1]
    assert leave(tier) == ["pq", "p", *tails, "xy", "x", *prefixes("abcd")[:num_found][::-1]]


def test_what_is_protected_besides_joins_what_precedes_it() -> None:
    tier = make_tier(16)
    store(tier, "abcd", "pq")
    find(tier, "ab", "pq")
    tier.protect_first(hashes("abcd"), 0, 3)
    tier.check_integrity()
    assert leave(tier) == ["abcd", "abc", "ab", "a", "pq", "p"]


@pytest.mark.parametrize("num_found", [0, 2])
def test_refresh_moves_a_piece_in_each_segment(
    num_found: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No block of a long prefix is touched that was found before."""
    tier = make_tier(16)
    store(tier, "ab", "xy")
    find(tier, "ab", "xy")
    store(tier, "abcd", "pq")
    monkeypatch.setattr(EvictionOrder, "renew_chain", None)
    tier.refresh(hashes("abcd"), 0, 4)
    tier.protect_first(hashes("abcd"), 0, num_found)
    tier.check_integrity()
    assert leave(tier) == ["pq", "p", "abcd", "abc", "xy", "x", "ab", "a"]


def test_refresh_of_what_is_the_only_one() -> None:
    tier = make_tier(8)
    store(tier, "ab")
    find(tier, "ab")
    store(tier, "abcd")
    tier.refresh(hashes("abcd"), 0, 4)
    tier.protect_first(hashes("abcd"), 0, 2)
    tier.check_integrity()
    assert protected(tier) == ["ab", "a"]
    assert leave(tier) == ["abcd", "abc", "ab", "a"]


@pytest.mark.proves("I9")
def test_refresh_of_more_than_may_be_protected() -> None:
    """What goes back stands before its parent, and after its child."""
    tier = make_tier(8)
    store(tier, "abcdef", "xy")
    tier.refresh(hashes("abcdef"), 0, 6)
    tier.protect_first(hashes("abcdef"), 0, 5)
    tier.check_integrity()
    assert protected(tier) == ["abcd", "abc", "ab", "a"]
    assert leave(tier) == ["xy", "x", *prefixes("abcdef")[::-1]]


def test_what_is_lost_is_not_protected() -> None:
    tier = make_tier(10)
    store(tier, "abc", "xy")
    find(tier, "abc", "xy")
    tier.drop(blocks(tier, "abc")[1:2])
    tier.check_integrity()
    assert protected(tier) == ["a", "xy", "x"]


def test_what_is_lost_while_it_is_held_is_not_protected_either() -> None:
    tier = make_tier(10)
    store(tier, "abc")
    held = blocks(tier, "abc")
    tier.pin(held)
    tier.protect(held)
    tier.drop(held[1:2])
    tier.check_integrity()
    tier.unpin(held)
    tier.check_integrity()
    assert protected(tier) == ["a"]


def test_the_boundary_is_reset_too() -> None:
    tier = make_tier(8)
    store(tier, "abc", "xy")
    find(tier, "abc")
    tier.reset()
    tier.check_integrity()
    store(tier, "pq")
    assert leave(tier) == ["pq", "p"]


def test_a_chain_in_both_segments_that_is_torn() -> None:
    tier = make_tier(12)
    store(tier, "abcd", "abcxy", "abcdef", "pq")
    find(tier, "ab")
    tier.refresh(hashes("abcdef"), 0, 6)
    tier.check_integrity()
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
    tier.pin(held)
    tier.reset()
    tier.check_integrity()
    tier.unpin(held)
    tier.check_integrity()
    assert tier.order.segments.num_protected == 0
    store(tier, "pq")
    assert leave(tier) == ["pq", "p"]


def test_a_larger_tier_protects_more() -> None:
    tier = make_tier(4)
    store(tier, "abcd")
    find(tier, "abcd")
    assert protected(tier) == ["ab", "a"]
    tier.grow(9)
    tier.check_integrity()
    find(tier, "abcd")
    assert protected(tier) == ["abcd", "abc", "ab", "a"]


def test_what_comes_before_something_found_is_protected() -> None:
    """The parent comes to the tier after its child, which a request has found with the parent on
    the device."""
    tier = make_tier(8)
    early = allocate(tier)
    assert early is not None
    assert commit_as(tier, early, key("ab"), key("a"), 8, early=True)
    find_alone = [block(tier, "ab")]
    tier.pin(find_alone)
    tier.order.segments.protect(find_alone)
    tier.unpin(find_alone)
    store(tier, "x")
    assert commit(tier, begin(tier, "a"), "a")
    tier.check_integrity()
    assert leave(tier) == ["x", "ab", "a"]


def test_what_comes_back_from_being_demoted_is_protected() -> None:
    """Only what has been loaded is ever demoted."""
    tier = make_tier(6)
    store(tier, "pq", "ab", "xy")
    find(tier, "ab")
    tier.demote(blocks(tier, "ab"))
    tier.check_integrity()
    assert protected(tier) == []
    tier.promote(key("ab"))
    tier.check_integrity()
    assert protected(tier) == ["ab", "a"]
    assert leave(tier) == ["pq", "p", "xy", "x", "ab", "a"]
