"""What is known of the caches moves the LRU curve."""

import math
from collections.abc import Iterator
from itertools import pairwise

import pytest

from simple_offload.metrics import PREDICTED, Meter
from simple_offload.scheduler.forecaster import Forecaster
from simple_offload.sizing.curve import MissRatioCurve
from simple_offload.sizing.forecast import FACTORS, Caches, predicted_hit_ratios
from tests.scheduler.tiers import make_tier, store
from tests.simulation.integrity import pool_of
from tests.sizing.test_curve import TOKENS, Clock, chain

CACHES = Caches(device=100, host=200, is_exclusive=True)
INCLUSIVE = Caches(device=100, host=200, is_exclusive=False)
_BLOCK = TOKENS / (TOKENS + 1)
"""Share of a prompt that can be found."""


def lru(num_blocks: float) -> float:
    """Hit ratio of the curve below."""
    return min(num_blocks, 600) / 1200 * _BLOCK


def of_both(factor: float) -> float:
    """Blocks of different contents in ``INCLUSIVE`` caches."""
    return float((100**3 + (factor * 200) ** 3) ** (1 / 3))


def requests(found: float = 0.0) -> Iterator[tuple[list[bytes], int]]:
    """600 prompts of a block, and the same in reverse order: all distances from 1 to 600 are as
    frequent. With each, its tokens that the real caches have found: this share of all."""
    tokens = found * (TOKENS + 1)
    for number, name in enumerate((*range(600), *reversed(range(600)))):
        yield chain(name, 1), int((number + 1) * tokens) - int(number * tokens)


def make_curve(found: float | None = None, num_duplicates: int = 0) -> MissRatioCurve:
    """A curve of ``requests``."""
    curve = MissRatioCurve()
    for hashes, num_found in requests(found or 0.0):
        curve.on_prompt(hashes, TOKENS, TOKENS + 1)
        if found is not None:
            curve.on_found(num_found, num_duplicates)
    return curve


def approximately(ratios: float | list[float]) -> object:
    return pytest.approx(ratios, abs=0.003)


def test_lru_if_nothing_is_known_of_the_caches() -> None:
    expected = [lru(100 + factor * 200) for factor in FACTORS]
    assert predicted_hit_ratios(make_curve(), CACHES) == approximately(expected)


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


def test_a_share_of_such_a_tier_is_useless() -> None:
    """Where a window or a state is missing. It is a small one, or a flat curve would say
    anything."""
    for found, useful in ((lru(190), 190 / of_both(1.0)), (0.0, 7 / 8)):
        expected = [lru(useful * of_both(factor)) for factor in FACTORS]
        assert predicted_hit_ratios(make_curve(found), INCLUSIVE) == approximately(expected)


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
@pytest.mark.parametrize("is_exclusive", [True, False])
def test_more_memory_never_finds_less(
    found: float | None, num_duplicates: int, is_exclusive: bool
) -> None:
    caches = Caches(100, 200, is_exclusive, duplicates_share=1 / 8)
    ratios = predicted_hit_ratios(make_curve(found, num_duplicates), caches)
    assert all(0 <= less <= more + 1e-9 <= 1 for less, more in pairwise(ratios))


def test_no_number_before_the_first_prompt() -> None:
    assert all(map(math.isnan, predicted_hit_ratios(MissRatioCurve(), CACHES)))


def forecast(windows: tuple[int, ...], found: float) -> dict[str, float]:
    """The predicted hit ratios after ``requests``, by size. ``windows``: one number a group. The
    host tier has 200 blocks of each group. The device has 100 of the first, and 50 of others."""
    num_others = len(windows) - 1
    tier = make_tier(200 * len(windows), windows)
    device = make_tier(100 + 50 * num_others, windows)
    for group in range(len(windows)):
        store(tier, "x" * 200, group=group)
        store(device, "x" * (50 if group else 100), group=group)
    meter, clock = Meter(), Clock()
    forecaster = Forecaster(tier, 0, pool_of(device), 1, meter, clock)
    forecaster.on_step()
    for hashes, num_found in requests(found):
        forecaster.curve.on_prompt(hashes, TOKENS, TOKENS + 1)
        forecaster.curve.on_found(num_found, tier.num_duplicates)
    clock.now += 601
    forecaster.on_step()
    stats = meter.drain()
    assert stats is not None
    return {size: ratio for (size,), ratio in stats.data["data"][PREDICTED].items()}


def test_a_server_predicts_what_it_finds(caplog: pytest.LogCaptureFixture) -> None:
    """More than LRU would."""
    caplog.set_level("INFO")
    found = forecast((0,), lru(450))
    assert found["1x"] == approximately(lru(450))
    line = caplog.messages[-1]
    assert line.startswith("Prompt tokens of the last hour that would be found, by host memory: 0x")
    assert f" 1x {found['1x']:.0%}, " in line


def test_groups_share_the_caches() -> None:
    """Such a tier has nearly what the device has, in another order: two of equal size have a
    quarter more than one."""
    assert of_both(0.5) == pytest.approx(126, abs=0.1)
    found = forecast((0, 8), lru(of_both(1.0)))
    assert list(found.values()) == approximately([lru(of_both(factor)) for factor in FACTORS])
