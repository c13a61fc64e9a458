"""Failed loads, and ranks that have lost a copy thread."""

import pytest
from vllm.v1.request import RequestStatus

from simple_offload.backends.base import Direction
from simple_offload.scheduler.tier.run import Run
from tests.scheduler.conftest import MakeDriver
from tests.scheduler.driver import LOAD, STORE, Driver, prompt
from tests.simulation.integrity import ids_in_flight

BOTH_GROUPS = pytest.mark.parametrize("windows", [(0,), (0, 8)], ids=str)


def stored(drive: MakeDriver, **shape: object) -> Driver:
    """A driver whose tier holds ``prompt(33)`` and more of another branch. Its device holds no
    block."""
    driver = drive(num_device_blocks=60, num_host_blocks=90, **shape)
    driver.serve("before", prompt(33))
    driver.serve("branch", [*prompt(33)[:20], *prompt(13, family=5)])
    driver.empty_device_cache()
    return driver


# A load that fails


def fail_load(driver: Driver, request_id: str, failing: int = 0) -> list[int]:
    """Start a load of ``prompt(33)``, fail it on one rank, and wait for its end. Returns its host
    blocks."""
    driver.start(request_id, prompt(33), max_tokens=3)
    driver.step()
    [load] = driver.pending(LOAD)
    for rank in range(driver.world.shape.num_ranks):
        driver.copy(LOAD, rank, fail=rank == failing)
    while load.id in ids_in_flight(driver.scheduler):
        driver.step()
        assert not driver.pending(LOAD)  # its request gets no other hit
    blocks: list[int] = load.host_blocks.tolist()
    return blocks


@pytest.mark.proves("I5")
@BOTH_GROUPS
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_recompute(
    drive: MakeDriver,
    windows: tuple[int, ...],
    async_scheduling: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    driver = stored(drive, windows=windows, num_ranks=2, async_scheduling=async_scheduling)
    fail_load(driver, "a")
    assert "recomputes or fails, as kv_load_failure_policy says" in caplog.text
    driver.run()
    assert driver.world.finished["a"][1] == RequestStatus.FINISHED_LENGTH_CAPPED


@pytest.mark.proves("I5")
@BOTH_GROUPS
@pytest.mark.parametrize("failing", [0, 1])
def test_blocks_that_a_load_failed_to_read_are_dropped(
    drive: MakeDriver, windows: tuple[int, ...], failing: int
) -> None:
    """Otherwise each later request might load them and fail."""
    driver = stored(drive, windows=windows, num_ranks=2)
    loaded = fail_load(driver, "a", failing=failing)
    kept = driver.host_pool.blocks
    assert all(kept[block_id].block_hash is None for block_id in loaded)
    assert driver.found(prompt(33)) == 0
    assert driver.found([*prompt(33)[:20], *prompt(13, family=5)]) == 0  # its head was one of them
    driver.run()
    driver.empty_device_cache()
    assert driver.found(prompt(33)) == 32  # stored anew
    num_loaded = driver.world.num_blocks_loaded
    driver.serve("b", prompt(33))
    assert driver.world.num_blocks_loaded == num_loaded + 2 * len(loaded)


def test_a_request_whose_load_failed_gets_no_other(drive: MakeDriver) -> None:
    """Although the tier has got the contents again while other ranks still copied."""
    driver = stored(drive, num_ranks=2)
    request = driver.start("a", prompt(33))
    driver.step()
    driver.copy(LOAD, rank=0, fail=True)
    driver.step()
    keys = driver.scheduler.groups.keys(request.block_hashes, 0)
    blocks = driver.tier.allocate(len(keys))
    driver.tier.commit(Run([], keys, on_device=False, host_blocks=blocks))
    assert driver.found(prompt(33)) == 32
    num_loaded = driver.world.num_blocks_loaded
    driver.drain()
    assert driver.world.num_blocks_loaded == num_loaded


@pytest.mark.parametrize("lazy", [None, False])
def test_what_was_to_be_loaded_after_a_prefix_on_the_device_is_stored_anew(
    drive: MakeDriver, lazy: bool | None
) -> None:
    """vLLM frees the blocks that its request had, and what is known of these must not stay."""
    driver = stored(drive, lazy=lazy)
    for request_id in ("a", "b"):
        driver.serve(f"part of {request_id}", prompt(13))
        fail_load(driver, request_id)
        assert driver.found(prompt(33)) == 12
        driver.drain()
        driver.step(10)
        assert driver.found(prompt(33)) == 32
        driver.empty_device_cache()


@BOTH_GROUPS
def test_fail(drive: MakeDriver, windows: tuple[int, ...]) -> None:
    driver = stored(drive, windows=windows, load_failures="fail")
    num_stored = driver.num_stored
    fail_load(driver, "a")
    assert driver.world.finished["a"] == ([], RequestStatus.FINISHED_ERROR)
    assert driver.found(prompt(33)) == 0
    driver.run()
    assert driver.num_stored == num_stored
    driver.serve("b", prompt(33))
    assert driver.world.finished["b"][1] == RequestStatus.FINISHED_LENGTH_CAPPED


# A rank that breaks


@BOTH_GROUPS
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("direction", Direction)
def test_a_broken_rank_switches_the_tier_off(
    drive: MakeDriver,
    direction: Direction,
    rank: int,
    windows: tuple[int, ...],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The server continues without it."""
    driver = stored(drive, num_ranks=2, windows=windows)
    other = driver.start("other", prompt(9, family=2), max_tokens=60)
    # The rank's copy thread ends with its next copy.
    driver.world.ranks[rank].device.fatal[direction] += 1
    driver.start("a", prompt(33, family=3 * (direction is STORE)))
    while "a" in driver.world.requests:
        driver.step()
        driver.copy_all()
    driver.step_until(lambda: "the host tier is switched off" in caplog.text)
    assert not other.is_finished()
    driver.run()
    assert driver.num_kept == 0
    num_stored, num_loaded = driver.num_stored, driver.world.num_blocks_loaded
    driver.empty_device_cache()
    for turn in range(2):
        driver.serve(f"b{turn}", prompt(33))
        driver.empty_device_cache()
    assert (driver.num_stored, driver.world.num_blocks_loaded) == (num_stored, num_loaded)
    assert caplog.text.count("the host tier is switched off") == 1
