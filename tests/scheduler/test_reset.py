"""Reset: no earlier block is found, and transfers in flight hold their blocks until their end."""

from typing import Any

import pytest
from vllm.v1.core.sched.interface import PauseState

from simple_offload import metrics
from tests.scheduler.conftest import MakeDriver
from tests.scheduler.driver import LOAD, STORE, Driver, prompt


def loading(drive: MakeDriver, **shape: Any) -> Driver:
    """A driver with a request "b" whose load of ``prompt(17)`` is in flight."""
    driver = drive(num_device_blocks=24, **shape)
    driver.serve("a", prompt(17))
    for family in range(6):
        driver.serve(f"fill {family}", prompt(21, family + 50))
    driver.start("b", prompt(17), max_tokens=3)
    driver.step()
    assert driver.pending(LOAD)
    return driver


@pytest.mark.proves("I2")
@pytest.mark.parametrize("fails", [False, True])
def test_a_load_in_flight_ends_without_effect(drive: MakeDriver, fails: bool) -> None:
    """If it fails, no block leaves that was stored meanwhile."""
    driver = loading(drive)
    assert not driver.world.reset(tier=True)  # the device's blocks are not free
    assert driver.num_held == (4, 4)
    driver.start("c", prompt(9, family=1))
    while driver.found(prompt(9, family=1)) == 0:
        driver.step()
        if driver.pending(STORE):
            driver.copy(STORE)
    assert driver.num_held == (4, 4)
    driver.copy(LOAD, fail=fails)
    driver.step(1 if fails else 2)  # if it succeeds, its request runs
    assert driver.num_held[1] == 0
    driver.run()
    assert driver.found(prompt(9, family=1)) == 8
    assert fails or driver.num_kept == 2  # its loaded blocks are not stored either


def test_a_pinned_hit_is_not_offered_after_a_reset(drive: MakeDriver) -> None:
    driver = drive()
    driver.serve("a", prompt(17))
    driver.empty_device_cache()
    request = driver.start("b", prompt(17))
    taken = driver.device_pool.get_new_blocks(driver.device_pool.get_num_free_blocks())
    driver.step()
    assert driver.num_held[1] == 4
    driver.scheduler.reset_cache()
    driver.world.check()
    assert driver.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    assert driver.num_held[1] == 0
    driver.device_pool.free_blocks(taken)
    driver.run()
    assert driver.world.num_blocks_loaded == 0


@pytest.mark.parametrize("keeps", [False, True])
def test_a_pause_that_keeps_a_loading_request_clears_both_caches(
    drive: MakeDriver, keeps: bool
) -> None:
    """vLLM's pause in mode "keep" schedules nothing, and clears the caches once loads have ended.
    The request has device blocks then, gives them back, and is computed."""
    driver = loading(drive, keeps_on_reset=keeps)
    vllm = driver.world.scheduler
    vllm.set_pause_state(PauseState.PAUSED_ALL)
    while vllm.has_requests():
        driver.step()
        driver.copy_all()
    assert vllm.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    assert driver.found(prompt(17)) == 0
    vllm.set_pause_state(PauseState.UNPAUSED)
    driver.run()
    assert driver.world.num_blocks_loaded == 4


def test_a_reset_that_fails_for_an_announced_load_changes_nothing(drive: MakeDriver) -> None:
    """vLLM pauses between the announcement and the end of the load, which holds its blocks."""
    driver = loading(drive, keeps_on_reset=False)
    vllm = driver.world.scheduler
    vllm.set_pause_state(PauseState.PAUSED_ALL)
    driver.announce(LOAD)
    driver.step(2)
    held = driver.num_held
    assert not vllm.reset_prefix_cache()
    assert driver.num_held == held
    vllm.set_pause_state(PauseState.UNPAUSED)
    driver.run()
    assert driver.world.ledger(metrics.PROMPT_TOKENS, "host") == 16


def test_a_reset_that_fails_for_a_running_request_changes_nothing(drive: MakeDriver) -> None:
    """All of its blocks are being stored too."""
    driver = drive(keeps_on_reset=False)
    vllm = driver.world.scheduler
    driver.start("a", prompt(16), max_tokens=3)
    driver.step()
    vllm.set_pause_state(PauseState.PAUSED_ALL)
    driver.step_until(lambda: driver.pending(STORE))
    assert not vllm.reset_prefix_cache()
    vllm.set_pause_state(PauseState.UNPAUSED)
    driver.run()
    assert driver.num_kept == 4


def test_new_weights_are_not_told_to_the_tier(drive: MakeDriver) -> None:
    """Trainers reset the device's cache alone after they have changed the model's weights."""
    driver = drive(keeps_on_reset=False)
    driver.serve("a", prompt(17))
    assert driver.found(prompt(17)) == 16
    assert driver.world.reset(tier=False)
    assert driver.found(prompt(17)) == 0
    driver.world.add_request("b", prompt(17), max_tokens=3, salt=None, epoch=1)
    driver.run()
    assert driver.world.num_blocks_loaded == 0
