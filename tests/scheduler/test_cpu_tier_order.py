"""CpuTier: the tail of a prefix leaves before its head, whatever came first."""

import pytest

from tests.scheduler.tiers import (
    begin,
    blocks,
    commit,
    contents,
    hashes,
    leave,
    make_tier,
    prefixes,
    store,
)


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


def test_tail_first_when_another_chain_came_between() -> None:
    tier = make_tier(8)
    store(tier, "ab", "xy", "abcd", "xyz")
    assert leave(tier) == [*tail_first("abcd"), *tail_first("xyz")]


def test_tail_first_when_parts_are_under_way_together() -> None:
    """Two transfers of one chain: the second is allocated before the first is committed."""
    tier = make_tier(6)
    store(tier, "ab")
    first = [begin(tier, "abc"), begin(tier, "abcd")]
    second = [begin(tier, "abcde"), begin(tier, "abcdef")]
    for filled, name in zip([*first, *second], prefixes("abcdef")[2:], strict=True):
        assert commit(tier, filled, name)
        tier.check_integrity()
    assert leave(tier) == tail_first("abcdef")


@pytest.mark.proves("I9")
def test_branches_leave_before_the_head_that_they_share() -> None:
    tier = make_tier(7)
    store(tier, "abcx", "abcy", "abcyz")
    assert leave(tier) == ["abcx", "abcyz", "abcy", "abc", "ab", "a"]


def test_the_branch_that_was_used_last_stays_longer() -> None:
    tier = make_tier(7)
    store(tier, "abxx", "abyy")
    tier.refresh(hashes("abxx"), 0, 4)
    tier.check_integrity()
    assert leave(tier) == ["abyy", "aby", "abxx", "abx", "ab", "a"]


@pytest.mark.parametrize("part", ["a", "ab", "abc", "abcd"])
def test_a_pinned_part_stays_and_falls_into_line_afterwards(part: str) -> None:
    tier = make_tier(4)
    store(tier, "abcd")
    pinned = blocks(tier, part)
    tier.pin(pinned)
    tier.check_integrity()
    tier.unpin(pinned)
    tier.check_integrity()
    assert leave(tier) == tail_first("abcd")


@pytest.mark.parametrize("part", ["a", "ab", "abc", "abcd"])
def test_what_is_pinned_does_not_leave(part: str) -> None:
    tier = make_tier(4)
    store(tier, "abcd")
    tier.pin(blocks(tier, part))
    assert leave(tier) == tail_first("abcd")[: 4 - len(part)]
    assert contents(tier) == set(prefixes(part))


def test_each_pin_holds_on_its_own() -> None:
    tier = make_tier(4)
    store(tier, "abcd")
    short, long = blocks(tier, "ab"), blocks(tier, "abcd")
    tier.pin(short)
    tier.pin(long)
    tier.unpin(long)
    tier.check_integrity()
    assert tier.pool.get_num_free_blocks() == 2
    tier.unpin(short)
    tier.check_integrity()
    assert leave(tier) == tail_first("abcd")


def test_the_chain_that_was_pinned_last_stays_longest() -> None:
    tier = make_tier(6)
    store(tier, "abc", "xyz")
    pinned = blocks(tier, "abc")
    tier.pin(pinned)
    tier.unpin(pinned)
    tier.check_integrity()
    assert leave(tier) == [*tail_first("xyz"), *tail_first("abc")]


def test_refresh_makes_a_chain_the_most_recently_used() -> None:
    tier = make_tier(9)
    store(tier, "abc", "pqr", "xyz")
    tier.refresh(hashes("abc"), 0, 3)
    tier.check_integrity()
    assert leave(tier) == [*tail_first("pqr"), *tail_first("xyz"), *tail_first("abc")]


def test_refresh_goes_as_far_as_the_chain_does() -> None:
    tier = make_tier(6)
    store(tier, "abc", "xyz")
    tier.refresh(hashes("abpq"), 0, 4)
    tier.check_integrity()
    # Without its head "abc" is worth nothing, but the head goes on being worth something.
    assert leave(tier) == ["abc", *tail_first("xyz"), "ab", "a"]


def test_refresh_of_what_is_not_there() -> None:
    tier = make_tier(6)
    store(tier, "abc", "xyz")
    tier.refresh(hashes("pqr"), 0, 3)
    tier.refresh([], 0, 0)
    tier.check_integrity()
    assert leave(tier) == [*tail_first("abc"), *tail_first("xyz")]


def test_refresh_of_what_is_pinned() -> None:
    tier = make_tier(6)
    store(tier, "abc", "xyz")
    pinned = blocks(tier, "ab")
    tier.pin(pinned)
    tier.refresh(hashes("abc"), 0, 3)
    tier.check_integrity()
    assert [held.ref_cnt for held in pinned] == [1, 1]
    tier.unpin(pinned)
    tier.check_integrity()
    assert leave(tier) == [*tail_first("xyz"), *tail_first("abc")]


def test_a_block_that_comes_back_finds_its_place() -> None:
    tier = make_tier(4)
    store(tier, "abcd")
    other = begin(tier, "x")
    tier.unpin([other])
    assert contents(tier) == {"a", "ab", "abc"}
    store(tier, "abcd")
    assert leave(tier) == tail_first("abcd")
