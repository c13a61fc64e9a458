"""Loads: a hit is pinned when it is offered, and held until every rank is done."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import permutations

import pytest
from vllm.v1.request import RequestStatus

from tests.scheduler.conftest import MakeDriver
from tests.scheduler.driver import LOAD, Driver, make_request, prompt
from tests.scheduler.tiers import get


def stored(drive: MakeDriver, num_tokens: int = 17, **shape: object) -> Driver:
    """A driver whose tier holds the whole blocks of ``prompt(num_tokens)``. Its device holds no
    block."""
    driver = drive(**shape)
    driver.serve("before", prompt(num_tokens))
    driver.empty_device_cache()
    assert driver.found(prompt(num_tokens)) == num_tokens // 4 * 4
    return driver


@contextmanager
def full_device(driver: Driver) -> Iterator[None]:
    """A device without a free block."""
    taken = driver.device_pool.get_new_blocks(driver.device_pool.get_num_free_blocks())
    yield
    driver.device_pool.free_blocks(taken)


# A hit


@pytest.mark.parametrize("num_tokens", [14, 15, 16, 17, 18])
def test_the_last_token_is_computed(drive: MakeDriver, num_tokens: int) -> None:
    """Its logits are needed. Its block is loaded only if another block comes after it."""
    driver = stored(drive, num_tokens=20)
    tokens = prompt(20)[:num_tokens]
    driver.start("a", tokens)
    driver.step()
    (load,) = driver.pending(LOAD)
    assert len(load.host_blocks) == (num_tokens - 1) // 4
    driver.run()
    assert driver.world.finished["a"][1] == RequestStatus.FINISHED_LENGTH_CAPPED


def test_only_blocks_that_the_device_lacks_are_loaded(drive: MakeDriver) -> None:
    driver = stored(drive, num_tokens=33)
    driver.serve("short", prompt(33)[:13])
    assert driver.world.num_blocks_loaded == 3
    request = driver.start("long", prompt(33))
    driver.step()
    (load,) = driver.pending(LOAD)
    tables = driver.world.scheduler.kv_cache_manager.get_block_ids("long")
    assert load.request_id == "long"
    assert load.device_blocks.tolist() == tables[0][3:8]
    wanted = driver.scheduler.groups.keys(request.block_hashes, 0, 3, 8)
    assert [driver.host_pool.blocks[id].block_hash for id in load.host_blocks.tolist()] == wanted
    # The head is not loaded, but must not leave while its tail is loaded.
    assert driver.num_held[1] == 8
    driver.run()


def test_a_short_hit_leaves_the_rest_to_be_computed(drive: MakeDriver) -> None:
    driver = stored(drive, num_tokens=9)
    driver.serve("a", [*prompt(9)[:8], *prompt(20, family=3)])
    assert driver.world.num_blocks_loaded == 2


@pytest.mark.proves("I8")
def test_salts_do_not_see_each_other(drive: MakeDriver) -> None:
    driver = drive()
    driver.serve("red", prompt(17), salt="red")
    driver.empty_device_cache()
    assert driver.found(prompt(17), salt="red") == 16
    assert driver.found(prompt(17), salt="blue") == driver.found(prompt(17)) == 0
    driver.serve("blue", prompt(17), salt="blue")
    driver.serve("none", prompt(17))
    assert driver.world.num_blocks_loaded == 0
    driver.empty_device_cache()
    driver.serve("red again", prompt(17), salt="red")
    assert driver.world.num_blocks_loaded == 4


def test_a_request_with_prompt_logprobs_is_computed(drive: MakeDriver) -> None:
    """Prompt logprobs need every token's logits."""
    driver = stored(drive)
    request = make_request("a", prompt(17), prompt_logprobs=1, max_tokens=1)
    assert request.skip_reading_prefix_cache
    driver.world.stories["a"] = driver.world.stories["before"]
    driver.world.requests["a"] = request
    driver.world.scheduler.add_request(request)
    assert driver.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    driver.run()
    assert driver.world.num_blocks_loaded == 0
    assert driver.world.finished["a"][0] == driver.world.finished["before"][0]


# Pins


def test_repeated_lookups_pin_once(drive: MakeDriver) -> None:
    driver = stored(drive)
    request = driver.start("a", prompt(17))
    with full_device(driver):
        for _ in range(3):
            driver.step()  # vLLM looks the request up in every step
            assert request.status == RequestStatus.WAITING
            assert driver.scheduler.get_num_new_matched_tokens(request, 0) == (16, True)
        assert driver.num_held[1] == 4
        assert max(block.ref_cnt for block in driver.host_pool.blocks) == 1
    driver.run()
    assert driver.world.num_blocks_loaded == 4


