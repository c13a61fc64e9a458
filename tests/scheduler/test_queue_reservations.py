"""What requests in vLLM's queue will hit stays in the tier until their turn."""

from collections.abc import Iterable
from typing import Any

import pytest

from simple_offload.scheduler.policy.queue_reservations import RESERVED_SHARE
from tests.scheduler.conftest import MakeDriver
from tests.scheduler.driver import Driver, prompt

NUM_TOKENS = 21
"""Of a prompt: five blocks, and a token of the sixth."""
SHAPE: dict[str, Any] = {
    "num_device_blocks": 41,
    "num_host_blocks": 61,
    "max_num_seqs": 1,
    "max_num_batched_tokens": 8,
    "max_model_len": 40,
}
"""A tier with room for twelve prompts, a device with room for eight, and one request at a time."""
SETTINGS = pytest.mark.parametrize(
    "setting",
    [{}, {"lazy": True}, {"lazy": False}, {"windows": (0, 8)}, {"ring": True, "lazy": True}],
    ids=str,
)


def start(driver: Driver, *families: int) -> None:
    """Requests join vLLM's queue, in this order."""
    for family in families:
        driver.start(f"queued {family}", prompt(NUM_TOKENS, family))


@SETTINGS
def test_the_longest_wait_loses_nothing(drive: MakeDriver, setting: dict[str, Any]) -> None:
    """By last use, the requests before it would displace what it will hit."""
    driver = drive(**SHAPE | setting)
    driver.fill(7, first=1)
    start(driver, *range(60, 80), 1)
    driver.run()
    assert driver.world.num_blocks_loaded >= 5


def test_nothing_stays_without_a_request_in_the_queue(drive: MakeDriver) -> None:
    """The control: after the same work, the tier has lost the prompt."""
    driver = drive(**SHAPE)
    driver.fill(7, first=1)
    driver.fill(20, first=60)
    assert driver.found(prompt(NUM_TOKENS, family=1)) == 0


def test_what_is_reserved_for_two_requests_stays_for_the_second(drive: MakeDriver) -> None:
    """The device loses it in between."""
    driver = drive(**SHAPE)
    driver.fill(10, first=1)
    start(driver, 60, 1, *range(61, 81))
    driver.start("again", prompt(NUM_TOKENS, family=1))
    driver.run()
    assert driver.world.num_blocks_loaded == 10


def test_what_is_stored_while_its_request_waits_stays_too(drive: MakeDriver) -> None:
    """Only the device has it when the request comes."""
    driver = drive(**SHAPE, lazy=True)
    driver.fill(12, first=40)
    driver.serve("first", prompt(NUM_TOKENS, family=1))
    assert driver.found(prompt(NUM_TOKENS, family=1)) == 0
    start(driver, *range(60, 80), 1)
    driver.run()
    assert driver.world.num_blocks_loaded == 5


@SETTINGS
def test_a_long_queue_leaves_room_to_others(drive: MakeDriver, setting: dict[str, Any]) -> None:
    """Three quarters of the tier are reserved for the first requests of the queue."""
    driver = drive(**SHAPE | setting)
    driver.fill(11, first=1)
    start(driver, 60, *range(1, 12), *range(61, 70))
    driver.step()
    assert 0 < driver.tier.num_reserved <= int(RESERVED_SHARE * driver.tier.max_contents)
    driver.run()


# Priorities

URGENT, SOON, LATE = range(3)
WITH_PRIORITIES = SHAPE | {"num_device_blocks": 14, "priority": True}
"""A device with room for two prompts: what requests hit, they load."""


def start_late(driver: Driver) -> None:
    """Nine requests that will hit as much as may be reserved, and are never served."""
    driver.fill(9, first=1)
    driver.start("running", prompt(NUM_TOKENS, 96), 19, priority=URGENT)
    driver.step()
    for family in range(1, 10):
        driver.start(f"late {family}", prompt(NUM_TOKENS, family), priority=LATE)
    driver.step()


def serve_urgent(driver: Driver, families: Iterable[int]) -> int:
    """Serve requests. Some of them always wait. Returns the blocks that they load."""
    num_loaded = driver.world.num_blocks_loaded
    for family in families:
        driver.start(f"urgent {family}", prompt(NUM_TOKENS, family), priority=URGENT)
        while sum(each.priority == URGENT for each in driver.world.requests.values()) > 2:
            driver.step()
            driver.copy_all()
    return driver.world.num_blocks_loaded - num_loaded


def test_requests_that_are_never_served_take_nothing_from_others(drive: MakeDriver) -> None:
    """Eight prompts in turn fit the tier, but not beside what the others will hit."""
    driver = drive(**WITH_PRIORITIES)
    start_late(driver)
    for _ in range(3):
        serve_urgent(driver, range(40, 48))
    assert serve_urgent(driver, range(40, 48)) == 40


@pytest.mark.parametrize("ring", [False, True])
def test_such_a_request_takes_room_for_what_it_may_leave(drive: MakeDriver, ring: bool) -> None:
    """The ring's block is of no use to others."""
    driver = drive(**WITH_PRIORITIES | {"ring": ring, "num_device_blocks": 16})
    start_late(driver)
    num_reserved = driver.tier.num_reserved
    driver.start("urgent", prompt(NUM_TOKENS, 60), priority=URGENT)
    while driver.tier.num_reserved == num_reserved:
        driver.step()
        driver.copy_all()
    assert driver.tier.num_reserved == num_reserved - 5


def test_a_later_request_of_a_higher_priority_comes_first(drive: MakeDriver) -> None:
    driver = drive(**WITH_PRIORITIES)
    driver.serve("first", prompt(NUM_TOKENS, family=20))
    start_late(driver)
    driver.start("soon", prompt(NUM_TOKENS, family=20), priority=SOON)
    serve_urgent(driver, range(60, 68))
    assert driver.found(prompt(NUM_TOKENS, family=20)) == 20


def test_others_have_reservations_again_when_nothing_goes_before_them(drive: MakeDriver) -> None:
    driver = drive(**WITH_PRIORITIES)
    start_late(driver)
    serve_urgent(driver, range(40, 60))
    for family in range(1, 10):
        driver.world.abort(f"late {family}")
    driver.fill(7, first=1)
    for family in (*range(60, 80), 1):
        driver.start(f"queued {family}", prompt(NUM_TOKENS, family), priority=LATE)
    num_loaded = driver.world.num_blocks_loaded
    driver.run()
    assert driver.world.num_blocks_loaded == num_loaded + 5
