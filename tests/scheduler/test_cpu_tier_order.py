"""CpuTier: the tail of a prefix leaves before its head, in any order of stores."""

import pytest

from tests.scheduler.tiers import (
    begin,
    blocks,
    commit,
    contents,
    hashes,
    hold,
    leave,
    make_tier,
    prefixes,
    refresh,
    store,
)
from tests.simulation.integrity import check_tier, pool_of


def tail_first(chain: str) -> list[str]:
    return prefixes(chain)[::-1]


@pytest.mark.proves("I9")
def test_tail_first() -> None:
    tier = make_tier(4)
    store(tier, "abcd")
    assert leave(tier) == tail_first("abcd")


def test_tail_first_when_a_chain_grew_over_several_transfers() -> None:
    tier = make_tier(6)
    store(tier, "ab", "abc", "abcdef")
    assert leave(tier) == tail_first("abcdef")


def test_tail_first_with_another_chain_stored_between() -> None:
    tier = make_tier(8)
    store(tier, "ab", "xy", "abcd", "xyz")
    assert leave(tier) == [*tail_first("abcd"), *tail_first("xyz")]


def test_tail_first_with_two_transfers_under_way() -> None:
    """Two stores of one chain: the second is allocated before the first is committed."""
    tier = make_tier(6)
    store(tier, "ab")
    first = [begin(tier, "abc"), begin(tier, "abcd")]
    second = [begin(tier, "abcde"), begin(tier, "abcdef")]
    for filled, name in zip([*first, *second], prefixes("abcdef")[2:], strict=True):
        assert commit(tier, filled, name)
        check_tier(tier)
    assert leave(tier) == tail_first("abcdef")


@pytest.mark.proves("I9")
def test_branches_leave_before_the_head_that_they_share() -> None:
    tier = make_tier(7)
    store(tier, "abcx", "abcy", "abcyz")
    assert leave(tier) == ["abcx", "abcyz", "abcy", "abc", "ab", "a"]


def test_the_branch_used_last_stays_longer() -> None:
    tier = make_tier(7)
    store(tier, "abxx", "abyy")
    refresh(tier, hashes("abxx"), 0, 4)
    check_tier(tier)
    assert leave(tier) == ["abyy", "aby", "abxx", "abx", "ab", "a"]


@pytest.mark.parametrize("prefix", ["a", "ab", "abc", "abcd"])
def test_unpinned_blocks_return_to_their_places(prefix: str) -> None:
    tier = make_tier(4)
    store(tier, "abcd")
    pinned = blocks(tier, prefix)
    hold(tier, pinned)
    check_tier(tier)
    tier.unpin(pinned)
    check_tier(tier)
    assert leave(tier) == tail_first("abcd")


@pytest.mark.parametrize("prefix", ["a", "ab", "abc", "abcd"])
def test_pinned_blocks_do_not_leave(prefix: str) -> None:
    tier = make_tier(4)
    store(tier, "abcd")
    hold(tier, blocks(tier, prefix))
    assert leave(tier) == tail_first("abcd")[: 4 - len(prefix)]
    assert contents(tier) == set(prefixes(prefix))


def test_pins_are_counted() -> None:
    tier = make_tier(4)
    store(tier, "abcd")
    short, long = blocks(tier, "ab"), blocks(tier, "abcd")
    hold(tier, short)
    hold(tier, long)
    tier.unpin(long)
    check_tier(tier)
    assert pool_of(tier).get_num_free_blocks() == 2
    tier.unpin(short)
    check_tier(tier)
    assert leave(tier) == tail_first("abcd")


def test_the_chain_that_was_pinned_last_stays_longest() -> None:
    tier = make_tier(6)
    store(tier, "abc", "xyz")
    pinned = blocks(tier, "abc")
    hold(tier, pinned)
    tier.unpin(pinned)
    check_tier(tier)
    assert leave(tier) == [*tail_first("xyz"), *tail_first("abc")]


def test_refresh_makes_a_chain_the_most_recently_used() -> None:
    tier = make_tier(9)
    store(tier, "abc", "pqr", "xyz")
    refresh(tier, hashes("abc"), 0, 3)
    check_tier(tier)
    assert leave(tier) == [*tail_first("pqr"), *tail_first("xyz"), *tail_first("abc")]


def test_refresh_goes_as_far_as_the_chain_does() -> None:
    tier = make_tier(6)
    store(tier, "abc", "xyz")
    refresh(tier, hashes("abpq"), 0, 4)
    check_tier(tier)
    # The request has "ab", and not "abc".
    assert leave(tier) == ["abc", *tail_first("xyz"), "ab", "a"]


def test_refresh_of_an_absent_chain() -> None:
    tier = make_tier(6)
    store(tier, "abc", "xyz")
    refresh(tier, hashes("pqr"), 0, 3)
    refresh(tier, [], 0, 0)
    check_tier(tier)
    assert leave(tier) == [*tail_first("abc"), *tail_first("xyz")]


def test_refresh_of_pinned_blocks() -> None:
    tier = make_tier(6)
    store(tier, "abc", "xyz")
    pinned = blocks(tier, "ab")
    hold(tier, pinned)
    refresh(tier, hashes("abc"), 0, 3)
    check_tier(tier)
    assert [held.ref_cnt for held in pinned] == [1, 1]
    tier.unpin(pinned)
    check_tier(tier)
    assert leave(tier) == [*tail_first("xyz"), *tail_first("abc")]


def test_a_block_that_is_stored_again_leaves_first() -> None:
    tier = make_tier(4)
    store(tier, "abcd")
    other = begin(tier, "x")
    tier.unpin([other])
    assert contents(tier) == {"a", "ab", "abc"}
    store(tier, "abcd")
    assert leave(tier) == tail_first("abcd")
