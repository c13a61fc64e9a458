"""Admission: counts the requests with a prefix, so that one-off prompts stay out."""

import pytest
from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id

from simple_offload.scheduler.policies.admission import Admission
from tests.scheduler.conftest import MakeDriver
from tests.scheduler.driver import Driver, make_request, prompt

BOTH = pytest.mark.parametrize("lazy", [False, True])


def admitted(admission: Admission, hashes: list[BlockHash], group: int = 0) -> int:
    """Number of these prefixes that are admitted."""
    return sum(admission.admits(make_block_hash_with_group_id(h, group)) for h in hashes)


def test_a_prefix_is_admitted_with_the_third_request() -> None:
    admission = Admission(threshold=3)
    first = make_request("a", prompt(17))
    versions = []
    for name in "abc":
        assert admitted(admission, first.block_hashes) == 0
        admission.count(make_request(name, prompt(17)))
        versions.append(admission.version)
    assert admitted(admission, first.block_hashes) == 4
    assert admitted(admission, first.block_hashes, group=1) == 4
    assert versions[0] == versions[1] < versions[2]
    assert admitted(admission, make_request("x", prompt(17, family=1)).block_hashes) == 0


def test_a_request_counts_once_for_each_prefix() -> None:
    admission = Admission(threshold=2)
    request = make_request("a", prompt(9), max_tokens=20)
    for token in range(8):
        admission.count(request)
        request.append_output_token_ids(token)
    admission.count(request)
    assert len(request.block_hashes) == 4
    assert admitted(admission, request.block_hashes) == 0
    admission.on_request_finished("a")
    admission.count(request)
    assert admitted(admission, request.block_hashes) == 4


def test_the_hashes_requested_least_recently_are_dropped() -> None:
    admission = Admission(threshold=2, max_counted=6)
    request = make_request("a", prompt(17))
    admission.count(request)
    admission.count(make_request("b", prompt(17, family=1)))
    admission.count(make_request("c", prompt(17)))
    # The counts of the prefix's end are dropped first.
    assert admitted(admission, request.block_hashes[:2]) == 2
    assert admitted(admission, request.block_hashes) == 2


def test_a_threshold_of_one_counts_nothing() -> None:
    admission = Admission(threshold=1)
    request = make_request("a", prompt(17))
    admission.count(request)
    assert not admission._counts
    assert not admission._num_seen
    assert admitted(admission, request.block_hashes) == 4


# In the tier


def fill(driver: Driver, num_prompts: int, first_family: int = 50) -> None:
    """Run prompts that each come once, more than the device holds."""
    for family in range(first_family, first_family + num_prompts):
        driver.serve(f"once{family}", prompt(17, family=family))


@BOTH
def test_prompts_that_come_once_do_not_churn_the_tier(drive: MakeDriver, lazy: bool) -> None:
    driver = drive(lazy=lazy, store_threshold=2, num_device_blocks=30, num_host_blocks=9)
    driver.serve("a", prompt(17))
    driver.serve("b", prompt(17))
    fill(driver, 12)
    assert driver.num_stored == 4
    assert driver.found(prompt(17)) == 16
    driver.serve("c", prompt(17))
    assert driver.world.num_blocks_loaded == 4


@BOTH
def test_a_prefix_is_stored_once_a_second_request_has_it(drive: MakeDriver, lazy: bool) -> None:
    """The prefix ends in the middle of a prompt, and the first request is still running."""
    driver = drive(lazy=lazy, store_threshold=2, num_device_blocks=30, windows=(0,))
    driver.start("long", prompt(17), max_tokens=20)
    driver.step(8)
    assert driver.num_stored == 0
    driver.start("again", [*prompt(17)[:10], *prompt(9, family=1)], max_tokens=2)
    driver.run()
    fill(driver, 12)
    assert driver.num_stored == 2
    assert driver.found(prompt(17)) == 8
    assert driver.found([*prompt(17)[:10], *prompt(9, family=1)]) == 8


@BOTH
def test_a_conversation_is_stored_from_its_second_turn_on(drive: MakeDriver, lazy: bool) -> None:
    driver = drive(lazy=lazy, store_threshold=2, num_device_blocks=30)
    first = driver.serve("1", prompt(10), max_tokens=8)
    fill(driver, 6)
    assert driver.num_stored == 0
    driver.serve("2", [*first, *prompt(8, family=1)], max_tokens=4)
    fill(driver, 6, first_family=70)
    assert driver.found([*first, *prompt(8, family=1)]) == 16
