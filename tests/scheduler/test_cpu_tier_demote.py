"""CpuTier: what the device has too may leave first, and come back before the device loses it."""

import pytest

from simple_offload.scheduler.tier.cpu_tier import CpuTier
from tests.scheduler.tiers import (
    begin,
    block,
    blocks,
    commit,
    contents,
    hashes,
    key,
    leave,
    make_tier,
    snapshot,
    store,
)


def full_tier(*chains: str) -> CpuTier:
    """A tier with just enough room for these chains, stored in this order."""
    count = len({chain[:end] for chain in chains for end in range(1, len(chain) + 1)})
    tier = make_tier(count)
    store(tier, *chains)
    return tier


def demote(tier: CpuTier, chain: str) -> None:
    tier.demote(blocks(tier, chain))
    tier.check_integrity()


def test_it_leaves_first_and_its_tail_before_its_head() -> None:
    tier = full_tier("abc", "xyz")
    demote(tier, "xyz")
    assert tier.lookup.hit(hashes("xyz"), 0, 100).num_tokens == 12
    assert leave(tier) == ["xyz", "xy", "x", "abc", "ab", "a"]
    tier.check_integrity()


def test_what_was_demoted_last_leaves_first() -> None:
    tier = full_tier("pq", "abc", "xy")
    demote(tier, "abc")
    demote(tier, "xy")
    assert leave(tier) == ["xy", "x", "abc", "ab", "a", "pq", "p"]


@pytest.mark.proves("I9")
def test_what_others_follow_stays() -> None:
    tier = full_tier("abx", "aby")
    demote(tier, "aby")
    assert leave(tier) == ["aby", "abx", "ab", "a"]


def test_a_chain_of_which_more_is_there_stays() -> None:
    tier = full_tier("xy", "abc")
    before = snapshot(tier)
    demote(tier, "ab")
    assert snapshot(tier) == before


def test_what_somebody_holds_stays_and_what_is_before_it() -> None:
    tier = full_tier("xy", "abc")
    tier.pin([block(tier, "abc")])
    before = snapshot(tier)
    demote(tier, "abc")
    assert snapshot(tier) == before


def test_nothing_moves_while_there_are_blocks_that_hold_nothing() -> None:
    tier = make_tier(6)
    store(tier, "xy", "abc")
    before = snapshot(tier)
    demote(tier, "abc")
    assert snapshot(tier) == before


def test_a_block_named_twice_is_moved_once() -> None:
    tier = full_tier("xy", "abc")
    tier.demote([*blocks(tier, "abc"), block(tier, "abc")])
    tier.check_integrity()
    assert leave(tier) == ["abc", "ab", "a", "xy", "x"]


def test_promoted_it_is_the_most_recently_used() -> None:
    tier = full_tier("abc", "xyz")
    demote(tier, "abc")
    tier.promote(key("abc"))
    tier.check_integrity()
    assert leave(tier) == ["xyz", "xy", "x", "abc", "ab", "a"]


def test_what_is_not_demoted_is_not_promoted() -> None:
    tier = full_tier("abc", "xyz", "p")
    demote(tier, "p")
    before = snapshot(tier)
    tier.promote(key("abc"))
    tier.promote(key("not there"))
    assert snapshot(tier) == before


def test_what_follows_it_brings_it_back() -> None:
    tier = full_tier("xyz", "pq", "ab")
    new = begin(tier, "abc")  # takes the place of "xyz"
    demote(tier, "ab")
    assert commit(tier, new, "abc")
    tier.check_integrity()
    assert leave(tier) == ["xy", "x", "pq", "p", "abc", "ab", "a"]


def test_what_is_used_is_demoted_no_more() -> None:
    tier = full_tier("ab", "xy")
    demote(tier, "ab")
    held = blocks(tier, "ab")
    tier.pin(held)
    tier.check_integrity()
    tier.unpin(held)
    tier.check_integrity()
    assert leave(tier) == ["xy", "x", "ab", "a"]


def test_a_refreshed_chain_leaves_its_demoted_tail_where_it_is() -> None:
    tier = full_tier("abx", "aby", "pq")
    demote(tier, "aby")
    tier.refresh(hashes("aby"), 0, 3)
    tier.check_integrity()
    assert leave(tier) == ["aby", "abx", "pq", "p", "ab", "a"]


def test_nothing_is_remembered_of_what_has_left() -> None:
    tier = full_tier("abc", "xy")
    demote(tier, "abc")
    tier.drop(blocks(tier, "abc")[1:])
    tier.check_integrity()
    assert contents(tier) == {"a", "x", "xy"}
    tier.reset()
    tier.check_integrity()
    assert not tier.order.demoted
    assert not tier.order.num_followers
