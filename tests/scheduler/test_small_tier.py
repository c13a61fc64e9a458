"""Tiers too small for one request: device and tier together hold what neither could alone."""

import pytest

from simple_offload import metrics
from tests.scheduler.conftest import MakeDriver
from tests.scheduler.driver import Driver, make_request, prompt

SMALL = pytest.mark.parametrize("num_host_blocks", [2, 4, 9, 14])
BLOCK = 4
CALM = {"max_num_batched_tokens": 8, "max_num_seqs": 2}
"""An engine that takes few blocks in a step."""


def count_found(driver: Driver, tokens: list[int]) -> tuple[int, int]:
    """Blocks of a prompt that the device has, and those that device and tier have together."""
    coordinator = driver.world.scheduler.kv_cache_manager.coordinator
    asked = make_request("looker", tokens).block_hashes
    on_device = coordinator.find_longest_cache_hit(asked, len(tokens))[1]
    on_host = driver.tier.lookup(asked, on_device, len(tokens) - on_device).num_tokens
    return on_device // BLOCK, (on_device + on_host) // BLOCK


@SMALL
@pytest.mark.parametrize("max_num_seqs", [2, 4])
def test_a_full_tier_takes_no_duplicates(
    drive: MakeDriver, num_host_blocks: int, max_num_seqs: int
) -> None:
    """What the device keeps does not displace other duplicates of it."""
    driver = drive(num_host_blocks=num_host_blocks, num_device_blocks=80, max_num_seqs=max_num_seqs)
    for turn in range(3):
        driver.serve(f"r{turn}", prompt(60), max_tokens=8)
        assert driver.num_stored == driver.num_kept == num_host_blocks - 1


@pytest.mark.parametrize("lazy", [None, True])
def test_the_tier_continues_what_the_device_has_left(drive: MakeDriver, lazy: bool | None) -> None:
    """The device evicts the tail first."""
    driver = drive(**CALM, lazy=lazy, num_host_blocks=14, num_device_blocks=31)
    driver.serve("r", prompt(60), max_tokens=8)
    assert count_found(driver, prompt(60))[0] == 15
    on_device, together = 15, 15
    for family in range(50, 70):
        driver.serve(f"f{family}", prompt(9, family))
        on_device, together = count_found(driver, prompt(60))
        if on_device < 10:
            break
    assert 5 <= on_device < 10
    assert together >= 13


@pytest.mark.parametrize("lazy", [None, True])
def test_two_prompts_alternate_that_fit_only_together(drive: MakeDriver, lazy: bool | None) -> None:
    """The device has 25 blocks, the tier 26, and each prompt 15 with an answer of two. Nine tenths
    of the prompts are found."""
    driver = drive(**CALM, lazy=lazy, num_host_blocks=27, num_device_blocks=26)
    found = []
    for turn in range(12):
        tokens = prompt(60, family=turn % 2)
        found.append(count_found(driver, tokens))
        driver.serve(f"r{turn}", tokens, max_tokens=8)
        assert driver.num_stored <= (turn + 1) * (15 + 2)
        assert not driver.world.ledger(metrics.DROPPED)
    on_device, together = map(sum, zip(*found[2:], strict=True))
    assert on_device <= 10 * 8
    assert together >= 9 * 15


@pytest.mark.parametrize("lazy", [None, True])
def test_a_step_may_take_most_of_the_device(drive: MakeDriver, lazy: bool | None) -> None:
    """As on small cards with steps of thousands of tokens. What the device would lose is withheld
    from its request, so that the prompt comes from the tier each time."""
    driver = drive(
        lazy=lazy,
        num_device_blocks=25,
        num_host_blocks=300,
        max_num_batched_tokens=64,
        max_model_len=80,
    )
    for turn in range(5):
        assert count_found(driver, prompt(61))[1] == (15 if turn else 0)
        driver.serve(f"again {turn}", prompt(61))
        for family in (1, 2):
            driver.serve(f"other {turn} {family}", prompt(59, 10 * turn + family))
