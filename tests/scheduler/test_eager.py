"""Eager stores: every full block is stored soon after its tokens are computed, and only once."""

from typing import Any

import pytest

from tests.scheduler.conftest import MakeDriver
from tests.scheduler.driver import STORE, Driver, prompt

ASYNC = pytest.mark.parametrize("async_scheduling", [False, True])


# While requests run


@ASYNC
@pytest.mark.parametrize("num_drafted", [0, 3])
def test_blocks_are_stored_as_they_fill_up(
    drive: MakeDriver, num_drafted: int, async_scheduling: bool
) -> None:
    """Of each request, all but the last eight blocks, in chunks of prompts and in answers."""
    driver = drive(
        async_scheduling=async_scheduling,
        num_drafted=num_drafted,
        num_device_blocks=90,
        num_host_blocks=90,
        max_model_len=120,
    )
    requests = [driver.start("0", prompt(2), max_tokens=60)]
    while driver.world.requests:
        before = [r.num_computed_tokens - r.num_output_placeholders for r in requests]
        for _ in range(2):
            driver.step()
            driver.copy_all()
        driver.step()
        for request, num_computed in zip(requests, before, strict=True):
            num_found = driver.found(list(request.all_token_ids))
            assert num_found // 4 > num_computed // 4 - 8
        if len(requests) < 3:
            count = len(requests)
            requests.append(driver.start(f"{count}", prompt(35 * count, count), max_tokens=40))
    driver.run()


def sizes_of_stores(driver: Driver) -> list[int]:
    """Number of blocks that each later step stores, until no request is left."""
    sizes = []
    while driver.world.requests or driver.world.scheduler.has_requests():
        driver.step()
        sizes.append(sum(len(store.host_blocks) for store in driver.pending(STORE)))
        driver.copy_all()
    driver.run()
    return sizes


@ASYNC
@pytest.mark.parametrize(
    ("shape", "num_prompt_tokens", "num_output_tokens", "expected"),
    [
        ({"max_model_len": 120}, 17, 76, [8, 8, 7]),
        (
            {"block_size": 64, "max_num_batched_tokens": 128, "max_model_len": 512},
            65,
            257,
            [2, 2, 1],
        ),
        ({"windows": (0, 8), "retention": None}, 17, 16, [8, 2, 2, 2, 2]),
    ],
    ids=["eight blocks", "128 tokens", "a window"],
)
def test_blocks_are_stored_in_batches(
    drive: MakeDriver,
    shape: dict[str, Any],
    num_prompt_tokens: int,
    num_output_tokens: int,
    expected: list[int],
    async_scheduling: bool,
) -> None:
    """Of at most 128 tokens: a preemption may lose a whole batch. The request's end stores the
    rest. Blocks about to leave a window do not wait."""
    driver = drive(
        async_scheduling=async_scheduling, num_device_blocks=60, num_host_blocks=60, **shape
    )
    driver.start("a", prompt(num_prompt_tokens), max_tokens=num_output_tokens)
    assert [size for size in sizes_of_stores(driver) if size] == expected


def test_found_blocks_do_not_count_for_a_batch(drive: MakeDriver) -> None:
    driver = drive(num_device_blocks=60)
    history = driver.serve("a", prompt(17), max_tokens=8)
    driver.empty_device_cache()
    driver.start("b", [*history, *prompt(28, family=1)], max_tokens=20)
    assert [size for size in sizes_of_stores(driver) if size] == [8, 4]


def test_blocks_without_room_before_do_not_wait_for_a_batch(drive: MakeDriver) -> None:
    driver = drive(num_host_blocks=11, num_device_blocks=60, max_num_seqs=2)
    driver.start("other", prompt(25, family=1))
    driver.step(3)
    assert len(driver.pending(STORE)[0].host_blocks) == 6  # pinned until the copy ends
    driver.start("a", prompt(9), max_tokens=60)
    while driver.num_stored < 6 + 4:
        driver.step()
    driver.step(2)
    assert driver.num_stored == 6 + 4
    driver.copy(STORE)
    driver.step(2)
    assert driver.num_stored == 6 + 9
    driver.copy_all()
    driver.run()


def test_blocks_found_on_the_device_are_stored_if_the_tier_lacks_them(drive: MakeDriver) -> None:
    driver = drive()
    driver.serve("a", prompt(17))
    driver.scheduler.reset_cache()
    driver.serve("b", prompt(17))
    assert driver.found(prompt(17)) == 16
    assert driver.num_stored == 8


# Its place in the order of eviction


def test_a_finished_request_is_the_most_recently_used(drive: MakeDriver) -> None:
    """The device has the prompt: nothing is loaded or stored."""
    driver = drive(num_host_blocks=9, num_device_blocks=60)
    driver.serve("first", prompt(17))
    driver.serve("second", prompt(17, family=1))
    driver.serve("first again", prompt(17))
    assert (driver.num_stored, driver.world.num_blocks_loaded) == (8, 0)
    driver.serve("third", prompt(9, family=2))
    assert driver.found(prompt(17)) == 16
    assert driver.found(prompt(17, family=1)) == 8


def test_a_request_with_the_oldest_prefix_is_stored(drive: MakeDriver) -> None:
    """Its prefix, the oldest in a full tier, becomes the most recently used: others make room."""
    driver = drive(num_host_blocks=9, num_device_blocks=60)
    driver.serve("first", prompt(17))
    driver.serve("second", prompt(17, family=1))
    assert driver.num_kept == 8
    driver.serve("first goes on", [*prompt(17), *prompt(8, family=2)])
    assert driver.found([*prompt(17), *prompt(8, family=2)]) == 24
    assert driver.found(prompt(17, family=1)) == 8


def test_an_evicted_tail_is_stored_again_when_its_request_ends(drive: MakeDriver) -> None:
    driver = drive(num_host_blocks=9, num_device_blocks=60)
    request = driver.start("long", prompt(33), max_tokens=14)
    driver.step(3)
    driver.copy_all()
    driver.step()
    assert driver.found(prompt(33)) == 32
    driver.start("other", prompt(25, family=1))
    while driver.found(prompt(25, family=1)) < 24:
        driver.step()
        if driver.pending(STORE):
            driver.copy(STORE)
    assert driver.found(prompt(33)) < 32
    assert not request.is_finished()
    driver.run()
    assert driver.found(list(request.all_token_ids)) == 32
