"""Sliding windows, alone and beside full attention."""

import pytest
from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock

from tests.scheduler.conftest import MakeDriver
from tests.scheduler.driver import LOAD, Driver, make_request, prompt
from tests.scheduler.tiers import get


@pytest.mark.parametrize("num_device_blocks_known", [1, 2, 3, 4, 7])
def test_a_hit_resumes_in_the_window(drive: MakeDriver, num_device_blocks_known: int) -> None:
    """The device itself has the blocks in front of the hit that the window reaches."""
    driver = drive(windows=(0, 12), num_device_blocks=60)
    driver.serve("before", prompt(37))
    driver.empty_device_cache()
    driver.serve("short", prompt(37)[: num_device_blocks_known * 4 + 1])
    num_loaded = driver.world.num_blocks_loaded
    driver.start("long", prompt(37))
    driver.step()
    (load,) = driver.pending(LOAD)
    num_missing = 9 - num_device_blocks_known
    assert len(load.device_blocks) == num_missing + min(3, num_missing)
    driver.run()
    assert driver.world.num_blocks_loaded == num_loaded + len(load.device_blocks)
    assert driver.world.finished["long"] == driver.world.finished["before"]


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("num_said", range(1, 18))
def test_the_next_turn_begins_where_the_answer_ends(
    drive: MakeDriver, num_said: int, async_scheduling: bool
) -> None:
    """By default, the device keeps the window blocks that the prompt's end needs. When the request
    ends, its table still has those of the answer's end. One length in four is an exception: there
    the window behind the last computed token begins with the next block."""
    driver = drive(windows=(0, 8), num_device_blocks=60, async_scheduling=async_scheduling)
    history = driver.serve("first", prompt(30), max_tokens=num_said)
    driver.empty_device_cache()
    num_computed = len(history) - 1
    begins = num_computed // 4 * 4 if num_computed % 4 != 3 or num_computed == 31 else 28
    assert driver.found([*history, *prompt(7, family=2)]) == begins
    driver.serve("second", [*history, *prompt(7, family=2)])
    assert driver.world.num_blocks_loaded == begins // 4 + 2


def stored_blocks(
    driver: Driver, hashes: list[BlockHash], start: int, stop: int
) -> list[KVCacheBlock]:
    """A request's blocks ``start`` to ``stop`` of the window's group that the tier has."""
    keys = driver.scheduler.groups.keys(hashes, 1, start, stop)
    return [block for key in keys if (block := get(driver.tier, key)) is not None]


def test_only_blocks_that_a_turn_may_begin_with_are_stored(drive: MakeDriver) -> None:
    """With a drafter, a hit is one block shorter, and the window has left that block."""
    driver = drive(windows=(0, 8), draft=True, num_device_blocks=90, num_host_blocks=200)
    history = driver.serve("first", prompt(30), max_tokens=17)
    hashes = make_request("second", history).block_hashes
    at_the_prompt_s_end = stored_blocks(driver, hashes, 4, 6)
    assert len(at_the_prompt_s_end) == 2
    assert stored_blocks(driver, hashes, 0, len(hashes)) == at_the_prompt_s_end
