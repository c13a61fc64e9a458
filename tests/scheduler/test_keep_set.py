"""KeepSet: blocks of a request that a store for it must not evict."""

import pytest

from simple_offload.scheduler.policies.request_walk import KeepSet
from simple_offload.scheduler.tier.cpu_tier import CpuTier
from tests.scheduler.tiers import (
    begin,
    blocks,
    commit,
    contents,
    hashes,
    key,
    make_tier,
    store,
)
from tests.simulation.integrity import groups_of

CHAIN, WINDOW = 0, 1


def make(num_blocks: int) -> tuple[CpuTier, KeepSet]:
    """A tier, and the KeepSet of a request for "abcd"."""
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
    assert kept.collect() == set()
    store(tier, "abc", "xy")
    kept.add_first(CHAIN, num_kept)
    kept.add_first(CHAIN, 0)  # the set only grows
    assert len(tier.allocate(9, kept.collect)) == 6 - len(left)
    assert contents(tier) == set(left)


def test_each_of_the_first_blocks_of_a_window_stays() -> None:
    """They may be in the tier without a block between, and anywhere in the queue."""
    tier, kept = make(6)
    store(tier, "a", group=WINDOW)
    assert commit(tier, begin(tier, "abc", WINDOW), "abc", WINDOW)
    store(tier, "xy")
    kept.add_first(WINDOW, 3)
    assert len(tier.allocate(9, kept.collect)) == 2
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
    tier.pin(last)
    kept.add_first(CHAIN, 3)
    assert tier.allocate(1, kept.collect) == []
    tier.unpin(last)
    assert tier.allocate(1, kept.collect) == []


def test_single_keys_stay_too() -> None:
    tier, kept = make(3)
    store(tier, "xyz")
    kept.add((key("xy"),))
    assert len(tier.allocate(3, kept.collect)) == 1
    assert contents(tier) == {"x", "xy"}


@pytest.mark.parametrize("stored", ["abcd", "ab"])
def test_one_key_of_a_chain_is_collected(stored: str) -> None:
    """Only one, because a prompt of 128K tokens has thousands. The rest may not be stored yet."""
    tier, kept = make(4)
    store(tier, stored)
    kept.add_first(CHAIN, 4)
    assert kept.collect() == {key(stored)}
