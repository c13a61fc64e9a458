"""The more of what has left the tier requests want back, the fewer copies stay."""

from string import ascii_letters, digits

import pytest

from simple_offload.scheduler.tier import ghosts
from simple_offload.scheduler.tier.cpu_tier import CpuTier
from tests.scheduler.tiers import contents, copies, hashes, make_tier, store

NUM_BLOCKS = 32
MAX_COPIES = 6
"""Copies that stay usually."""
NUM_AVERAGED = 8
NAMES = ascii_letters
MORE_NAMES = digits + "!$%&/()=?+*#-<>|"


@pytest.fixture(autouse=True)
def _fewer_ghosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ghosts, "NUM_AVERAGED", NUM_AVERAGED)


def full_tier(num_copies: int = MAX_COPIES) -> CpuTier:
    """Some of its blocks are copies."""
    tier = make_tier(NUM_BLOCKS)
    store(tier, "." * num_copies, on_device=True)
    store(tier, *NAMES[: NUM_BLOCKS - num_copies])
    return tier


def displace(tier: CpuTier, names: str, wanted: str = "") -> None:
    """Store these, one by one, while requests want ``wanted``."""
    for name in names:
        store(tier, name)
        for each in wanted:
            tier.on_request(hashes(each))


@pytest.mark.parametrize("num_copies", [12, 30])
def test_copies_outlive_the_others_while_nothing_is_wanted_back(num_copies: int) -> None:
    tier = full_tier(num_copies)
    displace(tier, NAMES[-12:])
    assert len(copies(tier)) == num_copies


def test_protected_contents_outlive_copies_beyond_their_share() -> None:
    tier = full_tier(30)
    pins = tier.lookup(hashes("a"), 0, 100).pins
    tier.pin(pins)
    tier.unpin(pins)
    displace(tier, NAMES[-12:])
    assert len(tier.allocate(4)) == 4  # one on probation, then copies
    assert contents(tier) >= {"a"}
    assert len(copies(tier)) == 27


def test_copies_within_their_share_stay_while_some_is_wanted_back() -> None:
    tier = full_tier(20)
    displace(tier, NAMES[26:], wanted=NAMES[:12:4])
    assert len(copies(tier)) == MAX_COPIES


def test_copies_leave_first_while_requests_want_what_has_left() -> None:
    tier = full_tier()
    displace(tier, NAMES[26:], wanted=NAMES[:26])
    assert copies(tier) == set()


def test_copies_may_stay_again_when_requests_have_changed() -> None:
    tier = full_tier()
    displace(tier, NAMES[26:], wanted=NAMES[:26])
    displace(tier, MORE_NAMES)
    store(tier, "x", on_device=True)
    displace(tier, NAMES[:1])
    assert copies(tier) == {"x"}


def test_what_was_displaced_long_ago_does_not_count() -> None:
    """No room that copies take would have kept it so long."""
    tier = full_tier()
    for place, name in enumerate(NAMES[26:]):
        store(tier, name)
        if place > MAX_COPIES:
            tier.on_request(hashes(NAMES[place - MAX_COPIES - 1]))
    assert len(copies(tier)) == MAX_COPIES


def test_the_room_of_all_copies_would_have_kept_it_longer() -> None:
    tier = full_tier(20)
    for place, name in enumerate(NAMES[26:]):
        store(tier, name)
        if place >= 10:
            tier.on_request(hashes(NAMES[place - 10]))
    assert len(copies(tier)) <= MAX_COPIES


def test_a_few_ghosts_stand_for_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every third one is followed: the others do not count."""
    monkeypatch.setattr(ghosts, "NUM_FOLLOWED", MAX_COPIES // 3)
    followed, others = full_tier(), full_tier()
    displace(followed, NAMES[26:], wanted=NAMES[:26:3])
    displace(others, NAMES[26:], wanted=NAMES[1:26:3])
    assert copies(followed) == set()
    assert len(copies(others)) == MAX_COPIES
