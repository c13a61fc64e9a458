"""Blocks are protected once a second request has found them."""

import pytest

from tests.scheduler.conftest import MakeDriver
from tests.scheduler.driver import Driver, prompt

BLOCK = 4


def num_protected(driver: Driver) -> int:
    return driver.tier._queue.num_protected


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("num_shared", [24, 28])
def test_blocks_that_a_second_request_finds_are_protected(
    drive: MakeDriver, num_shared: int, on_device: bool
) -> None:
    """The last token of the first request, the 28th, is never computed."""
    driver = drive()
    history = driver.serve("a", prompt(20), max_tokens=8)
    assert num_protected(driver) == 0
    if not on_device:
        driver.empty_device_cache()
    driver.serve("b", [*history[:num_shared], *prompt(20, family=1)], max_tokens=8)
    assert num_protected(driver) == 24 // BLOCK
    assert driver.num_kept > num_protected(driver)


def test_with_several_groups_only_loaded_blocks_are_protected(drive: MakeDriver) -> None:
    """A hit needs blocks of every group, so one group's blocks alone are useless."""
    driver = drive(windows=(0, 8))
    history = driver.serve("a", prompt(24), max_tokens=8)
    driver.serve("b", [*history, *prompt(20, family=1)], max_tokens=8)
    assert num_protected(driver) == 0
    driver.empty_device_cache()
    driver.serve("c", [*history, *prompt(20, family=2)], max_tokens=8)
    # All blocks of one group, and one window of the other.
    num_blocks = (len(history) - 1) // BLOCK
    assert num_blocks + 2 <= num_protected(driver) <= num_blocks + 3


def test_with_lazy_stores(drive: MakeDriver) -> None:
    """Blocks that the device has are not protected until it is about to evict them."""
    driver = drive(lazy=True, num_device_blocks=30, num_host_blocks=300)
    history = driver.serve("a", prompt(40), max_tokens=8)
    for family in range(1, 4):
        driver.serve(f"f{family}", prompt(60, family=family), max_tokens=4)
    assert num_protected(driver) == 0
    found = driver.found(history) // BLOCK
    assert found >= 8
    driver.serve("b", [*history, *prompt(20, family=5)], max_tokens=4)
    for family in range(6, 12):
        driver.serve(f"f{family}", prompt(60, family=family), max_tokens=4)
    assert found - 1 <= num_protected(driver) <= found


@pytest.mark.parametrize("chunk", [8, 64])
def test_a_request_larger_than_probation_evicts_protected_blocks(
    drive: MakeDriver, chunk: int
) -> None:
    driver = drive(num_host_blocks=21, num_device_blocks=40, max_num_batched_tokens=chunk)
    for turn in range(3):
        driver.serve(f"a{turn}", prompt(40), max_tokens=8)
        driver.empty_device_cache()
    assert num_protected(driver) == 10
    driver.serve("b", prompt(72, family=1), max_tokens=4)
    driver.empty_device_cache()
    assert driver.found(prompt(72, family=1)) == 72


def test_a_conversation_outlives_prompts_that_come_once(drive: MakeDriver) -> None:
    driver = drive(num_host_blocks=41, num_device_blocks=40)
    history = driver.serve("a0", prompt(16), max_tokens=8)
    driver.empty_device_cache()
    for turn in range(1, 4):
        history = driver.serve(f"a{turn}", [*history, *prompt(4, family=turn)], max_tokens=4)
        driver.empty_device_cache()
    for family in range(10, 18):
        driver.serve(f"f{family}", prompt(40, family=family), max_tokens=8)
        driver.empty_device_cache()
    assert driver.found(history) >= len(history) // 2