def test_a_hit_is_looked_up_again_when_something_has_changed(drive: MakeDriver) -> None:
    driver = stored(drive)
    request = make_request("a", prompt(33), max_tokens=1)
    offer = driver.scheduler.get_num_new_matched_tokens
    assert offer(request, 0) == (16, True)
    assert driver.num_held == (0, 4)
    driver.start("longer", prompt(33))
    driver.drain()
    assert offer(request, 0) == (32, True)
    assert driver.num_held == (0, 8)
    assert offer(request, 16) == (16, True)  # the device has the first blocks now
    assert driver.num_held == (0, 8)
    (fifth_key,) = driver.scheduler.groups.keys(request.block_hashes, 0, 4, 5)
    fifth = get(driver.tier, fifth_key)
    assert fifth is not None
    driver.tier.drop([fifth])
    assert offer(request, 0) == (16, True)
    assert offer(request, 16) == (0, False)
    driver.world.check_at_rest()


def test_an_unused_hit_is_unpinned(drive: MakeDriver) -> None:
    driver = stored(drive)
    driver.start("a", prompt(17))
    with full_device(driver):
        driver.step()
        assert driver.num_held[1] == 4
        driver.world.abort("a")
        assert driver.num_held[1] == 0
    driver.run()


def test_a_pinned_hit_is_not_evicted(drive: MakeDriver) -> None:
    driver = stored(drive, num_host_blocks=9)
    request = make_request("a", prompt(17), max_tokens=1)
    assert driver.scheduler.get_num_new_matched_tokens(request, 0) == (16, True)
    driver.start("other", prompt(60, family=2))
    driver.drain()
    assert driver.found(prompt(17)) == 16
    assert driver.scheduler.get_num_new_matched_tokens(request, 0) == (16, True)
    driver.scheduler.request_finished(request)
    driver.world.check_at_rest()
    driver.serve("another", prompt(60, family=3))
    assert driver.found(prompt(17)) < 16


# Completion


@pytest.mark.parametrize("order", [*permutations(range(2)), *permutations(range(3))], ids=str)
def test_a_request_waits_for_every_rank(drive: MakeDriver, order: tuple[int, ...]) -> None:
    driver = stored(drive, num_ranks=len(order))
    request = driver.start("a", prompt(17))
    driver.step()
    for rank in order:
        driver.step(2)
        assert request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
        assert driver.num_held == (4, 4)
        assert driver.scheduler.has_pending_work()
        driver.copy(LOAD, rank)
    driver.step()
    assert driver.num_held == (4, 0)  # the host blocks are unpinned
    driver.step()
    assert "a" in driver.world.finished
    driver.run()


@pytest.mark.proves("I2")
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_blocks_of_an_aborted_request_are_held_until_the_end(
    drive: MakeDriver, num_ranks: int
) -> None:
    driver = stored(drive, num_ranks=num_ranks)
    driver.start("a", prompt(17), max_tokens=5)
    driver.step()
    driver.world.abort("a")
    for rank in range(num_ranks):
        driver.step(2)
        assert driver.num_held == (4, 4)
        driver.copy(LOAD, rank)
    driver.step()
    assert driver.num_held == (0, 0)
    num_stored = driver.num_stored
    driver.run()
    assert driver.num_stored == num_stored  # no block of a half-loaded request is stored
    assert driver.found(prompt(17)) == 16


def test_two_requests_load_the_same_blocks(drive: MakeDriver) -> None:
    driver = stored(drive)
    driver.start("a", prompt(17))
    driver.start("b", prompt(17))
    driver.step()
    first, second = driver.pending(LOAD)
    assert first.host_blocks.tolist() == second.host_blocks.tolist()
    assert not {*first.device_blocks.tolist()} & {*second.device_blocks.tolist()}
    driver.copy(LOAD)
    driver.step()
    assert driver.num_held[1] == 4  # for the other request
    driver.copy(LOAD)
    driver.step()
    assert driver.num_held[1] == 0
    driver.run()


def test_the_loaded_chain_is_the_most_recently_used(drive: MakeDriver) -> None:
    driver = drive(num_host_blocks=9, num_device_blocks=40)
    driver.serve("old", prompt(17))
    driver.serve("new", prompt(17, family=1))
    driver.empty_device_cache()
    driver.start("old again", prompt(17))
    driver.step()
    driver.copy(LOAD)
    driver.step()
    driver.serve("third", prompt(17, family=2))
    assert driver.found(prompt(17)) == 16
    assert driver.found(prompt(17, family=1)) == 0
