"""WriteHazards: knows which free device blocks a step in flight may still touch."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager, SlidingWindowManager

from simple_offload.scheduler.write_hazards import WriteHazards
from tests.scheduler.conftest import MakeDriver
from tests.scheduler.driver import LOAD, Driver, prompt


class Tables:
    """vLLM's block tables, as far as WriteHazards reads them."""

    def __init__(self, *classes: type) -> None:
        self.managers = [cast(Any, object.__new__(each)) for each in classes]
        for manager in self.managers:
            manager.req_to_blocks = {}
        self.blocks = [KVCacheBlock(block_id, ref_cnt=1) for block_id in range(20)]
        coordinator = SimpleNamespace(single_type_managers=self.managers)
        self.hazards = WriteHazards(cast(Any, SimpleNamespace(coordinator=coordinator)), 2)

    def hold(self, request_id: str, *block_ids: int, group: int = 0) -> None:
        table = self.managers[group].req_to_blocks.setdefault(request_id, [])
        table.extend(self.blocks[block_id] for block_id in block_ids)

    def release(self, request_id: str, group: int = 0) -> None:
        self.managers[group].req_to_blocks.pop(request_id)

    def touched(self) -> set[int]:
        return {block_id for block_id in range(20) if self.hazards.may_touch([block_id])}


@pytest.fixture
def tables() -> Tables:
    return Tables(FullAttentionManager)


def test_nothing_is_touched_before_the_first_step(tables: Tables) -> None:
    tables.hold("a", 1, 2)
    tables.release("a")
    assert tables.touched() == set()


def test_blocks_given_up_since_a_recent_step(tables: Tables) -> None:
    tables.hold("a", 1, 2)
    tables.hold("b", 3)
    tables.hazards.on_step()
    tables.hold("b", 4)
    tables.release("a")
    assert tables.touched() == {1, 2}
    tables.hazards.on_step()
    assert tables.touched() == {1, 2}
    tables.hazards.on_step()
    assert tables.touched() == set()


def test_a_request_of_the_same_name_has_another_table(tables: Tables) -> None:
    tables.hold("a", 1, 2)
    tables.hazards.on_step()
    tables.release("a")
    tables.hold("a", 5)
    assert tables.touched() == {1, 2}


def test_one_block_of_many_is_enough(tables: Tables) -> None:
    tables.hold("a", 7)
    tables.hazards.on_step()
    tables.release("a")
    assert tables.hazards.may_touch(range(20))
    assert not tables.hazards.may_touch(range(7))


def test_blocks_that_a_recent_step_zeroes(tables: Tables) -> None:
    tables.hazards.on_step([3, 4])
    assert tables.touched() == {3, 4}
    tables.hazards.on_step()
    assert tables.touched() == {3, 4}
    tables.hazards.on_step()
    assert tables.touched() == set()


def test_steps_without_tokens_do_not_count(tables: Tables) -> None:
    tables.hold("a", 1, 2)
    tables.hazards.on_step()
    tables.release("a")
    for _ in range(5):
        tables.hazards.on_step(computes=False)
    assert tables.touched() == {1, 2}


def test_blocks_that_steps_without_tokens_zero(tables: Tables) -> None:
    tables.hazards.on_step([5], computes=False)
    assert tables.touched() == {5}
    tables.hazards.on_step()
    tables.hazards.on_step([3], computes=False)
    tables.hazards.on_step([4], computes=False)
    assert tables.touched() == {3, 4, 5}
    tables.hazards.on_step()
    assert tables.touched() == {3, 4}
    tables.hazards.on_step()
    assert tables.touched() == set()


def test_every_group_counts() -> None:
    tables = Tables(FullAttentionManager, FullAttentionManager)
    tables.hold("a", 1)
    tables.hold("a", 2, group=1)
    tables.hazards.on_step()
    tables.release("a", group=1)
    assert tables.touched() == {2}


def test_with_windows_every_block_may_be_touched() -> None:
    tables = Tables(FullAttentionManager, SlidingWindowManager)
    assert len(tables.touched()) == len(tables.blocks)


# With vLLM's scheduler


def fill_tier(driver: Driver) -> None:
    """Store a prompt in the tier, and empty the device's cache."""
    driver.serve("first", prompt(33))
    driver.empty_device_cache()


def next_load_waits(driver: Driver) -> bool:
    """Whether the next planned load comes after compute."""
    for _ in range(20):
        driver.step()
        if driver.pending(LOAD):
            (load,) = driver.pending(LOAD)
            return load.after_compute
        driver.copy_all()
    raise AssertionError("no load")


def test_a_load_into_blocks_that_were_free_does_not_wait(drive: MakeDriver) -> None:
    """A running request makes no difference."""
    driver = drive(async_scheduling=True, num_device_blocks=60)
    fill_tier(driver)
    driver.start("other", prompt(5, family=1), max_tokens=12)
    driver.step(4)
    driver.start("again", prompt(33))
    assert not next_load_waits(driver)
    driver.run()


def test_a_load_into_blocks_that_a_drafter_is_writing_waits_for_it(drive: MakeDriver) -> None:
    """vLLM's V2 runner returns the output that ends the request before its drafter has run. Steps
    without tokens then run until the store has ended."""
    driver = drive(draft=True, num_drafted=3, v2_runner=True, num_device_blocks=60)
    fill_tier(driver)
    driver.start("other", prompt(30, family=1), max_tokens=4)
    while "other" not in driver.world.finished:
        driver.step()
    driver.step(5)
    driver.start("again", prompt(33))
    assert next_load_waits(driver)
    driver.run()


@pytest.mark.proves("I3")
def test_a_load_into_blocks_of_a_step_in_flight_waits_for_it(drive: MakeDriver) -> None:
    """All blocks belong to the running request, which is aborted while its next step is in
    flight."""
    driver = drive(async_scheduling=True, num_device_blocks=11)
    driver.serve(
        "other before", prompt(37, family=3)
    )  # already stored, so nothing holds its blocks
    fill_tier(driver)
    driver.start("other", prompt(37, family=3), max_tokens=4)
    while driver.world.requests["other"].num_computed_tokens < 37:
        driver.step()
        driver.copy_all()
    driver.world.abort("other")
    driver.start("again", prompt(33))
    assert next_load_waits(driver)
    driver.run()


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
    driver.start("again", prompt(33))
    assert next_load_waits(driver)
    driver.run()
