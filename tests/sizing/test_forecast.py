"""predicted_hit_ratios: what is known of the caches moves the LRU curve."""

import math
from itertools import pairwise

import pytest

from simple_offload.sizing.curve import MissRatioCurve
from simple_offload.sizing.forecast import FACTORS, Caches, predicted_hit_ratios
from tests.sizing.test_curve import TOKENS, chain

CACHES = Caches(device=100, host=200, is_exclusive=True)
_BLOCK = TOKENS / (TOKENS + 1)
"""Share of a prompt that can be found."""


def lru(num_blocks: float) -> float:
    """Hit ratio of the curve below."""
    return min(num_blocks, 600) / 1200 * _BLOCK


def make_curve(found: float | None = None, num_duplicates: int = 0) -> MissRatioCurve:
    """600 prompts of a block, and the same in reverse order: all distances from 1 to 600 are as
    frequent. ``found``: the share that the real caches have found."""
    curve = MissRatioCurve()
    for number, name in enumerate((*range(600), *reversed(range(600)))):
        curve.on_prompt(chain(name, 1), TOKENS, TOKENS + 1)
        if found is not None:
            tokens = found * (TOKENS + 1)
            num_tokens = int((number + 1) * tokens) - int(number * tokens)
            curve.on_found(num_tokens, num_duplicates)
    return curve


def approximately(ratios: list[float]) -> object:
    return pytest.approx(ratios, abs=0.003)


def test_lru_if_nothing_is_known_of_the_caches() -> None:
    expected = [lru(100 + factor * 200) for factor in FACTORS]
    assert predicted_hit_ratios(make_curve(), CACHES) == approximately(expected)


def test_a_host_tier_that_has_what_the_device_has() -> None:
    caches = Caches(device=100, host=200, is_exclusive=False)
    expected = [lru(max(100, factor * 200)) for factor in FACTORS]
    assert predicted_hit_ratios(make_curve(), caches) == approximately(expected)


def test_duplicates_take_room() -> None:
    """An eighth of the tier, and now 80 blocks in all: 55 more than that. The device has no more
    than 100, and the tier no more than it has room for."""
    caches = Caches(device=100, host=200, is_exclusive=True, duplicates_share=1 / 8)
    curve = make_curve(lru(300 - 80), num_duplicates=80)
    rooms = [100, 100, 300 - 80 - 100 + 12.5, 300 - 80, 500 - 100, 900 - 100, 1700 - 100]
    assert predicted_hit_ratios(curve, caches) == approximately([lru(room) for room in rooms])
    # A tier with few of them has not needed the room so far.
    found = predicted_hit_ratios(make_curve(num_duplicates=5), caches, [1.0, 2.0])
    assert found == approximately([lru(300 - 25), lru(500 - 50)])


def test_caches_that_find_less_have_less_room() -> None:
    """But not much less, or a flat curve would say anything."""
    found = predicted_hit_ratios(make_curve(lru(290)), CACHES)
    expected = [lru(100 + factor * 200 - 10 * (factor > 0)) for factor in FACTORS]
    assert found == approximately(expected)
    assert predicted_hit_ratios(make_curve(0.0), CACHES, [1.0]) == approximately([lru(300 - 12.5)])
    caches = Caches(device=100, host=2000, is_exclusive=True)
    assert predicted_hit_ratios(make_curve(0.4), caches, [0.25]) == approximately([lru(600 - 12.5)])


def test_caches_that_find_more_miss_less_of_what_lru_misses() -> None:
    """Where LRU finds 300 of 600, these find 450: half of the others. Twice as much room for them
    halves that again, and without any LRU is right."""
    found = predicted_hit_ratios(make_curve(lru(450)), CACHES, [0.0, 0.5, 1.0, 1.25, 8.0])
    half = 600 - 400 * math.sqrt(0.5)
    more = 600 - 250 * 0.5**1.25
    assert found == approximately([lru(each) for each in (100, half, 450, more, 600)])
    everything = predicted_hit_ratios(make_curve(0.6), CACHES, [0.5, 1.0])
    assert everything == approximately([lru(600), lru(600)])
    caches = Caches(device=100, host=2000, is_exclusive=True)
    assert predicted_hit_ratios(make_curve(0.6), caches, [1.0]) == approximately([lru(600)])


@pytest.mark.parametrize("found", [None, 0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 1.0])
@pytest.mark.parametrize("num_duplicates", [0, 30, 200])
def test_more_memory_never_finds_less(found: float | None, num_duplicates: int) -> None:
    caches = Caches(device=100, host=200, is_exclusive=True, duplicates_share=1 / 8)
    ratios = predicted_hit_ratios(make_curve(found, num_duplicates), caches)
    assert all(0 <= less <= more + 1e-9 <= 1 for less, more in pairwise(ratios))


def test_no_number_before_the_first_prompt() -> None:
    assert all(map(math.isnan, predicted_hit_ratios(MissRatioCurve(), CACHES)))
