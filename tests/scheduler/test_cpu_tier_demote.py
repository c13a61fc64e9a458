"""CpuTier: demotes blocks that the device also has, and promotes them before the device evicts
them."""

import pytest

from simple_offload.scheduler.tier.cpu_tier import CpuTier
from tests.scheduler.tiers import (
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
    refresh,
    snapshot,
    store,
)
from tests.simulation.integrity import check_tier


def full_tier(*chains: str) -> CpuTier:
    """A tier with just enough room for these chains, stored in this order."""
    count = len({chain[:end] for chain in chains for end in range(1, len(chain) + 1)})
    tier = make_tier(count)
    store(tier, *chains)
    return tier


def demote(tier: CpuTier, chain: str) -> None:
    tier.demote(blocks(tier, chain))
    check_tier(tier)


def test_a_demoted_chain_leaves_first_tail_before_head() -> None:
    tier = full_tier("abc", "xyz")
    demote(tier, "xyz")
    assert tier.lookup(hashes("xyz"), 0, 100).num_tokens == 12
    assert leave(tier) == ["xyz", "xy", "x", "abc", "ab", "a"]
    check_tier(tier)


def test_the_chain_demoted_last_leaves_first() -> None:
    tier = full_tier("pq", "abc", "xy")
    demote(tier, "abc")
    demote(tier, "xy")
    assert leave(tier) == ["xy", "x", "abc", "ab", "a", "pq", "p"]


@pytest.mark.proves("I9")
def test_a_block_with_another_child_stays() -> None:
    tier = full_tier("abx", "aby")
    demote(tier, "aby")
    assert leave(tier) == ["aby", "abx", "ab", "a"]


def test_a_chain_with_a_longer_tail_stays() -> None:
    tier = full_tier("xy", "abc")
    before = snapshot(tier)
    demote(tier, "ab")
    assert snapshot(tier) == before


def test_a_pinned_block_and_its_ancestors_stay() -> None:
    tier = full_tier("xy", "abc")
    hold(tier, [block(tier, "abc")])
    before = snapshot(tier)
    demote(tier, "abc")
    assert snapshot(tier) == before


def test_demote_has_no_effect_while_the_tier_has_empty_blocks() -> None:
    tier = make_tier(6)
    store(tier, "xy", "abc")
    before = snapshot(tier)
    demote(tier, "abc")
    assert snapshot(tier) == before


def test_a_block_named_twice_is_moved_once() -> None:
    tier = full_tier("xy", "abc")
    tier.demote([*blocks(tier, "abc"), block(tier, "abc")])
    check_tier(tier)
    assert leave(tier) == ["abc", "ab", "a", "xy", "x"]


def test_a_promoted_chain_is_the_most_recently_used() -> None:
    tier = full_tier("abc", "xyz")
    demote(tier, "abc")
    tier.promote([key("abc")])
    check_tier(tier)
    assert leave(tier) == ["xyz", "xy", "x", "abc", "ab", "a"]


def test_promote_has_no_effect_on_other_blocks() -> None:
    tier = full_tier("abc", "xyz", "p")
    demote(tier, "p")
    before = snapshot(tier)
    tier.promote([key("abc")])
    tier.promote([key("not there")])
    assert snapshot(tier) == before


def test_a_new_child_renews_its_demoted_ancestors() -> None:
    tier = full_tier("xyz", "pq", "ab")
    new = begin(tier, "abc")  # evicts "xyz"
    demote(tier, "ab")
    assert commit(tier, new, "abc")
    check_tier(tier)
    assert leave(tier) == ["xy", "x", "pq", "p", "abc", "ab", "a"]


def test_a_pinned_chain_is_no_longer_demoted() -> None:
    tier = full_tier("ab", "xy")
    demote(tier, "ab")
    held = blocks(tier, "ab")
    hold(tier, held)
    check_tier(tier)
    tier.unpin(held)
    check_tier(tier)
    assert leave(tier) == ["xy", "x", "ab", "a"]


def test_a_refreshed_chain_leaves_its_demoted_tail_where_it_is() -> None:
    tier = full_tier("abx", "aby", "pq")
    demote(tier, "aby")
    refresh(tier, hashes("aby"), 0, 3)
    check_tier(tier)
    assert leave(tier) == ["aby", "abx", "pq", "p", "ab", "a"]


def test_demoted_blocks_that_are_dropped_leave_no_trace() -> None:
    tier = full_tier("abc", "xy")
    demote(tier, "abc")
    tier.drop(blocks(tier, "abc")[1:])
    check_tier(tier)
    assert contents(tier) == {"a", "x", "xy"}
    tier.reset()
    check_tier(tier)
    assert not tier._queue.demoted
    assert not tier._order.num_children
