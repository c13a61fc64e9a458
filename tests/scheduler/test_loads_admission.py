"""Loads that every rank announces before their end: scheduled at once, held until the end."""

from collections.abc import Callable
from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from simple_offload.metadata import StepMetadata
from simple_offload.scheduler.loads import Loads
from tests.scheduler.conftest import MakeDriver
from tests.scheduler.driver import LOAD, Driver, prompt, record_steps
from tests.scheduler.test_loads import stored
from tests.simulation.integrity import ids_in_flight

WAITING, RUNNING = RequestStatus.WAITING_FOR_REMOTE_KVS, RequestStatus.RUNNING


def loading(drive: MakeDriver, num_tokens: int = 17, **shape: Any) -> tuple[Driver, int]:
    """A driver with a request "a" whose load of the first 16 tokens is in flight, and the load's
    id."""
    driver = stored(drive, **shape)
    driver.start("a", [*prompt(17)[:16], *prompt(num_tokens - 16, family=5)], max_tokens=4)
    driver.step()
    (load,) = driver.pending(LOAD)
    return driver, load.id


def loads_of(driver: Driver) -> Loads:
    return driver.scheduler._loads


def admit(driver: Driver, *request_ids: str) -> None:
    loads_of(driver).admit(request_ids, driver.scheduler._device_pool)


def step_while(driver: Driver, is_unfinished: Callable[[], bool]) -> None:
    """Step until the condition is false."""
    for _ in range(20):
        if not is_unfinished():
            return
        driver.step()
    raise AssertionError("the condition stays true")


def num_holds(driver: Driver) -> list[int]:
    """By rank, how often compute had to wait for a copy that had not ended."""
    return [rank.device.num_holds for rank in driver.world.ranks]


def admitted(steps: list[StepMetadata]) -> list[int]:
    """Ids of the loads that these steps admit, in order."""
    return [load_id for step in steps for load_id in step.admitted]


# From announcement to end


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_a_request_is_scheduled_when_every_rank_has_announced_its_load(
    drive: MakeDriver, num_ranks: int
) -> None:
    driver, load_id = loading(drive, num_ranks=num_ranks, async_scheduling=True)
    steps = record_steps(driver)
    request = driver.world.requests["a"]
    for rank in range(num_ranks):
        driver.step(2)
        assert request.status == WAITING
        driver.announce(LOAD, rank)
    assert admitted(steps) == []
    assert num_holds(driver) == [0] * num_ranks
    step_while(driver, lambda: request.status == WAITING)
    assert request.status == RUNNING
    assert steps[-1].admitted == [load_id]
    assert steps[-1].computes
    assert num_holds(driver) == [1] * num_ranks
    assert all(driver.pending(LOAD, rank) for rank in range(num_ranks))  # no copy has run
    driver.run()
    assert admitted(steps) == [load_id]


@pytest.mark.proves("I2")
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)], ids=str)
def test_blocks_are_held_until_every_rank_has_reported_the_end(
    drive: MakeDriver, order: tuple[int, ...]
) -> None:
    """Blocks of an admitted load have references even after its request has ended."""
    driver, load_id = loading(drive, num_ranks=3)
    admit(driver, "a")
    assert loads_of(driver).drain_admitted() == [load_id]
    driver.world.abort("a")
    driver.step()
    for rank in order:
        driver.step(2)
        assert ids_in_flight(driver.scheduler) >= {load_id}
        pinned = [block.ref_cnt for block in driver.host_pool.blocks if block.block_hash]
        assert pinned == [1] * 4
        assert driver.num_held[0] >= 4
        driver.copy(LOAD, rank)
    driver.step()
    assert load_id not in ids_in_flight(driver.scheduler)
    driver.run()


def test_tokens_behind_an_admitted_load_are_computed_and_right(drive: MakeDriver) -> None:
    """The driver checks the request's tokens at its end."""
    driver, _ = loading(drive, num_tokens=40, async_scheduling=True)
    driver.announce()
    step_while(driver, lambda: "a" in driver.world.requests)
    assert num_holds(driver) == [1]
    driver.run()
    assert driver.world.finished["a"][1] == RequestStatus.FINISHED_LENGTH_CAPPED


def test_a_load_that_fails_on_a_rank_when_another_has_announced_it(drive: MakeDriver) -> None:
    """The request computes its blocks again. On each rank, this comes after the rest of the
    copy."""
    driver, load_id = loading(drive, num_ranks=2, async_scheduling=True)
    steps = record_steps(driver)
    driver.announce(LOAD, 0)
    driver.copy(LOAD, 1, fail=True)
    step_while(driver, lambda: not admitted(steps))
    assert admitted(steps) == [load_id]
    driver.run()
    assert driver.world.finished["a"][1] == RequestStatus.FINISHED_LENGTH_CAPPED


# Bookkeeping


def test_a_load_is_admitted_once_and_named_once(drive: MakeDriver) -> None:
    driver, load_id = loading(drive)
    loads = loads_of(driver)
    admit(driver)
    admit(driver, "b")
    assert (loads.drain_admitted(), loads.is_loading("a")) == ([], True)
    admit(driver, "b", "a")
    assert not loads.is_loading("a")
    admit(driver, "a")
    assert loads.drain_admitted() == [load_id]
    admit(driver, "a")
    assert loads.drain_admitted() == []
    assert not loads.is_loading("a")
    assert not loads.idle
    driver.run()
    assert loads.idle


def test_a_load_that_has_ended_is_not_admitted(drive: MakeDriver) -> None:
    """Nothing is left to wait for."""
    driver, _ = loading(drive)
    steps = record_steps(driver)
    driver.copy(LOAD)
    driver.run()
    assert admitted(steps) == []
    assert num_holds(driver) == [0]


def test_several_loads_are_named_together(drive: MakeDriver) -> None:
    driver = stored(drive)
    for name in ("a", "b", "c"):
        driver.start(name, prompt(17))
    driver.step()
    first, second, third = (load.id for load in driver.pending(LOAD))
    loads = loads_of(driver)
    admit(driver, "c", "a")
    admit(driver, "b")
    assert loads.drain_admitted() == [first, third, second]
    driver.run()


def test_an_aborted_request_that_is_still_loading_stores_nothing(drive: MakeDriver) -> None:
    driver, _ = loading(drive, num_tokens=24, async_scheduling=True)
    num_stored = driver.num_stored
    driver.world.abort("a")
    driver.run()
    assert driver.num_stored == num_stored


def test_an_aborted_request_that_was_admitted_stores_its_computed_blocks(
    drive: MakeDriver,
) -> None:
    """Compute waited for its load, so its blocks are valid."""
    driver, load_id = loading(drive, num_tokens=24)
    steps = record_steps(driver)
    driver.announce()
    step_while(driver, lambda: driver.world.requests["a"].status == WAITING)
    assert steps[-1].admitted == [load_id]
    assert load_id in ids_in_flight(driver.scheduler)  # its end has not been reported yet
    driver.world.abort("a")
    num_stored = driver.num_stored
    driver.run()
    assert driver.num_stored > num_stored
    assert driver.found([*prompt(17)[:16], *prompt(8, family=5)]) == 24
