"""Metrics of the scheduler side have exact counts."""

from typing import Any

import pytest

from simple_offload import metrics
from simple_offload.scheduler.rank_reports import Ended, TransferLedger
from simple_offload.scheduler.stores import Stores
from simple_offload.scheduler.tier.run import Run
from tests.scheduler.conftest import MakeDriver
from tests.scheduler.driver import LOAD, STORE, Driver, prompt
from tests.scheduler.tiers import BLOCK_SIZE, key, make_tier, store
from tests.simulation.integrity import groups_of, pool_of
from tests.simulation.ledger import Ledger

THREE = prompt(3 * BLOCK_SIZE)


def make_driver(drive: MakeDriver, **shape: Any) -> tuple[Driver, Ledger]:
    driver = drive(**({"num_device_blocks": 40, "num_host_blocks": 41} | shape))
    return driver, driver.world.ledger


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("is_announced", [False, True])
def test_a_prompt_stored_and_loaded(drive: MakeDriver, num_ranks: int, is_announced: bool) -> None:
    """Blocks are counted once, bytes on each rank."""
    driver, counted = make_driver(drive, num_ranks=num_ranks)
    block_bytes = driver.world.shape.block_bytes()
    driver.serve("r", THREE)
    assert counted(metrics.CAPACITY) == 40
    assert counted(metrics.HOST_BYTES) == 41 * block_bytes * num_ranks
    assert counted(metrics.STORED) == counted(metrics.USED) == 3
    assert counted(metrics.PINNED) == 0
    assert counted(metrics.BYTES, "store", "host") == 3 * block_bytes * num_ranks
    assert counted(metrics.LOOKUPS, "miss") == 1
    driver.empty_device_cache()
    driver.start("s", [*THREE, 1])
    driver.step()
    assert counted(metrics.PINNED) == 3
    if is_announced:
        for rank in range(num_ranks):
            driver.announce(rank=rank)
        driver.step(2)
    driver.run()
    assert counted(metrics.PINNED) == 0
    assert counted(metrics.LOADED) == 3
    assert counted(metrics.PROMPT_TOKENS, "host") == 3 * BLOCK_SIZE
    assert counted(metrics.LOOKUPS, "hit") == 1
    assert counted(metrics.LOOKUPS) == 2
    how = "sync" if is_announced else "async"
    assert counted(metrics.LOADS, how) == counted(metrics.LOADS) == 1
    assert counted(metrics.BYTES, "load", "host") == 3 * block_bytes * num_ranks
    assert counted(metrics.BYTES) == 6 * block_bytes * num_ranks
    for direction in ("load", "store"):
        for name in (metrics.SECONDS, metrics.WAIT_SECONDS, metrics.BANDWIDTH):
            assert len(counted.samples(name, direction)) == num_ranks
            assert min(counted.samples(name, direction)) >= 0
    assert counted(metrics.FAILED) == counted(metrics.DROPPED) == counted(metrics.EVICTED) == 0


def test_evictions(drive: MakeDriver) -> None:
    """The device has room for two prompts, the tier for one. Three blocks are kept safe."""
    driver, counted = make_driver(drive, num_device_blocks=26, num_host_blocks=13)
    long = [prompt(12 * BLOCK_SIZE, family) for family in range(3)]
    driver.serve("r", long[0])
    driver.empty_device_cache()
    driver.serve("s", long[1])
    driver.serve("again", [*long[0], 1])
    assert counted(metrics.EVICTED, "copy") == counted(metrics.EVICTED) == 3
    driver.serve("t", long[2])
    copies, others = counted(metrics.EVICTED, "copy"), counted(metrics.EVICTED, "lru")
    assert copies > 3
    assert others > 0
    assert copies + others == counted(metrics.EVICTED) == counted(metrics.STORED) - 12
    assert counted(metrics.USED) == 12
    driver.scheduler.reset_cache()
    driver.serve("u", [1])
    assert counted(metrics.EVICTED, "reset") == 12
    assert counted(metrics.USED) == 0


@pytest.mark.parametrize("lazy", [None, True, False])
def test_contents_that_are_lost_unstored(drive: MakeDriver, lazy: bool | None) -> None:
    """When the device loses them; or when they are complete, if they are to be stored then."""
    driver, counted = make_driver(drive, lazy=lazy, num_host_blocks=3)
    driver.serve("r", THREE)
    num_stored = 0 if lazy else 2
    assert counted(metrics.STORED) == num_stored
    assert counted(metrics.DROPPED, "tier_full") == (lazy is False)
    driver.empty_device_cache()
    driver.serve("s", [1])
    assert counted(metrics.DROPPED) == 3 - num_stored


@pytest.mark.parametrize(
    "shape", [{"lazy": False}, {"num_states": 1}, {"num_sub_blocks": 3}], ids=str
)
def test_refused_blocks_are_counted_once_when_they_are_complete(
    drive: MakeDriver, shape: dict[str, Any]
) -> None:
    driver, counted = make_driver(drive, store_threshold=2, **shape)
    driver.serve("r", [*THREE, 1])  # vLLM 0.31 keeps no state at the end of a prompt
    num_refused = {"lazy": 3, "num_states": 3 + 1, "num_sub_blocks": 1}[next(iter(shape))]
    driver.empty_device_cache()
    driver.serve("s", [1])
    assert counted(metrics.SKIPPED, "below_threshold") == counted(metrics.SKIPPED) == num_refused
    assert counted(metrics.DROPPED) == counted(metrics.STORED) == 0


@pytest.mark.parametrize("reason", ["copy_failed", "reset"])
def test_a_store_that_is_dropped_in_flight(drive: MakeDriver, reason: str) -> None:
    driver, counted = make_driver(drive, num_ranks=2)
    driver.start("r", THREE)
    driver.step(3)
    if reason == "reset":
        driver.scheduler.reset_cache()
    else:
        driver.copy(STORE, rank=0, fail=True)
    driver.run()
    assert counted(metrics.DROPPED, reason) == counted(metrics.DROPPED) == 3
    num_failed = 1 if reason == "copy_failed" else 0
    assert counted(metrics.FAILED, "store", "copy_error") == counted(metrics.FAILED) == num_failed
    assert counted(metrics.STORED) == 0


def test_a_failed_load(drive: MakeDriver) -> None:
    driver, counted = make_driver(drive)
    driver.serve("r", THREE)
    driver.empty_device_cache()
    driver.start("s", [*THREE, 1])
    driver.step()
    driver.copy(LOAD, fail=True)
    driver.run()
    assert counted(metrics.FAILED, "load", "copy_error") == counted(metrics.FAILED) == 1
    assert counted(metrics.EVICTED, "load_failed") == 3
    assert counted(metrics.LOADED) == 0
    assert counted(metrics.BYTES, "load", "host") == 0


def test_a_block_whose_contents_came_another_way_is_obsolete() -> None:
    """The scheduler side plans no key twice."""
    tier, meter, counted = make_tier(4), metrics.Meter(), Ledger()
    stores = Stores(tier, groups_of(tier), TransferLedger(num_ranks=1), meter)
    device = pool_of(make_tier(4))
    stores.plan(Run(device.blocks[1:3], [key("a"), key("ab")]), set(), device)
    [transfer] = stores.submit()
    store(tier, "a")
    stores.on_ended(Ended(transfer.id, ok=True))
    counted.add(meter.drain())
    assert counted(metrics.DROPPED, "obsolete") == counted(metrics.DROPPED) == 1
