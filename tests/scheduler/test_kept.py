"""What must not leave the tier."""

import pytest

from simple_offload.scheduler.policies.request_walk import Kept
from simple_offload.scheduler.tier.cpu_tier import CpuTier
from tests.scheduler.tiers import begin, blocks, commit, contents, hashes, key, make_tier, store

CHAIN, WINDOW = 0, 1


def make(num_blocks: int) -> tuple[CpuTier, Kept]:
    """A tier that "abcd" is to be stored in; what it keeps of that."""
    tier = make_tier(num_blocks, windows=(0, 8))
    return tier, Kept(tier.groups, tier.lookup, hashes("abcd"))


@pytest.mark.parametrize(
    ("num_kept", "left"),
    [(0, ()), (1, ("a", "x", "xy")), (2, ("a", "ab", "x", "xy"))],
)
def test_of_a_chain_the_first_blocks_stay_and_what_stands_behind_them(
    num_kept: int, left: tuple[str, ...]
) -> None:
    tier, kept = make(6)
    store(tier, "abc", "xy")
    kept.keep_first(CHAIN, num_kept)
    assert len(tier.allocate(9, kept.collect)) == 6 - len(left)
    assert contents(tier) == set(left)


@pytest.mark.parametrize("num_kept", [1, 2, 3])
def test_of_a_window_each_of_the_first_blocks_stays(num_kept: int) -> None:
    tier, kept = make(6)
    store(tier, "xy")
    store(tier, "abc", group=WINDOW)
    kept.keep_first(WINDOW, num_kept)
    tier.allocate(9, kept.collect)
    assert contents(tier, WINDOW) >= set(["a", "ab", "abc"][:num_kept])


def test_of_a_window_a_block_does_not_stand_for_those_before_it() -> None:
    """It may be there without the one between them, and then stands anywhere in the queue."""
    tier, kept = make(2)
    store(tier, "a", group=WINDOW)
    assert commit(tier, begin(tier, "abc", WINDOW), "abc", WINDOW)
    kept.keep_first(WINDOW, 3)
    assert tier.allocate(1, kept.collect) == []
    assert contents(tier, WINDOW) == {"a", "abc"}


def test_it_goes_by_what_the_tier_has() -> None:
    """The last blocks that are kept may not have come yet, or have left."""
    tier, kept = make(3)
    store(tier, "ab")
    kept.keep_first(CHAIN, 4)
    assert len(tier.allocate(3, kept.collect)) == 1
    assert contents(tier) == {"a", "ab"}
    assert len(tier.allocate(1)) == 1  # by somebody who keeps nothing of it
    assert tier.allocate(1, kept.collect) == []
    assert contents(tier) == {"a"}


def test_a_block_that_somebody_holds_does_not_stand_for_those_before_it() -> None:
    tier, kept = make(3)
    store(tier, "abc")
    last = blocks(tier, "abc")[-1:]
    tier.pin(last)
    kept.keep_first(CHAIN, 3)
    assert tier.allocate(1, kept.collect) == []
    tier.unpin(last)
    assert tier.allocate(1, kept.collect) == []


def test_it_only_grows() -> None:
    tier, kept = make(3)
    store(tier, "abc")
    kept.keep_first(CHAIN, 2)
    kept.keep_first(CHAIN, 1)
    assert len(tier.allocate(3, kept.collect)) == 1
    assert contents(tier) == {"a", "ab"}


def test_some_more() -> None:
    tier, kept = make(3)
    store(tier, "xyz")
    kept.keep((key("xy"),))
    assert len(tier.allocate(3, kept.collect)) == 1
    assert contents(tier) == {"x", "xy"}


def test_nothing_is_kept_at_first() -> None:
    assert make(3)[1].collect() == set()


def test_of_a_chain_one_key_is_collected() -> None:
    """Of a prompt of 128K tokens there would be thousands to make."""
    for stored in ("abcd", "ab"):  # the rest may not have come yet
        tier, kept = make(4)
        store(tier, stored)
        kept.keep_first(CHAIN, 4)
        assert kept.collect() == {key(stored)}
