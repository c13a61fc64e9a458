"""Stores: blocks are found when every rank has stored them, and pinned until then."""

from itertools import permutations

import pytest

from tests.scheduler.conftest import MakeDriver
from tests.scheduler.driver import STORE, Driver, prompt


def run_until_stores(driver: Driver, *request_ids: str) -> None:
    """Step until these requests have ended and a store has been submitted."""
    driver.step_until(lambda: driver.world.requests.keys().isdisjoint(request_ids))
    driver.step_until(lambda: driver.pending(STORE))


@pytest.mark.proves("I1")
@pytest.mark.proves("I2")
@pytest.mark.parametrize("order", [*permutations(range(2)), *permutations(range(3))], ids=str)
def test_found_only_when_every_rank_is_done(drive: MakeDriver, order: tuple[int, ...]) -> None:
    driver = drive(num_ranks=len(order), lazy=False)
    request = driver.start("a", prompt(17))
    run_until_stores(driver, "a")
    (transfer,) = driver.pending(STORE)
    for rank in order:
        driver.step(2)
        assert driver.found(prompt(17)) == 0
        assert driver.num_held == (4, 4)
        assert driver.scheduler.has_pending_work()
        driver.copy(STORE, rank)
    driver.step()
    assert driver.found(prompt(17)) == 16
    assert driver.num_held == (0, 0)
    assert not driver.scheduler.has_pending_work()
    # Committed with the bytes that every rank has copied.
    stored = [driver.host_pool.blocks[block_id] for block_id in transfer.host_blocks.tolist()]
    keys = driver.scheduler.groups.keys(request.block_hashes, 0)
    assert [block.block_hash for block in stored] == keys
    # On the device, too, the tail leaves first.
    free = driver.device_pool.free_block_queue.get_all_free_blocks()
    assert [block.block_hash for block in free if block.block_hash] == keys[::-1]
    driver.empty_device_cache()
    driver.serve("b", prompt(17))
    assert driver.world.num_blocks_loaded == 4 * len(order)
