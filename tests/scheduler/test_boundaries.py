"""Boundaries: windows and states of a session's earlier turns make room first."""

import pytest

from tests.scheduler.conftest import MakeDriver
from tests.scheduler.driver import Driver, prompt


def turn(
    driver: Driver, name: str, history: list[int], family: int, on_device: bool = False
) -> list[int]:
    """Serve a request with 8 new tokens. Returns prompt and answer. ``on_device``: whether the next
    turn finds it there."""
    tokens = driver.serve(name, [*history, *prompt(8, family)], max_tokens=5)
    if not on_device:
        driver.empty_device_cache()
    return tokens


def begins(driver: Driver, history: list[int]) -> int:
    """Tokens that the next turn would find."""
    return driver.found([*history, 96])


def evict_some(driver: Driver) -> None:
    """Serve others until the tier has evicted a few blocks."""
    family = 50
    while driver.tier.num_evicted < 3:
        driver.serve(f"other {family}", prompt(5, family))
        family += 1


@pytest.mark.parametrize("on_device", [False, True])
def test_the_turn_before_the_last_hit_makes_room_first(drive: MakeDriver, on_device: bool) -> None:
    driver = drive(windows=(0, 8), num_device_blocks=60, num_host_blocks=70)
    once = turn(driver, "once", prompt(16, 1), 2)
    first = turn(driver, "first", prompt(16), 3, on_device)
    second = turn(driver, "second", first, 4, on_device)
    third = turn(driver, "third", second, 5, on_device)
    assert begins(driver, first) == len(first) // 4 * 4
    others = (once, second, third)
    before = [begins(driver, history) for history in others]
    evict_some(driver)
    assert begins(driver, first) < len(first) // 4 * 4
    assert [begins(driver, history) for history in others] == before


def test_where_two_conversations_went_on_stays(drive: MakeDriver) -> None:
    """Although the first had released it before the second began."""
    driver = drive(windows=(0, 8), num_device_blocks=60, num_host_blocks=70)
    first = turn(driver, "first", prompt(16), 3)
    turn(driver, "third", turn(driver, "second", first, 4), 5)
    assert turn(driver, "first again", prompt(16), 3) == first
    turn(driver, "other third", turn(driver, "other second", first, 6), 7)
    evict_some(driver)
    assert begins(driver, first) == len(first) // 4 * 4


def test_earlier_turns_make_room_for_their_own_session(drive: MakeDriver) -> None:
    """Although the device still has what they left."""
    driver = drive(windows=(0, 8), num_device_blocks=60, num_host_blocks=40)
    first = turn(driver, "first", prompt(16), 3, on_device=True)
    second = turn(driver, "second", first, 4, on_device=True)
    family = 50
    while driver.tier.num_empty > 1:
        driver.serve(f"other {family}", prompt(5, family))
        family += 1
    others = [prompt(5, each) for each in range(50, family)]
    third = turn(driver, "third", second, 5, on_device=True)
    assert begins(driver, third) == len(third) // 4 * 4
    assert [driver.found(each) for each in others][-4:] == [4] * 4


@pytest.mark.parametrize("on_device", [False, True])
def test_the_end_of_an_answer_is_no_shared_prefix(drive: MakeDriver, on_device: bool) -> None:
    """The chain goes on behind the last state of the conversation, but no other request does."""
    driver = drive(num_states=1, num_device_blocks=60, num_host_blocks=70)
    first = turn(driver, "first", prompt(2), 1, on_device)
    assert [len(first), driver.found([*first[:12], 96])] == [15, 8]
    second = turn(driver, "second", first, 2)
    assert driver.found([*second[:12], 96]) == 8
    assert driver.found([*second, 96]) == 20
