"""Reset: no earlier block is found, and transfers in flight hold their blocks until their end."""

import pytest
from vllm.v1.core.sched.interface import PauseState

from tests.scheduler.conftest import MakeDriver
from tests.scheduler.driver import LOAD, STORE, Driver, prompt


def with_a_store_under_way(drive: MakeDriver, **shape: object) -> Driver:
    """A driver with a store of ``prompt(17)`` in flight, whose request has ended."""
    driver = drive(**shape)
    driver.start("a", prompt(17))
    while not driver.pending(STORE):
        driver.step()
    assert "a" in driver.world.finished
    return driver


def test_stored_blocks_are_dropped(drive: MakeDriver) -> None:
    driver = drive()
    driver.serve("a", prompt(17))
    assert driver.world.reset(tier=True)
    assert driver.found(prompt(17)) == 0
    assert driver.num_kept == 0
    driver.world.check_at_rest()
    driver.serve("b", prompt(17))
    assert driver.world.num_blocks_loaded == 0
    assert driver.found(prompt(17)) == 16


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_store_in_flight_is_not_kept(drive: MakeDriver, num_ranks: int) -> None:
    driver = with_a_store_under_way(drive, num_ranks=num_ranks)
    driver.world.reset(tier=True)
    for rank in range(num_ranks):
        driver.step()
        assert driver.num_held == (4, 4)
        driver.copy(STORE, rank)
    driver.step()
    assert driver.num_held == (0, 0)
    assert driver.found(prompt(17)) == 0
    assert driver.num_kept == 0
    driver.world.check_at_rest()


def test_the_rest_of_an_ended_request_is_dropped(drive: MakeDriver) -> None:
    driver = drive()
    driver.start("a", prompt(17))
    while "a" in driver.world.requests:
        driver.step()
    assert driver.scheduler.has_pending_work()
    assert driver.num_held == (4, 0)
    driver.world.reset(tier=True)
    assert driver.num_held == (0, 0)
    assert not driver.scheduler.has_pending_work()
    driver.step()
    assert driver.pending(STORE) == []
    driver.world.check_at_rest()


def test_the_same_blocks_are_stored_anew_beside_the_old_store(drive: MakeDriver) -> None:
    driver = with_a_store_under_way(drive)
    driver.world.reset(tier=True)
    driver.start("b", prompt(17))
    while len(driver.pending(STORE)) < 2:
        driver.step()
    old, new = driver.pending(STORE)
    assert not {*old.host_blocks.tolist()} & {*new.host_blocks.tolist()}
    driver.copy(STORE)
    driver.step()
    assert driver.found(prompt(17)) == 0  # the copy was the old store's
    driver.copy(STORE)
    driver.step()
    assert driver.found(prompt(17)) == 16
    driver.run()


@pytest.mark.proves("I2")
def test_a_load_in_flight_ends_without_effect(drive: MakeDriver) -> None:
    driver = drive()
    driver.serve("a", prompt(17))
    driver.empty_device_cache()
    driver.start("b", prompt(17))
    driver.step()
    assert not driver.world.reset(tier=True)  # the device's blocks are not free
    assert driver.num_held == (4, 4)
    assert driver.found(prompt(17)) == 0
    driver.step(2)
    assert driver.num_held == (4, 4)
    driver.copy(LOAD)
    driver.step()
    assert driver.num_held[1] == 0
    driver.run()
    assert driver.num_kept == 0  # its loaded blocks are not stored either


def test_a_failed_load_after_a_reset_drops_nothing_new(drive: MakeDriver) -> None:
    driver = drive()
    driver.serve("a", prompt(17))
    driver.empty_device_cache()
    driver.start("b", prompt(17))
    driver.step()
    driver.world.reset(tier=True)
    driver.start("c", prompt(9, family=1))
    while driver.found(prompt(9, family=1)) == 0:
        driver.step()
        if driver.pending(STORE):
            driver.copy(STORE)
    driver.copy(LOAD, fail=True)
    driver.step()
    assert driver.found(prompt(9, family=1)) == 8
    driver.run()


def test_running_requests_are_not_stored_any_more(drive: MakeDriver) -> None:
    """Their blocks come from weights that may have changed."""
    driver = drive()
    driver.start("a", prompt(33), max_tokens=20)
    driver.step(3)
    driver.copy_all()
    driver.step()
    assert driver.found(prompt(33)) == 32
    assert not driver.world.reset(tier=True)
    num_stored = driver.num_stored
    driver.run()
    assert driver.num_stored == num_stored
    assert driver.num_kept == 0


def test_a_preempted_request_is_stored_again(drive: MakeDriver) -> None:
    """It starts over, so its blocks are new."""
    driver = drive()
    request = driver.start("a", prompt(17), max_tokens=8)
    driver.step(2)
    driver.copy_all()
    driver.step()
    assert driver.world.reset(tier=True, preempt=True)
    driver.run()
    assert request.num_preemptions == 1
    assert driver.found(prompt(17)) == 16


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


@pytest.mark.parametrize("ended", [False, True])
def test_a_pause_that_keeps_a_loading_request_clears_nothing(
    drive: MakeDriver, ended: bool
) -> None:
    """vLLM's pause in mode "keep" schedules nothing. A request whose load has ended keeps its
    blocks, so a reset fails (docs/operations.md). Nothing is lost: the request goes on."""
    driver = drive()
    driver.serve("a", prompt(17))
    driver.empty_device_cache()
    driver.start("b", prompt(17), max_tokens=3)
    while not driver.pending(LOAD):
        driver.step()
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
