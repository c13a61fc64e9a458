"""Admission: counts the requests with a prefix, so that one-off prompts stay out."""

import pytest
from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

from simple_offload.scheduler.policy.admission import Admission
from tests.scheduler.conftest import MakeDriver
from tests.scheduler.driver import make_request, prompt

SETTINGS = pytest.mark.parametrize("lazy", [None, True, False])


@SETTINGS
@pytest.mark.parametrize("threshold", [2, 3])
def test_prompts_that_come_once_do_not_churn_the_tier(
    drive: MakeDriver, lazy: bool | None, threshold: int
) -> None:
    driver = drive(lazy=lazy, store_threshold=threshold, num_device_blocks=30, num_host_blocks=9)
    for turn in range(threshold):
        assert driver.num_stored == 0
        driver.serve(f"{turn}", prompt(17))
    driver.fill(10)
    assert driver.num_stored == 4
    assert driver.found(prompt(17)) == 16
    driver.serve("again", prompt(17))
    assert driver.world.num_blocks_loaded == 4


@SETTINGS
def test_a_prefix_is_stored_once_a_second_request_has_it(
    drive: MakeDriver, lazy: bool | None
) -> None:
    """The prefix ends in the middle of a prompt, and the first request is still running."""
    driver = drive(lazy=lazy, store_threshold=2, num_device_blocks=30, windows=(0,))
    driver.start("long", prompt(17), max_tokens=20)
    driver.step(8)
    assert driver.num_stored == 0
    driver.start("again", [*prompt(17)[:10], *prompt(9, family=1)], max_tokens=2)
    driver.run()
    driver.fill(10)
    assert driver.num_stored == 2
    assert driver.found(prompt(17)) == 8
    assert driver.found([*prompt(17)[:10], *prompt(9, family=1)]) == 8


@SETTINGS
def test_a_conversation_is_stored_from_its_second_turn_on(
    drive: MakeDriver, lazy: bool | None
) -> None:
    driver = drive(lazy=lazy, store_threshold=2, num_device_blocks=30)
    first = driver.serve("1", prompt(10), max_tokens=8)
    driver.fill(6)
    assert driver.num_stored == 0
    driver.serve("2", [*first, *prompt(8, family=1)], max_tokens=4)
    driver.fill(6, first=70)
    assert driver.found([*first, *prompt(8, family=1)]) == 16


def test_the_prefixes_requested_least_recently_are_forgotten() -> None:
    """At most ``max_counted`` blocks of prefixes are counted. The end of a prefix goes first."""
    admission = Admission(threshold=2, max_counted=6)
    request = make_request("a", prompt(17))
    for asked in (request, make_request("b", prompt(17, family=1)), make_request("c", prompt(17))):
        admission.count(asked)
    keys = [make_block_hash_with_group_id(each, 0) for each in request.block_hashes]
    assert admission.admitted({*keys}) == {*keys[:2]}
