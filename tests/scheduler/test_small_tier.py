"""Tiers too small for one request: they keep its first blocks, and store nothing twice."""

import pytest

from tests.scheduler.conftest import MakeDriver
from tests.scheduler.driver import STORE, prompt

SMALL = pytest.mark.parametrize("num_host_blocks", [2, 4, 9, 14])


@SMALL
@pytest.mark.parametrize("windows", [(0,), (8, 0), (0, 6, 6)], ids=str)
@pytest.mark.parametrize(("chunk", "async_scheduling"), [(8, False), (8, True), (64, False)])
def test_the_beginning_is_kept_and_found(
    drive: MakeDriver,
    num_host_blocks: int,
    windows: tuple[int, ...],
    chunk: int,
    async_scheduling: bool,
) -> None:
    driver = drive(
        num_host_blocks=num_host_blocks,
        windows=windows,
        async_scheduling=async_scheduling,
        max_num_batched_tokens=chunk,
        num_device_blocks=80,
        retention=None,
    )
    num_blocks = num_host_blocks - 1
    for turn in range(3):
        driver.serve(f"r{turn}", prompt(60), max_tokens=8)
        driver.empty_device_cache()
        assert driver.found(prompt(60)) == num_blocks // len(windows) * 4
    assert driver.num_kept == num_blocks
    assert driver.num_stored == num_blocks  # in all turns together


@SMALL
def test_slow_stores_do_not_lose_the_beginning(drive: MakeDriver, num_host_blocks: int) -> None:
    """The request grows while its earlier blocks are still on their way."""
    driver = drive(num_host_blocks=num_host_blocks, max_num_batched_tokens=4)
    num_blocks = num_host_blocks - 1
    driver.start("a", prompt(60), max_tokens=8)
    while driver.world.requests:
        driver.step(3)
        if driver.pending(STORE):
            driver.copy(STORE)
    driver.run()
    assert driver.found(prompt(60)) == num_blocks * 4
    assert driver.num_stored == num_blocks


@pytest.mark.parametrize("windows", [(0,), (0, 8)], ids=str)
def test_alternating_requests_store_no_more_than_each_alone(
    drive: MakeDriver, windows: tuple[int, ...]
) -> None:
    """Two requests whose blocks do not fit together."""
    driver = drive(windows=windows, num_host_blocks=20, num_device_blocks=80)
    for turn in range(6):
        before = driver.num_stored
        driver.serve(f"r{turn}", prompt(60, family=turn % 2), max_tokens=8)
        driver.empty_device_cache()
        assert driver.num_stored - before <= 16 * len(windows)
        assert driver.found(prompt(60, family=turn % 2)) >= 19 // len(windows) * 4 - 4 * 4


def test_concurrent_requests_are_stored_at_most_twice(drive: MakeDriver) -> None:
    """Each request is stored while it runs. At its end, the policy stores the blocks again that the
    other displaced."""
    driver = drive(num_host_blocks=13, num_device_blocks=80, max_num_batched_tokens=16)
    for turn in range(4):
        before = driver.num_stored
        for family in (0, 1):
            driver.start(f"r{turn}.{family}", prompt(40, family), max_tokens=8)
        driver.run()
        driver.empty_device_cache()
        assert driver.num_stored - before <= 2 * (2 * 11)
        assert driver.found(prompt(40)) + driver.found(prompt(40, family=1)) > 0
