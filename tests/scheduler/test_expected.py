"""What requests in vLLM's queue will find stays in the tier until their turn."""

from typing import Any

import pytest

from simple_offload.scheduler.policy.expected import EXPECTED_SHARE
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
    "setting", [{}, {"lazy": True}, {"lazy": False}, {"windows": (0, 8)}], ids=str
)


def start(driver: Driver, *families: int) -> None:
    """Requests join vLLM's queue, in this order."""
    for family in families:
        driver.start(f"queued {family}", prompt(NUM_TOKENS, family))


@SETTINGS
def test_the_longest_wait_loses_nothing(drive: MakeDriver, setting: dict[str, Any]) -> None:
    """By last use, the requests before it would displace what it will find."""
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


def test_a_request_that_is_aborted_expects_nothing(drive: MakeDriver) -> None:
    driver = drive(**SHAPE)
    driver.fill(10, first=1)
    start(driver, 60, 1)
    driver.step()
    assert driver.tier.num_expected == 5
    driver.world.abort("queued 1")
    assert driver.tier.num_expected == 0
    driver.run()


def test_what_two_requests_expect_stays_for_the_second(drive: MakeDriver) -> None:
    """The device lets go of it in between."""
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
    """The first requests of the queue expect three quarters of the tier, the others nothing."""
    driver = drive(**SHAPE | setting)
    driver.fill(11, first=1)
    start(driver, 60, *range(1, 12), *range(61, 70))
    driver.step()
    assert 0 < driver.tier.num_expected <= int(EXPECTED_SHARE * driver.tier.max_contents)
    driver.run()


def test_a_wish_outlives_the_queue(drive: MakeDriver) -> None:
    """What is protected stays protected when a request of the queue has found it."""
    driver = drive(**SHAPE)
    driver.serve("first", prompt(NUM_TOKENS, family=1), wishes={"protect": "1h"})
    driver.fill(10, first=10)
    start(driver, 60, 1)
    driver.run()
    driver.fill(20, first=61)
    assert driver.found(prompt(NUM_TOKENS, family=1)) == 20
