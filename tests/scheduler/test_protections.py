"""Protections: which wishes count, and until when."""

from collections.abc import Iterable

import pytest

from simple_offload.scheduler.policy.protections import Protections
from simple_offload.scheduler.tier.cpu_tier import CpuTier
from tests.scheduler.tiers import key, make_tier, prefixes, reserved, store
from tests.simulation.integrity import check_tier

NUM_BLOCKS = 16
"""A quarter of them may be protected."""


class Scene:
    """A tier, and wishes of sessions. Seconds pass only when a test says so."""

    def __init__(self, *chains: str) -> None:
        self.now = 0.0
        self.tier: CpuTier = make_tier(NUM_BLOCKS)
        store(self.tier, *chains)
        self._protections = Protections(self.tier)
        self._protections.clock = lambda: self.now

    def wish(self, session: str, seconds: float, chain: str) -> None:
        """A request wants a chain protected."""
        self._protections.add(session.encode(), seconds, [key(name) for name in prefixes(chain)])

    def end(self, session: str) -> None:
        """A request wants no more of it."""
        self._protections.end(session.encode())

    def at(self, now: float) -> set[str]:
        """What is protected after a step at this time."""
        self.now = now
        self._protections.on_step()
        check_tier(self.tier)
        return {*reserved(self.tier)}


def chains(*each: str) -> set[str]:
    """The names of all blocks of these chains."""
    return {name for chain in each for name in prefixes(chain)}


def test_wishes_of_a_session_add_up_and_end_together_with_the_last() -> None:
    scene = Scene("ab", "xy")
    scene.wish("one", 5, "ab")
    assert scene.at(1) == chains("ab")
    scene.wish("one", 9, "xy")
    scene.wish("one", 1, "a")
    assert scene.at(9.9) == chains("ab", "xy")
    assert scene.at(10) == set()
    assert scene.tier.num_reserved == 0


def test_what_two_sessions_want_is_protected_until_both_have_ended() -> None:
    scene = Scene("ab", "xy")
    scene.wish("one", 9, "a")
    scene.wish("two", 5, "ab")
    assert scene.at(5) == {"a"}
    scene.wish("two", 20, "ab")
    scene.end("two")
    scene.end("two")
    assert scene.at(6) == {"a"}
    assert scene.at(9) == set()


def test_beyond_the_share_the_session_ends_that_wished_nothing_for_longest() -> None:
    scene = Scene("ab", "xy", "p")
    scene.wish("one", 60, "ab")
    scene.wish("two", 90, "xy")
    scene.wish("one", 60, "a")
    assert scene.at(1) == chains("ab", "xy")
    scene.wish("three", 30, "p")
    assert scene.at(2) == chains("ab", "p")


@pytest.mark.parametrize("wishes", [["abcdefgh"], ["ab", "abcdefgh"], ["abcd", "xy"]], ids=str)
def test_one_session_gets_the_share_at_most(wishes: Iterable[str]) -> None:
    """The head of what it wants, and what it wanted first."""
    scene = Scene("abcdefgh", "xy")
    for chain in wishes:
        scene.wish("one", 60, chain)
    assert scene.at(1) == chains("abcd")
