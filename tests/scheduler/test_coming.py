"""Coming: a key is on its way from its store's plan to its end, whatever comes of others."""

import pytest

from simple_offload.scheduler import coming as module
from simple_offload.scheduler.coming import Coming
from simple_offload.scheduler.runs import Run
from tests.scheduler.tiers import BLOCK_SIZE, key, leave, make_tier, parent_of, prefixes, store

CHAIN = "abcdefghijkl"


@pytest.fixture(autouse=True, params=[(64, 4), (1, 1), (2, 1), (1, 4)], ids=str)
def limits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """How long a run is that has a set of its own, and how many may have one."""
    long, most_long = request.param
    monkeypatch.setattr(module, "_LONG", long)
    monkeypatch.setattr(module, "_MOST_LONG", most_long)
    return long, most_long


def run(first: str, last: str) -> Run:
    """The blocks of ``CHAIN`` from one letter to another."""
    names = prefixes(CHAIN)[CHAIN.index(first) : CHAIN.index(last) + 1]
    keys = [key(name) for name in names]
    return Run((), keys, parent_of(names[0]), len(names[0]) * BLOCK_SIZE, BLOCK_SIZE)


def test_what_is_on_its_way() -> None:
    coming = Coming(make_tier(8))
    first, second = run("a", "c"), run("d", "e")
    for each in (first, second):
        coming.add(each)
    assert coming.keys == {*first.keys, *second.keys}
    coming.check_integrity([first, second])
    coming.remove(first)
    assert [name for name in prefixes("abcdef") if key(name) in coming] == ["abcd", "abcde"]
    coming.check_integrity([second])
    coming.clear()
    assert not coming.keys
    assert key("abcde") not in coming
    coming.check_integrity([])


def test_has_none() -> None:
    """It is told by the first key of what it is asked for, and the parents of what comes."""
    tier = make_tier(8)
    store(tier, "ab")
    coming = Coming(tier)
    coming.add(run("c", "d"))
    assert coming.has_none(run("e", "l").keys)
    assert coming.has_none([key("xyz"[:length]) for length in (1, 2, 3)])
    assert not coming.has_none(run("d", "l").keys)
    coming.add(run("e", "e"))
    assert not coming.has_none(run("e", "l").keys)
    assert coming.has_none(run("f", "l").keys)


@pytest.mark.parametrize("why", ["its store failed", "it has left the tier", "it was early"])
def test_has_none_where_a_parent_is_missing(why: str) -> None:
    """What follows it is on its way all the same."""
    tier = make_tier(2)
    coming = Coming(tier)
    before = run("a", "b")
    if why == "it has left the tier":
        store(tier, "ab")
    elif why == "its store failed":
        coming.add(before)
    coming.add(run("c", "c"))
    if why == "it has left the tier":
        assert leave(tier) == ["ab", "a"]
    elif why == "its store failed":
        coming.remove(before)
    assert not coming.has_none(run("a", "l").keys)
    assert not coming.has_none(run("b", "l").keys)
    assert coming.has_none(run("d", "l").keys)


def test_there_are_few_sets_to_look_in(limits: tuple[int, int]) -> None:
    """However many runs are on their way; and there is room again when one has ended."""
    long, most_long = limits
    coming = Coming(make_tier(8))
    runs = [run(letter, letter) for letter in CHAIN]
    for _ in range(2):
        for each in runs:
            coming.add(each)
        assert len(coming._sets()) == 1 + (most_long if long == 1 else 0)
        coming.check_integrity(runs)
        for each in runs:
            coming.remove(each)
        coming.check_integrity([])
        assert len(coming._sets()) == 1


@pytest.mark.parametrize("wrong", ["missing", "too many"])
def test_check_integrity_notices(wrong: str) -> None:
    coming = Coming(make_tier(8))
    one = run("a", "c")
    coming.add(one)
    coming.check_integrity([one])
    with pytest.raises(AssertionError, match="runs on their way"):
        coming.check_integrity([] if wrong == "too many" else [one, run("d", "d")])
