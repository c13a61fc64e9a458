"""LazyPolicy: counts the fate of blocks that the device evicts, and tries failed copies again."""

import pytest

from simple_offload import metrics
from tests.scheduler.conftest import MakeDriver
from tests.scheduler.driver import STORE, Driver, make_request, prompt
from tests.scheduler.test_lazy import (
    CROWDED,
    ROOMY,
    fill,
    load_one,
    start_a_store,
)
from tests.scheduler.tiers import get


def counted(driver: Driver, name: str, reason: str) -> float:
    return driver.world.ledger(name, reason)


def num_lost(driver: Driver, families: range) -> int:
    """Blocks of these families' prompts that neither the device nor the tier has."""
    stores, cached = driver.scheduler._stores, driver.device_pool.cached_block_hash_to_block
    keys = [
        key
        for family in families
        for key in driver.scheduler.groups.keys(
            make_request("x", prompt(21, family)).block_hashes, 0
        )
    ]
    return sum(cached.get_one_block(key) is None and not stores.has(key) for key in keys)


def test_blocks_stored_in_time_are_neither_skipped_nor_dropped(drive: MakeDriver) -> None:
    driver = drive(**ROOMY)
    fill(driver, 40)
    assert counted(driver, metrics.SKIPPED, "already_stored") == 0
    assert driver.world.ledger(metrics.DROPPED) == 0
    assert driver.world.ledger(metrics.STORED) > 50


def test_loaded_blocks_are_skipped(drive: MakeDriver) -> None:
    """A loaded block counts once, when the device is about to evict it."""
    driver = drive(**ROOMY)
    fill(driver, 40)
    driver.serve("again", prompt(21, family=1))
    assert driver.world.num_blocks_loaded > 0
    num_loaded = driver.world.num_blocks_loaded
    assert counted(driver, metrics.SKIPPED, "already_stored") == 0
    fill(driver, 40, first=50)
    assert counted(driver, metrics.SKIPPED, "already_stored") == num_loaded
    assert driver.world.ledger(metrics.DROPPED) == 0


def test_blocks_that_no_second_request_had_are_refused(drive: MakeDriver) -> None:
    driver = drive(**ROOMY | {"store_threshold": 2})
    fill(driver, 40)
    lost = num_lost(driver, range(1, 41))
    assert lost > 100
    assert counted(driver, metrics.SKIPPED, "below_threshold") == lost
    assert driver.world.ledger(metrics.DROPPED) == driver.world.ledger(metrics.STORED) == 0


@pytest.mark.parametrize("num_states", [0, 1])
def test_refused_blocks_are_counted_when_they_are_evicted(
    drive: MakeDriver, num_states: int
) -> None:
    driver = drive(**ROOMY | {"store_threshold": 2}, num_states=num_states)
    cached = driver.device_pool.cached_block_hash_to_block
    evicted = 0
    for family in range(1, 41):
        driver.start(f"f{family}", prompt(21, family))
        while driver.world.requests:
            before = set(cached._cache)
            driver.step()
            evicted += len(before - set(cached._cache))
            assert counted(driver, metrics.SKIPPED, "below_threshold") == evicted
        driver.run()
    assert evicted > 50


def test_blocks_evicted_before_they_could_be_stored(drive: MakeDriver) -> None:
    """The cause is a burst that no policy can foresee."""
    driver = drive(**CROWDED | {"max_num_seqs": 12, "num_host_blocks": 120})
    fill(driver, 40)
    for family in range(50, 60):
        driver.start(f"f{family}", prompt(21, family))
    driver.run()
    too_late = counted(driver, metrics.DROPPED, "too_late")
    assert too_late > 5
    assert driver.world.ledger(metrics.DROPPED) == too_late
    # Other blocks of the prompt may have left the tier since.
    assert too_late <= num_lost(driver, range(1, 60))


def test_a_burst_that_has_been_seen_is_foreseen(drive: MakeDriver) -> None:
    driver = drive(**CROWDED | {"max_num_seqs": 12, "num_host_blocks": 120})
    fill(driver, 40)
    lost = []
    for first in (50, 60, 70):
        for family in range(first, first + 8):
            driver.start(f"f{family}", prompt(21, family))
        driver.run()
        lost.append(counted(driver, metrics.DROPPED, "too_late"))
    assert lost[0] == lost[1] == lost[2]


def test_a_tier_without_room(drive: MakeDriver) -> None:
    """The tier has two blocks, which are always in a store."""
    driver = drive(**ROOMY | {"num_host_blocks": 3})
    fill(driver, 40)
    assert counted(driver, metrics.DROPPED, "tier_full") > 5
    assert counted(driver, metrics.DROPPED, "too_late") == 0


# Copies that fail


def test_a_store_that_failed_is_tried_again(drive: MakeDriver) -> None:
    driver = drive(**ROOMY)
    _, held = start_a_store(driver)
    # Until the failure is reported, one step may allocate some of the first blocks.
    keys = [block.block_hash for block in held[6:]]
    driver.copy(STORE, fail=True)
    driver.run()
    assert counted(driver, metrics.DROPPED, "copy_failed") == len(held) > 0
    fill(driver, 20, first=50)
    assert all(key is not None and get(driver.tier, key) is not None for key in keys)


def test_a_store_that_keeps_failing_is_given_up(drive: MakeDriver) -> None:
    driver = drive(**ROOMY)
    _, held = start_a_store(driver)
    tries = 0
    for count in range(12):
        if any(held[-1].block_id in store.device_blocks for store in driver.pending(STORE)):
            tries += 1
        while driver.pending(STORE):
            driver.copy(STORE, fail=True)
        driver.start(f"short {count}", prompt(1))
        driver.step()
    driver.run()
    assert tries == 3
    assert driver.tier.num_used == 0


def test_a_block_with_new_contents_is_tried_as_often(drive: MakeDriver) -> None:
    driver = drive(**ROOMY)
    for family in range(1, 60):
        driver.start(f"f{family}", prompt(21, family))
        for _ in range(4):
            while driver.pending(STORE):
                driver.copy(STORE, fail=family < 40)
            driver.step()
    driver.run()
    assert driver.tier.num_used > 20


def test_a_demoted_block_that_the_device_frees_again_is_skipped(drive: MakeDriver) -> None:
    driver = drive(**CROWDED)
    load_one(driver)
    num_skipped = counted(driver, metrics.SKIPPED, "already_stored")
    taken = driver.device_pool.get_new_blocks(driver.device_pool.get_num_free_blocks() - 12)
    driver.start("next", prompt(3))
    driver.step()
    driver.device_pool.free_blocks(taken)
    driver.run()
    assert counted(driver, metrics.SKIPPED, "already_stored") == num_skipped + 5
