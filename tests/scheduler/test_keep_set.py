"""KeepSet: blocks that must not leave the tier."""

import pytest

from simple_offload.scheduler.policies.request_walk import KeepSet
from simple_offload.scheduler.tier.cpu_tier import CpuTier
from tests.scheduler.tiers import (
    begin,
    blocks,
    commit,
    contents,
    hashes,
    hold,
    key,
    make_tier,
    store,
)
from tests.simulation.integrity import groups_of

CHAIN, WINDOW = 0, 1


def make(num_blocks: int) -> tuple[CpuTier, KeepSet]:
    """A tier for "abcd", and the KeepSet of "abcd"."""
    tier = make_tier(num_blocks, windows=(0, 8))
    return tier, KeepSet(groups_of(tier), tier, hashes("abcd"))


@pytest.mark.parametrize(
    ("num_kept", "left"),
    [(0, ()), (1, ("a", "x", "xy")), (2, ("a", "ab", "x", "xy"))],
)
def test_first_blocks_of_a_chain_stay_and_so_do_later_ones_in_the_queue(
    num_kept: int, left: tuple[str, ...]
) -> None:
    tier, kept = make(6)
    store(tier, "abc", "xy")
    kept.add_first(CHAIN, num_kept)
    assert len(tier.allocate(9, kept.collect)) == 6 - len(left)
    assert contents(tier) == set(left)


@pytest.mark.parametrize("num_kept", [1, 2, 3])
def test_each_of_the_first_blocks_of_a_window_stays(num_kept: int) -> None:
    tier, kept = make(6)
    store(tier, "xy")
    store(tier, "abc", group=WINDOW)
    kept.add_first(WINDOW, num_kept)
    tier.allocate(9, kept.collect)
    assert contents(tier, WINDOW) >= set(["a", "ab", "abc"][:num_kept])


def test_a_window_block_does_not_keep_earlier_ones() -> None:
    """It may be in the tier without the block between, and anywhere in the queue."""
    tier, kept = make(2)
    store(tier, "a", group=WINDOW)
    assert commit(tier, begin(tier, "abc", WINDOW), "abc", WINDOW)
    kept.add_first(WINDOW, 3)
    assert tier.allocate(1, kept.collect) == []
    assert contents(tier, WINDOW) == {"a", "abc"}


def test_only_blocks_in_the_tier_count() -> None:
    """The last blocks to keep may not be stored yet, or may have left."""
    tier, kept = make(3)
    store(tier, "ab")
    kept.add_first(CHAIN, 4)
    assert len(tier.allocate(3, kept.collect)) == 1
    assert contents(tier) == {"a", "ab"}
    assert len(tier.allocate(1)) == 1  # for a request without blocks to keep
    assert tier.allocate(1, kept.collect) == []
    assert contents(tier) == {"a"}


def test_a_pinned_block_does_not_keep_earlier_ones() -> None:
    tier, kept = make(3)
    store(tier, "abc")
    last = blocks(tier, "abc")[-1:]
    hold(tier, last)
    kept.add_first(CHAIN, 3)
    assert tier.allocate(1, kept.collect) == []
    tier.unpin(last)
    assert tier.allocate(1, kept.collect) == []


def test_it_only_grows() -> None:
    tier, kept = make(3)
    store(tier, "abc")
    kept.add_first(CHAIN, 2)
    kept.add_first(CHAIN, 1)
    assert len(tier.allocate(3, kept.collect)) == 1
    assert contents(tier) == {"a", "ab"}


def test_single_keys_stay_too() -> None:
    tier, kept = make(3)
    store(tier, "xyz")
    kept.add((key("xy"),))
    assert len(tier.allocate(3, kept.collect)) == 1
    assert contents(tier) == {"x", "xy"}


def test_nothing_is_kept_at_first() -> None:
    assert make(3)[1].collect() == set()


def test_one_key_of_a_chain_is_collected() -> None:
    """Only one, because a prompt of 128K tokens has thousands."""
    for stored in ("abcd", "ab"):  # the rest may not be stored yet
        tier, kept = make(4)
        store(tier, stored)
        kept.add_first(CHAIN, 4)
        assert kept.collect() == {key(stored)}
