"""Stored blocks keep their place in the device's order of eviction, and in the tier's."""

from itertools import takewhile

import pytest

from tests.scheduler.conftest import MakeDriver
from tests.scheduler.driver import STORE, Driver, make_request, prompt
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


@pytest.mark.parametrize("num_lost", [1, 6])
def test_blocks_return_to_their_place_although_the_scan_starts_over(
    drive: MakeDriver, num_lost: int
) -> None:
    """It does once the tier is full, and then stores nothing more."""
    driver = drive(
        num_device_blocks=81, num_host_blocks=7, max_num_seqs=1, max_num_batched_tokens=8, lazy=True
    )
    driver.fill(20)
    before = order(driver)
    driver.tier.drop(driver.host_pool.blocks[1 : 1 + num_lost])
    driver.step_until(lambda: driver.pending(STORE))
    driver.step(2)
    assert len(order(driver)) < len(before)
    driver.copy_all()
    driver.run()
    assert order(driver) == before


def num_safe(driver: Driver) -> int:
    """Free blocks at the front of the device's queue that are empty, or that the tier has too."""
    blocks = driver.device_pool.free_block_queue.get_all_free_blocks()
    has = driver.tier.has
    return len(list(takewhile(lambda b: b.block_hash is None or has(b.block_hash), blocks)))


def test_blocks_that_return_behind_the_scan_s_place_are_not_known_as_safe(
    drive: MakeDriver,
) -> None:
    """A request hits the block where the scan stands, so it starts over, and comes less far."""
    driver = drive(
        num_device_blocks=81,
        num_host_blocks=12,
        max_num_seqs=1,
        max_num_batched_tokens=8,
        lazy=True,
    )
    driver.fill(20)
    driver.start("a", prompt(21, family=50))
    driver.step_until(lambda: driver.pending(STORE))
    driver.step(2)
    driver.copy_all()
    driver.step()
    assert 0 < num_safe_of(driver.scheduler) <= num_safe(driver)
