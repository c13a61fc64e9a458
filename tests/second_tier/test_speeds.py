"""Whether a fetch pays, as measured. Seconds are those of a clock that the test moves."""

import pytest

from simple_offload.second_tier.speeds import Speeds
from tests.second_tier.conftest import Clock

MINUTE = 60.0
COMPUTE = 1000
"""Tokens per second."""


@pytest.fixture
def measured(clock: Clock) -> Speeds:
    """The speed of compute is known."""
    speeds = Speeds(clock)
    compute(speeds, clock, COMPUTE, 1.0)
    return speeds


def compute(speeds: Speeds, clock: Clock, num_tokens: int, seconds: float) -> None:
    number = speeds.on_step(num_tokens)
    clock.now += seconds
    if number is not None:
        speeds.on_step_ended(number)


@pytest.mark.parametrize(
    ("num_tokens", "seconds", "speed"),
    [
        (127, 0.001, 1000),  # too few tokens to tell
        (1000, 0.1, 1900),
        (9100, 0.1, 10000),
        (1000, 9.1, 190),
    ],
)
def test_compute_is_as_quick_as_its_steps_of_late(
    measured: Speeds, clock: Clock, num_tokens: int, seconds: float, speed: float
) -> None:
    compute(measured, clock, num_tokens, seconds)
    assert measured.compute == pytest.approx(speed)
    assert measured.max_wait(4550) == pytest.approx(4550 / speed)


def test_steps_that_overlap_count_from_the_end_of_the_one_before(
    measured: Speeds, clock: Clock
) -> None:
    """vLLM schedules a step while the one before runs, at times at once after it."""
    ended = clock.now
    numbers = [measured.on_step(1000), measured.on_step(1000), measured.on_step(1)]
    assert numbers[2] is None
    for number in numbers[:2]:
        assert number is not None
        clock.now += 1.0
        measured.on_step_ended(number)
        assert measured.compute == pytest.approx(COMPUTE)
    clock.now += 100.0  # the engine rests
    compute(measured, clock, 1000, 1.0)
    assert measured.compute == pytest.approx(COMPUTE)
    assert clock.now == ended + 103.0


def test_a_step_without_an_end_counts_for_nothing(measured: Speeds, clock: Clock) -> None:
    measured.on_step(1000)
    clock.now += 5.0
    compute(measured, clock, 1000, 1.0)
    assert measured.compute == pytest.approx(COMPUTE)


def test_a_fetch_that_is_slower_than_compute_is_made_once_a_minute(
    measured: Speeds, clock: Clock
) -> None:
    measured.on_answered(0.001)
    for _ in range(2):
        measured.on_fetched(999, 1.0)
        assert not measured.pays
        for seconds in (0, MINUTE - 0.1):
            clock.now += seconds
            assert (measured.should_ask(1000), measured.should_fetch()) == (False, False)
        clock.now += 0.2
        assert (measured.should_ask(1000), measured.should_fetch()) == (True, True)
        assert (measured.should_ask(1000), measured.should_fetch()) == (False, False)
    measured.on_fetched(10**6, 1.0)
    assert measured.pays
    for _ in range(2):
        assert (measured.should_ask(1000), measured.should_fetch()) == (True, True)


def test_answers_that_take_long_are_not_waited_for(measured: Speeds, clock: Clock) -> None:
    """More than a tenth of the time that computing takes. A minute later it may be otherwise."""
    assert measured.should_ask(1)
    measured.on_answered(0.1)
    assert (measured.should_ask(999), measured.should_ask(1000)) == (False, True)
    clock.now += MINUTE
    assert measured.should_ask(1)
    measured.on_answered(0.2)  # it may have waited for a step
    assert measured.answer == pytest.approx(0.11)
    assert (measured.should_ask(1000), measured.should_ask(1101)) == (False, True)
    measured.on_answered(0.01)
    assert (measured.should_ask(99), measured.should_ask(100)) == (False, True)


def test_what_was_measured_fades(measured: Speeds, clock: Clock) -> None:
    measured.on_fetched(1000, 1.0)
    assert measured.fetch == pytest.approx(1000)
    measured.on_fetched(1000, 0.1)
    assert measured.fetch == pytest.approx(1900 / 1.0)
    measured.on_fetched(10, 10)
    assert measured.fetch == pytest.approx((0.9 * 1900 + 10) / (0.9 * 1.0 + 10))
