"""The more of what has left the tier requests want back, the fewer duplicates stay."""

from collections.abc import Iterable

import pytest

from simple_offload.scheduler.tier.cpu_tier import CpuTier
from tests.scheduler.tiers import commit, contents, duplicates, hashes, make_tier, store

NUM_BLOCKS = 32
SHARE = 6
"""Duplicates that stay usually."""
NAMES = [chr(0x4E00 + number) for number in range(2000)]


def full_tier(num_duplicates: int = SHARE, num_blocks: int = NUM_BLOCKS) -> CpuTier:
    """Some of its blocks are duplicates. The others have the first names."""
    tier = make_tier(num_blocks)
    store(tier, "." * num_duplicates, on_device=True)
    displace(tier, NAMES[: num_blocks - num_duplicates])
    return tier


def displace(tier: CpuTier, names: Iterable[str], wanted: Iterable[str] = ()) -> None:
    """Store these, one by one. After each, a request wants the next of ``wanted``."""
    wanting = iter(wanted)
    for name in names:
        commit(tier, tier.allocate(1), [name])
        tier.on_request(hashes(next(wanting, "")))


@pytest.mark.parametrize("num_duplicates", [12, 30])
def test_duplicates_outlive_the_others_while_nothing_is_wanted_back(num_duplicates: int) -> None:
    tier = full_tier(num_duplicates)
    displace(tier, NAMES[100:120])
    assert len(duplicates(tier)) == num_duplicates


def test_protected_contents_outlive_duplicates_beyond_their_share() -> None:
    tier = full_tier(30)
    pins = tier.lookup(hashes(NAMES[0]), 0, 100).pins
    tier.pin(pins)
    tier.unpin(pins)
    displace(tier, NAMES[100:120])
    assert len(tier.allocate(4)) == 4  # one on probation, then duplicates
    assert contents(tier) >= {NAMES[0]}
    assert len(duplicates(tier)) == 27


def test_duplicates_within_their_share_stay_while_some_is_wanted_back() -> None:
    tier = full_tier(20)
    displace(tier, NAMES[12:400], wanted=NAMES[:50])
    assert len(duplicates(tier)) == SHARE


def test_duplicates_leave_first_while_requests_want_what_has_left() -> None:
    tier = full_tier()
    displace(tier, NAMES[26:400], wanted=NAMES)
    assert duplicates(tier) == set()


def test_duplicates_may_stay_again_when_requests_have_changed() -> None:
    tier = full_tier()
    displace(tier, NAMES[26:400], wanted=NAMES)
    displace(tier, NAMES[400:])
    store(tier, "x", on_device=True)
    displace(tier, NAMES[:1])
    assert duplicates(tier) == {"x"}


def test_what_has_left_long_ago_does_not_count() -> None:
    """No room that duplicates take would have kept it so long."""
    tier = full_tier()
    displace(tier, NAMES[26:400], wanted=[*[""] * (SHARE + 1), *NAMES])
    assert len(duplicates(tier)) == SHARE


def test_the_room_of_all_duplicates_would_have_kept_it_longer() -> None:
    tier = full_tier(20)
    displace(tier, NAMES[12:400], wanted=[*[""] * 10, *NAMES])
    assert len(duplicates(tier)) <= SHARE


def test_a_few_ghosts_stand_for_many() -> None:
    """In a large tier every third one is followed: the others do not count."""
    followed, others = (full_tier(192, 1024) for _ in range(2))
    displace(followed, NAMES[832:], wanted=[NAMES[i] if i % 3 == 0 else "" for i in range(1168)])
    displace(others, NAMES[832:], wanted=["" if i % 3 == 0 else NAMES[i] for i in range(1168)])
    assert duplicates(followed) == set()
    assert len(duplicates(others)) == 192
