"""Loads that every rank announces before their end: scheduled at once, held until the end."""

from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from simple_offload.metadata import StepMetadata
from tests.scheduler.conftest import MakeDriver
from tests.scheduler.driver import LOAD, Driver, prompt, record_steps
from tests.scheduler.test_loads import stored
from tests.simulation.integrity import ids_in_flight

WAITING, RUNNING = RequestStatus.WAITING_FOR_REMOTE_KVS, RequestStatus.RUNNING


class Loading:
    """A request "a" whose load of the first 16 tokens is in flight."""

    def __init__(self, drive: MakeDriver, num_tokens: int = 24, **shape: Any) -> None:
        self.driver: Driver = stored(drive, **shape)
        self.tokens = [*prompt(17)[:16], *prompt(num_tokens - 16, family=5)]
        self.request = self.driver.start("a", self.tokens, max_tokens=4)
        self.driver.step()
        (load,) = self.driver.pending(LOAD)
        self.load_id = load.id
        self.steps: list[StepMetadata] = record_steps(self.driver)

    def step_until_admitted(self) -> None:
        for _ in range(20):
            self.driver.step()
            if self.admitted:
                return
        raise AssertionError("no load is admitted")

    @property
    def admitted(self) -> list[int]:
        """Ids of the loads that the steps have admitted, in order."""
        return [load_id for step in self.steps for load_id in step.admitted]

    @property
    def num_holds(self) -> list[int]:
        """By rank, how often compute had to wait for a copy that had not ended."""
        return [rank.device.num_holds for rank in self.driver.world.ranks]


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_a_request_is_scheduled_when_every_rank_has_announced_its_load(
    drive: MakeDriver, num_ranks: int
) -> None:
    loading = Loading(drive, num_tokens=40, num_ranks=num_ranks, async_scheduling=True)
    driver, request = loading.driver, loading.request
    for rank in range(num_ranks):
        driver.step(2)
        assert request.status == WAITING
        driver.announce(LOAD, rank)
    assert loading.num_holds == [0] * num_ranks
    loading.step_until_admitted()
    assert request.status == RUNNING
    assert loading.steps[-1].computes
    assert loading.num_holds == [1] * num_ranks
    assert all(driver.pending(LOAD, rank) for rank in range(num_ranks))  # no copy has run
    driver.run()  # its tokens are right
    assert loading.admitted == [loading.load_id]
    assert driver.world.finished["a"][1] == RequestStatus.FINISHED_LENGTH_CAPPED


@pytest.mark.proves("I2")
@pytest.mark.parametrize("windows", [(0,), (0, 8)], ids=str)
def test_blocks_of_an_admitted_load_are_held_after_its_request_has_ended(
    drive: MakeDriver, windows: tuple[int, ...]
) -> None:
    loading = Loading(
        drive, num_ranks=2, windows=windows, num_device_blocks=60, async_scheduling=True
    )
    driver = loading.driver
    (load,) = driver.pending(LOAD)
    for rank in range(2):
        driver.announce(LOAD, rank)
    loading.step_until_admitted()
    driver.world.abort("a")
    assert all(driver.pending(LOAD, rank) == [load] for rank in range(2))
    for pool, ids in (
        (driver.device_pool, load.device_blocks),
        (driver.host_pool, load.host_blocks),
    ):
        assert all(pool.blocks[block_id].ref_cnt > 0 for block_id in ids.tolist())
    driver.run()
    # The tail leaves the device first.
    queue = [block.block_id for block in driver.device_pool.free_block_queue.get_all_free_blocks()]
    chain = load.device_blocks.tolist()[:4]
    assert sorted(chain, key=queue.index) == chain[::-1]


def test_a_load_that_fails_on_a_rank_when_another_has_announced_it(drive: MakeDriver) -> None:
    """The request computes its blocks again. On each rank, this comes after the rest of the
    copy."""
    loading = Loading(drive, num_ranks=2, async_scheduling=True)
    loading.driver.announce(LOAD, 0)
    loading.driver.copy(LOAD, 1, fail=True)
    loading.step_until_admitted()
    assert loading.admitted == [loading.load_id]
    loading.driver.run()
    assert loading.driver.world.finished["a"][1] == RequestStatus.FINISHED_LENGTH_CAPPED


def test_an_aborted_request_that_was_admitted_stores_its_computed_blocks(
    drive: MakeDriver,
) -> None:
    """Compute waited for its load, so its blocks are valid."""
    loading = Loading(drive)
    driver = loading.driver
    driver.announce()
    loading.step_until_admitted()
    assert loading.load_id in ids_in_flight(driver.scheduler)  # its end has not been reported yet
    driver.world.abort("a")
    num_stored = driver.num_stored
    driver.run()
    assert driver.num_stored > num_stored
    assert driver.found(loading.tokens) == 24
