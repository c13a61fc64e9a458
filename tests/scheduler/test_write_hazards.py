"""WriteHazards: a load waits for compute that may still touch its blocks, and for no other."""

import pytest

from tests.scheduler.conftest import MakeDriver
from tests.scheduler.driver import LOAD, Driver, prompt


def fill_tier(driver: Driver) -> None:
    """Store a prompt in the tier, and empty the device's cache."""
    driver.serve("first", prompt(33))
    driver.empty_device_cache()


def next_load_waits(driver: Driver) -> bool:
    """Whether the load of that prompt by a new request comes after compute."""
    driver.start("again", prompt(33))
    for _ in range(20):
        driver.step()
        if driver.pending(LOAD):
            (load,) = driver.pending(LOAD)
            driver.run()
            return load.after_compute
        driver.copy_all()
    raise AssertionError("no load")


@pytest.mark.parametrize("windows", [(0,), (0, 8)], ids=str)
def test_a_load_into_blocks_that_were_free_does_not_wait(
    drive: MakeDriver, windows: tuple[int, ...]
) -> None:
    """A running request makes no difference. With windows, all loads wait."""
    driver = drive(async_scheduling=True, num_device_blocks=90, windows=windows)
    fill_tier(driver)
    driver.start("other", prompt(5, family=1), max_tokens=12)
    driver.step(4)
    assert next_load_waits(driver) == (windows != (0,))


def test_a_load_into_blocks_that_a_drafter_is_writing_waits_for_it(drive: MakeDriver) -> None:
    """vLLM's V2 runner returns the output that ends the request before its drafter has run. Steps
    without tokens then run until the store has ended."""
    driver = drive(draft=True, num_drafted=3, v2_runner=True, num_device_blocks=60)
    fill_tier(driver)
    driver.start("other", prompt(30, family=1), max_tokens=4)
    driver.step_until(lambda: "other" in driver.world.finished)
    driver.step(5)
    assert next_load_waits(driver)


@pytest.mark.proves("I3")
@pytest.mark.parametrize(("num_steps", "waits"), [(0, True), (4, False)])
def test_a_load_into_blocks_of_a_step_in_flight_waits_for_it(
    drive: MakeDriver, num_steps: int, waits: bool
) -> None:
    """Most blocks belong to a request that is aborted while its next step is in flight."""
    driver = drive(async_scheduling=True, num_device_blocks=15, max_num_batched_tokens=64)
    # Already stored, so nothing holds its blocks.
    driver.serve("other before", prompt(37, family=3))
    fill_tier(driver)
    driver.start("running", prompt(3, family=2), max_tokens=12)
    driver.start("other", prompt(37, family=3), max_tokens=4)
    while driver.world.requests["other"].num_computed_tokens < 37:
        driver.step()
        driver.copy_all()
    driver.world.abort("other")
    for _ in range(num_steps):
        driver.step()
        driver.copy_all()
    assert next_load_waits(driver) == waits


def test_a_load_into_blocks_that_a_step_in_flight_zeroes_waits_for_it(
    drive: MakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The priority scheduler preempts their request in the same step. vLLM zeroes the new blocks of
    models whose caches differ in precision."""
    driver = drive(async_scheduling=True, num_device_blocks=60)
    fill_tier(driver)
    driver.start("other", prompt(5, family=1), max_tokens=12)
    driver.step(2)
    free = [block.block_id for block in driver.device_pool.blocks if block.ref_cnt == 0]
    scheduler = driver.world.scheduler
    with monkeypatch.context() as patched:
        patched.setattr(scheduler, "_get_new_block_ids_to_zero", lambda: free)
        driver.step()
    assert next_load_waits(driver)
