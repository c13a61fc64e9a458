"""Stored blocks keep their place in the device's order of eviction, and in the tier's."""

from itertools import takewhile

import pytest

from tests.scheduler.conftest import MakeDriver
from tests.scheduler.driver import LOAD, STORE, Driver, make_request, prompt
from tests.simulation.integrity import num_safe_of


def order(driver: Driver) -> list[int]:
    """Ids of the device's free blocks, the next to be evicted first."""
    return [block.block_id for block in driver.device_pool.free_block_queue.get_all_free_blocks()]


@pytest.mark.parametrize("lazy", [None, True, False])
@pytest.mark.parametrize("num_host_blocks", [21, 200])
def test_the_device_keeps_the_prompts_of_late(
    drive: MakeDriver, lazy: bool | None, num_host_blocks: int
) -> None:
    driver = drive(lazy=lazy, num_device_blocks=31, num_host_blocks=num_host_blocks)
    driver.fill(10)
    coordinator = driver.world.scheduler.kv_cache_manager.coordinator
    kept = []
    for family in range(50, 60):
        request = make_request("looker", prompt(21, family))
        kept.append(coordinator.find_longest_cache_hit(request.block_hashes, 20)[1] // 4)
    assert kept == [0] * 4 + [kept[4]] + [5] * 5


@pytest.mark.parametrize("family", [30, 54, 55])
def test_blocks_return_to_their_place_although_the_scan_starts_over(
    drive: MakeDriver, family: int
) -> None:
    """A request hits the block where the scan stands."""
    driver = drive(
        num_device_blocks=81,
        num_host_blocks=45,
        max_num_seqs=1,
        max_num_batched_tokens=8,
        lazy=True,
    )
    driver.fill(20)
    before = order(driver)
    driver.start("a", prompt(21, family), max_tokens=40)
    driver.step_until(lambda: driver.pending(STORE))
    driver.step(2)
    assert len(order(driver)) < len(before) - 6
    driver.copy_all()
    driver.step()
    after = order(driver)
    assert after == [block_id for block_id in before if block_id in set(after)]


def num_safe(driver: Driver) -> int:
    """Free blocks at the front of the device's queue that are empty, or that the tier has too."""
    blocks = driver.device_pool.free_block_queue.get_all_free_blocks()
    has = driver.tier.has
    return len(list(takewhile(lambda b: b.block_hash is None or has(b.block_hash), blocks)))


def test_blocks_that_return_behind_the_scan_s_place_are_not_known_as_safe(
    drive: MakeDriver,
) -> None:
    """A request hits the block where the scan stands, so it starts over. It comes less far: a load
    has pinned most of the tier."""
    driver = drive(
        num_device_blocks=81,
        num_host_blocks=45,
        max_num_seqs=2,
        max_num_batched_tokens=8,
        max_model_len=100,
        lazy=True,
    )
    driver.serve("before", prompt(81, family=9))
    driver.fill(20)
    driver.start("loading", prompt(81, family=9))
    driver.step(4)
    assert len(driver.pending(LOAD)) == 1
    driver.start("a", prompt(21, family=55), max_tokens=4)
    for _ in range(7):
        driver.step()
        assert num_safe_of(driver.scheduler) <= num_safe(driver)
        if driver.pending(STORE):
            driver.copy(STORE)
    driver.run()
