"""Pending work: the engine goes on stepping, and need not preempt for a block."""

import pytest

from tests.scheduler.conftest import MakeDriver
from tests.scheduler.driver import STORE, Driver, prompt


def is_pending(driver: Driver) -> tuple[bool, bool]:
    """(whether the engine must go on, whether a transfer will free a device block)"""
    connector = driver.world.connector
    return connector.has_pending_push_work(), connector.has_pending_block_frees()


def test_an_admitted_load_whose_request_has_ended_frees_its_blocks(drive: MakeDriver) -> None:
    driver = drive(async_scheduling=True, kv_role="kv_producer")
    driver.serve("a", prompt(17))
    driver.empty_device_cache()
    request = driver.start("b", prompt(17), max_tokens=9)
    driver.step()
    driver.announce()
    driver.step_until(lambda: request in driver.world.scheduler.running)
    assert is_pending(driver) == (True, False)
    driver.world.abort("b")
    assert is_pending(driver) == (True, True)
    driver.run()


def test_a_store_frees_a_block_only_as_its_last_holder(drive: MakeDriver) -> None:
    driver = drive(lazy=False)
    driver.start("a", prompt(33), max_tokens=3)
    while not driver.pending(STORE):
        driver.step()
        assert not is_pending(driver)[1]
    assert "a" in driver.world.requests
    assert not is_pending(driver)[1]  # the request holds them as well
    driver.step_until(lambda: "a" not in driver.world.requests)
    assert is_pending(driver)[1]
    driver.start("b", prompt(33), max_tokens=3)
    driver.step()
    assert "b" in driver.world.requests
    assert not is_pending(driver)[1]  # "b" holds them now
    driver.run()


@pytest.mark.parametrize("num_host_blocks", [2, 4, 5])
def test_an_engine_without_requests_stops(drive: MakeDriver, num_host_blocks: int) -> None:
    """The tier has empty blocks, and the device contents that are not worth a store."""
    driver = drive(num_host_blocks=num_host_blocks, store_threshold=2)
    driver.serve("a", prompt(33))
    assert driver.num_stored == 0
    assert is_pending(driver) == (False, False)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_no_request_is_preempted_for_blocks_that_a_store_will_free(
    drive: MakeDriver, async_scheduling: bool
) -> None:
    driver = drive(num_device_blocks=11, lazy=False, async_scheduling=async_scheduling)
    driver.start("a", prompt(17))
    driver.step_until(lambda: driver.pending(STORE) and "a" not in driver.world.requests)
    assert driver.num_held == (4, 4)
    request = driver.start("b", prompt(21, family=1), max_tokens=12)
    driver.step(12)
    num_tokens = request.num_tokens
    assert num_tokens < 33  # it waits for a seventh block
    driver.step(5)
    assert (request.num_tokens, request.num_preemptions) == (num_tokens, 0)
    driver.copy(STORE)
    driver.run()
    assert request.num_preemptions == 0


@pytest.mark.parametrize("ends", [True, False])
def test_no_request_is_preempted_for_blocks_of_a_planned_store(
    drive: MakeDriver, ends: bool
) -> None:
    """The store of "a", if it has ended, comes in the step in which "b" needs a block. While both
    run in the same pool, vLLM preempts one."""
    driver = drive(num_device_blocks=10, lazy=False, max_num_batched_tokens=64)
    requests = [
        driver.start("a", prompt(16), max_tokens=1 if ends else 8),
        driver.start("b", prompt(20, family=1), max_tokens=8),
    ]
    driver.step()
    assert ("a" in driver.world.finished) == ends
    assert driver.device_pool.get_num_free_blocks() == 0
    driver.run()
    assert sum(request.num_preemptions for request in requests) == (0 if ends else 1)
    assert driver.found(prompt(16)) == 16
