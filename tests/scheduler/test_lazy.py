"""Lazy stores: blocks are stored shortly before the device evicts them, and no others."""

from typing import Any

import pytest

from simple_offload import metrics
from tests.scheduler.conftest import MakeDriver
from tests.scheduler.driver import STORE, Driver, make_request, prompt

ROOMY: dict[str, Any] = {
    "lazy": True,
    "num_device_blocks": 81,
    "num_host_blocks": 400,
    "max_num_seqs": 1,
    "max_num_batched_tokens": 8,
    "max_model_len": 40,
}
"""A device with many more blocks than are stored ahead of evictions."""

CROWDED = ROOMY | {"max_num_batched_tokens": 64, "num_host_blocks": 150}
"""The largest possible need is most of the device, and the tier is soon full."""


def keys_of(driver: Driver, *families: int) -> list[Any]:
    """Keys of the prompts of ``Driver.fill``."""
    return [
        key
        for family in families
        for key in driver.scheduler.groups.keys(
            make_request("x", prompt(21, family)).block_hashes, 0
        )
    ]


def num_lost(driver: Driver, *families: int) -> int:
    """Blocks of these prompts that neither the device nor the tier has."""
    on_device = driver.device_pool.cached_block_hash_to_block
    return sum(
        on_device.get_one_block(key) is None and not driver.tier.has(key)
        for key in keys_of(driver, *families)
    )


def skipped(driver: Driver, reason: str) -> float:
    return driver.world.ledger(metrics.SKIPPED, reason)


def dropped(driver: Driver, *reason: str) -> float:
    return driver.world.ledger(metrics.DROPPED, *reason)


# When


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize(
    ("windows", "num_states"), [((0,), 0), ((0, 8), 0), ((8,), 0), ((0,), 1), ((), 1)], ids=str
)
def test_blocks_are_stored_before_they_are_evicted_and_not_long_before(
    drive: MakeDriver, windows: tuple[int, ...], num_states: int, async_scheduling: bool
) -> None:
    """The world checks each eviction."""
    num_blocks = 80 * (len(windows) + num_states)
    driver = drive(
        **ROOMY | {"num_device_blocks": num_blocks + 1},
        windows=windows,
        num_states=num_states,
        async_scheduling=async_scheduling,
        retention=None,
    )
    driver.fill(7, first=1)
    assert driver.num_stored == 0
    assert not driver.scheduler.has_pending_work()
    driver.world.promises_no_loss = True
    driver.fill(33, first=8)
    assert driver.world.num_evicted > 20
    on_device = [b.block_hash for b in driver.device_pool.blocks if b.block_hash is not None]
    assert sum(map(driver.tier.has, on_device)) < num_blocks // 2
    assert skipped(driver, "already_stored") == dropped(driver) == 0
    driver.serve("again", prompt(21, family=1))
    assert driver.world.num_blocks_loaded > 0


@pytest.mark.parametrize("num_host_blocks", [2, 3, 7, 16, 32])
@pytest.mark.parametrize("num_states", [0, 1])
def test_stores_stop_with_a_tier_of_any_size(
    drive: MakeDriver, num_host_blocks: int, num_states: int
) -> None:
    """A stored block must not displace one equally near to its eviction: the policy would store
    that one again."""
    driver = drive(**ROOMY | {"num_host_blocks": num_host_blocks}, num_states=num_states)
    driver.fill(20)
    num_stored = driver.num_stored
    assert num_stored > 0
    for _ in range(20):
        driver.step()
        driver.copy_all()
    assert driver.num_stored == num_stored


def start_a_store(driver: Driver) -> list[Any]:
    """Fill the device until a store is in flight. Returns the keys of its blocks."""
    driver.fill(12, first=1)
    driver.start("next", prompt(21, family=90))
    while not driver.pending(STORE):
        driver.step()
    (store,) = driver.pending(STORE)
    blocks = [driver.device_pool.blocks[block_id] for block_id in store.device_blocks.tolist()]
    return [block.block_hash for block in blocks]


def test_stored_blocks_are_evicted_next(drive: MakeDriver) -> None:
    """They return to the front of the queue, in their earlier order."""
    driver = drive(**ROOMY)
    keys = start_a_store(driver)
    driver.copy(STORE)
    driver.step()
    queue = driver.device_pool.free_block_queue.get_all_free_blocks()
    front = [block.block_hash for block in queue if block.block_hash is not None][: len(keys)]
    order = [key for family in range(1, 13) for key in reversed(keys_of(driver, family))]
    assert front == [key for key in order if key in keys]
    driver.run()
    assert driver.num_stored == driver.num_kept  # each key once


def test_a_running_request_goes_on_while_stores_are_slow(drive: MakeDriver) -> None:
    """No store ends, and the device has only blocks that would need a store."""
    driver = drive(**ROOMY)
    driver.fill(30)
    free = driver.device_pool.free_block_queue.get_all_free_blocks()
    driver.device_pool.touch(rest := free[45:])
    request = driver.start("slow", prompt(9, family=45), max_tokens=30)
    for _ in range(40):
        driver.step()
    assert request.is_finished()
    assert driver.pending(STORE)
    assert driver.device_pool.get_num_free_blocks() > 0
    driver.device_pool.free_blocks(rest)
    driver.run()


