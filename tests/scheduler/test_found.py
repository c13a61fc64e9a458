"""Blocks are protected once a second request has hit them: they outlive what comes once."""

import pytest

from tests.scheduler.conftest import MakeDriver
from tests.scheduler.driver import Driver, prompt
from tests.simulation.integrity import is_protected

SETTINGS = pytest.mark.parametrize("lazy", [None, True, False])


def num_protected(driver: Driver) -> int:
    return sum(is_protected(driver.tier, block) for block in driver.host_pool.blocks)


@SETTINGS
@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("num_shared", [24, 28])
def test_blocks_that_a_second_request_hits_are_protected(
    drive: MakeDriver, lazy: bool | None, num_shared: int, on_device: bool
) -> None:
    """The last token of the first request, the 28th, is never computed."""
    driver = drive(lazy=lazy, num_host_blocks=200)
    history = driver.serve("a", prompt(20), max_tokens=8)
    if not on_device:
        driver.fill(8, first=10)
    driver.serve("b", [*history[:num_shared], *prompt(20, family=1)], max_tokens=8)
    driver.fill(8)
    driver.empty_device_cache()  # no duplicates any more
    assert driver.found(history) >= 24
    assert num_protected(driver) == 24 // 4


@pytest.mark.parametrize("on_device", [False, True])
def test_with_several_groups_too(drive: MakeDriver, on_device: bool) -> None:
    """All blocks of one group, and the window that the prompt's end needs of the other."""
    driver = drive(windows=(0, 8), num_device_blocks=60, num_host_blocks=400)
    history = driver.serve("a", prompt(24), max_tokens=8)
    if not on_device:
        driver.empty_device_cache()
    driver.serve("b", [*history, *prompt(20, family=1)], max_tokens=8)
    driver.fill(12)
    driver.empty_device_cache()
    assert driver.found(history) >= 20
    assert num_protected(driver) == 20 // 4 + 2


@SETTINGS
def test_what_a_session_s_later_input_overwrites_is_no_duplicate(
    drive: MakeDriver, lazy: bool | None
) -> None:
    """vLLM goes on with a streaming-input session as a new request that has computed tokens. The
    world checks after each step that the device has all that the tier calls a duplicate."""
    driver = drive(num_device_blocks=25, num_host_blocks=100, lazy=lazy)
    driver.serve("a", prompt(65))
    driver.world.add_request("session", prompt(9, 1), 2, None, 0, resumable=True)
    for turn in range(6):
        driver.step_until(lambda: driver.world.is_waiting_for_input("session"))
        driver.copy_all()
        driver.world.resume("session", prompt(8, 20 + turn), 2)
    driver.step_until(lambda: driver.world.is_waiting_for_input("session"))
    driver.world.resume("session", [], 1)
    driver.run()
    assert driver.found(prompt(65)) == 64
