"""Copies make room where requests want back what has left the tier."""

from string import ascii_letters, digits

import pytest

from simple_offload.scheduler.tier import ghosts
from simple_offload.scheduler.tier.cpu_tier import CpuTier
from tests.scheduler.tiers import copies, hashes, make_tier, store

NUM_BLOCKS = 32
MAX_COPIES = 6
NUM_AVERAGED = 8
NAMES = ascii_letters
MORE_NAMES = digits + "!$%&/()=?+*#-<>|"


@pytest.fixture(autouse=True)
def _fewer_ghosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ghosts, "NUM_AVERAGED", NUM_AVERAGED)


def full_tier() -> CpuTier:
    """Six blocks are copies, the most that may stay."""
    tier = make_tier(NUM_BLOCKS)
    store(tier, "." * MAX_COPIES, on_device=True)
    store(tier, *NAMES[: NUM_BLOCKS - MAX_COPIES])
    return tier


def displace(tier: CpuTier, names: str, wanted: str = "") -> None:
    """Store these, one by one, while requests want ``wanted``."""
    for name in names:
        store(tier, name)
        for each in wanted:
            tier.on_request(hashes(each))


def test_copies_stay_while_nothing_is_wanted_back() -> None:
    tier = full_tier()
    displace(tier, NAMES[26:])
    assert len(copies(tier)) == MAX_COPIES


def test_copies_leave_first_while_requests_want_what_has_left() -> None:
    tier = full_tier()
    displace(tier, NAMES[26:], wanted=NAMES[:26])
    assert copies(tier) == set()
    assert tier.room_for_copies == 0


def test_copies_may_stay_again_when_requests_have_changed() -> None:
    tier = full_tier()
    displace(tier, NAMES[26:], wanted=NAMES[:26])
    displace(tier, MORE_NAMES)
    assert tier.room_for_copies == MAX_COPIES


def test_what_was_displaced_long_ago_does_not_count() -> None:
    """No room that copies take would have kept it so long."""
    tier = full_tier()
    for place, name in enumerate(NAMES[26:]):
        store(tier, name)
        if place > MAX_COPIES:
            tier.on_request(hashes(NAMES[place - MAX_COPIES - 1]))
    assert len(copies(tier)) == MAX_COPIES


def test_a_few_ghosts_stand_for_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every third one is followed: the others do not count."""
    monkeypatch.setattr(ghosts, "NUM_FOLLOWED", MAX_COPIES // 3)
    followed, others = full_tier(), full_tier()
    displace(followed, NAMES[26:], wanted=NAMES[:26:3])
    displace(others, NAMES[26:], wanted=NAMES[1:26:3])
    assert copies(followed) == set()
    assert len(copies(others)) == MAX_COPIES
