"""Reset: no earlier block is found, and transfers in flight hold their blocks until their end."""

import pytest
from vllm.v1.core.sched.interface import PauseState

from tests.scheduler.conftest import MakeDriver
from tests.scheduler.driver import LOAD, STORE, Driver, prompt


def loading(drive: MakeDriver) -> Driver:
    """A driver with a request "b" whose load of ``prompt(17)`` is in flight."""
    driver = drive()
    driver.serve("a", prompt(17))
    driver.empty_device_cache()
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
    with driver.full_device():
        driver.step()
        assert driver.num_held[1] == 4
        driver.scheduler.reset_cache()
        driver.world.check()
        assert driver.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
        assert driver.num_held[1] == 0
    driver.run()
    assert driver.world.num_blocks_loaded == 0


@pytest.mark.parametrize("ended", [False, True])
def test_a_pause_that_keeps_a_loading_request_clears_nothing(
    drive: MakeDriver, ended: bool
) -> None:
    """vLLM's pause in mode "keep" schedules nothing. A request whose load has ended keeps its
    blocks, so a reset fails (docs/operations.md). Nothing is lost: the request goes on."""
    driver = loading(drive)
    vllm = driver.world.scheduler
    vllm.set_pause_state(PauseState.PAUSED_ALL)
    if ended:
        driver.copy(LOAD)
    while vllm.has_requests():
        driver.step()
        driver.copy_all()
    with pytest.raises(RuntimeError, match="Failed to reset KV cache even when"):
        vllm.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    assert driver.found(prompt(17)) == 16
    vllm.set_pause_state(PauseState.UNPAUSED)
    driver.run()
    assert driver.world.num_blocks_loaded == 4
    assert vllm.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    assert driver.found(prompt(17)) == 0
    driver.world.check_at_rest()
