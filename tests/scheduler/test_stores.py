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


@pytest.mark.proves("I2")
def test_blocks_of_a_preempted_request_are_held_until_the_end(drive: MakeDriver) -> None:
    driver = drive(lazy=False)
    request = driver.start("a", prompt(33), max_tokens=8)
    driver.step_until(lambda: driver.pending(STORE))
    driver.world.scheduler._preempt_request(driver.world.scheduler.running.pop(), 0.0)
    assert request.num_preemptions == 1
    assert driver.num_held == (8, 8)
    driver.world.check()
    driver.run()
    assert driver.num_stored == 10  # the eight were not stored again
    assert driver.found(prompt(33)) == 32


# Failure


@pytest.mark.proves("I5")
@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("failing_first", [False, True])
def test_a_failed_store_is_not_found_and_holds_nothing(
    drive: MakeDriver, failing: int, failing_first: bool, caplog: pytest.LogCaptureFixture
) -> None:
    driver = drive(num_ranks=2)
    driver.start("a", prompt(17))
    run_until_stores(driver, "a")
    for rank in (failing, 1 - failing) if failing_first else (1 - failing, failing):
        assert driver.num_held == (4, 4)
        driver.copy(STORE, rank, fail=rank == failing)
        driver.step()
    assert driver.num_kept == 0
    assert driver.num_held == (0, 0)
    assert "Store 0 failed on a rank: its blocks are not kept" in caplog.text
    driver.world.check_at_rest()
    # The next request computes and stores the block again.
    driver.empty_device_cache()
    driver.serve("b", prompt(17))
    assert driver.world.num_blocks_loaded == 0
    assert driver.found(prompt(17)) == 16