# What leaves the tier


def test_a_full_tier_shares_few_blocks_with_the_device(drive: MakeDriver) -> None:
    driver = drive(**CROWDED)
    driver.fill(60, first=1)
    assert driver.tier.num_used > 140
    on_device = [b.block_hash for b in driver.device_pool.blocks if b.block_hash is not None]
    assert sum(map(driver.tier.has, on_device)) <= 24
    assert len(on_device) > 50
    in_tier = [family for family in range(1, 61) if driver.found(prompt(21, family)) == 20]
    first, last = in_tier[0], in_tier[-1]
    assert in_tier == list(range(first, last + 1))
    assert 5 * (60 - last - 1) <= len(on_device)  # nothing is lost, and one block is in a store
    assert 5 * (60 - first) > 150 + 50


def load_one(driver: Driver) -> int:
    """Fill the tier, and load five blocks of one request: the next to be evicted. Returns the
    request's family."""
    driver.fill(50, first=1)
    family = next(f for f in range(1, 50) if driver.found(prompt(21, f)) == 20)
    driver.serve("again", prompt(21, family))
    assert driver.world.num_blocks_loaded == 5
    return family


def test_loaded_blocks_leave_the_tier_first(drive: MakeDriver) -> None:
    driver = drive(**CROWDED)
    family = load_one(driver)
    driver.fill(3, first=61)
    assert driver.found(prompt(21, family)) == 0
    assert driver.found(prompt(21, family + 8)) == 20


def test_blocks_that_the_device_is_about_to_evict_leave_the_tier_last(drive: MakeDriver) -> None:
    """Whether the tier still has the block or stores it again."""
    driver = drive(**CROWDED)
    family = load_one(driver)
    driver.fill(20, first=61)
    last = keys_of(driver, family)[-1]
    assert driver.device_pool.cached_block_hash_to_block.get_one_block(last) is None
    assert driver.found(prompt(21, family)) == 20


def test_blocks_that_the_tier_still_has_are_not_stored_again(drive: MakeDriver) -> None:
    """They count as skipped once, when the device is about to evict them, even if it then frees
    them again."""
    driver = drive(**CROWDED)
    family = load_one(driver)
    hashes = make_request("x", prompt(21, family)).block_hashes
    before = driver.tier.lookup(hashes, 0, 21)
    num_skipped = skipped(driver, "already_stored")
    taken = driver.device_pool.get_new_blocks(driver.device_pool.get_num_free_blocks() - 12)
    driver.start("next", prompt(3))
    driver.step()
    driver.device_pool.free_blocks(taken)
    driver.run()
    assert driver.tier.lookup(hashes, 0, 21) == before
    assert skipped(driver, "already_stored") == num_skipped + 5


# What is lost


@pytest.mark.parametrize("num_states", [0, 1])
def test_refused_blocks_are_counted_when_they_are_evicted(
    drive: MakeDriver, num_states: int
) -> None:
    driver = drive(**ROOMY | {"store_threshold": 2}, num_states=num_states)
    on_device = driver.device_pool.cached_block_hash_to_block
    evicted = 0
    for family in range(1, 41):
        driver.start(f"f{family}", prompt(21, family))
        while driver.world.requests:
            before = set(on_device._cache)
            driver.step()
            evicted += len(before - set(on_device._cache))
            assert skipped(driver, "below_threshold") == evicted
        driver.run()
    assert evicted > 50
    assert dropped(driver) == driver.world.ledger(metrics.STORED) == 0


def test_a_burst_is_foreseen_the_second_time(drive: MakeDriver) -> None:
    """The first time, blocks are evicted before they could be stored."""
    driver = drive(**CROWDED | {"max_num_seqs": 12, "num_host_blocks": 120})
    driver.fill(40, first=1)
    lost = []
    for first in (50, 60, 70):
        for family in range(first, first + 8):
            driver.start(f"f{family}", prompt(21, family))
        driver.run()
        lost.append(dropped(driver, "too_late"))
        # Other blocks of the prompts may have left the tier since.
        assert 0 < lost[-1] <= num_lost(driver, *range(1, 80))
    assert lost[0] == lost[1] == lost[2] == dropped(driver)


def test_a_tier_without_room(drive: MakeDriver) -> None:
    """The tier has two blocks, which are always in a store."""
    driver = drive(**ROOMY | {"num_host_blocks": 3})
    driver.fill(40)
    assert dropped(driver, "tier_full") > 5
    assert dropped(driver, "too_late") == 0


# Copies that fail


def test_a_store_that_failed_is_tried_again(drive: MakeDriver) -> None:
    driver = drive(**ROOMY)
    keys = start_a_store(driver)
    driver.copy(STORE, fail=True)
    driver.run()
    assert dropped(driver, "copy_failed") == len(keys) > 6
    driver.fill(20)
    # Until the failure is reported, one step may allocate some of the first blocks.
    assert all(driver.tier.has(key) for key in keys[6:])


def test_a_store_that_keeps_failing_is_given_up(drive: MakeDriver) -> None:
    driver = drive(**ROOMY)
    last = start_a_store(driver)[-1]
    tries = 0
    for count in range(12):
        for store in driver.pending(STORE):
            copied = [driver.device_pool.blocks[id].block_hash for id in store.device_blocks]
            tries += last in copied
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
