"""Hashes finer than blocks: a hit may end inside a block."""

import pytest

from tests.scheduler.conftest import MakeDriver
from tests.scheduler.driver import LOAD, Driver, prompt
from tests.scheduler.tiers import block, commit, get, key, leave, make_tier, store
from tests.simulation.integrity import check_tier


def with_states(drive: MakeDriver, **shape: object) -> Driver:
    """A driver with blocks of 4 tokens and hashes of 2."""
    return drive(windows=(0,), num_states=1, match_unit=2, num_device_blocks=60, **shape)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_hit_inside_a_block(drive: MakeDriver, async_scheduling: bool) -> None:
    driver = with_states(drive, async_scheduling=async_scheduling)
    driver.serve("before", prompt(19), max_tokens=6)
    driver.empty_device_cache()
    assert driver.found(prompt(19)) == 18
    request = driver.start("a", prompt(19), max_tokens=6)
    driver.step()
    assert request.num_computed_tokens == 18
    (load,) = driver.pending(LOAD)
    assert len(load.host_blocks) == 5 + 1  # the hit ends after two tokens of the fifth block
    driver.run()
    assert driver.world.finished["a"] == driver.world.finished["before"]


def test_a_longer_host_hit_replaces_a_device_hit_inside_a_block(drive: MakeDriver) -> None:
    driver = with_states(drive)
    tokens = driver.serve("long", prompt(31), max_tokens=6)
    driver.empty_device_cache()
    driver.serve("short", tokens[:19], max_tokens=1)
    request = driver.start("again", tokens[:31], max_tokens=1)
    driver.step()
    assert request.num_computed_tokens == 30
    (load,) = driver.pending(LOAD)
    assert len(load.host_blocks) == 8 - 4 + 1  # from the device's last whole block on
    driver.run()


def test_later_blocks_do_not_evict_the_state_inside_a_block(drive: MakeDriver) -> None:
    """The tier has room for five blocks of tokens, and for the states after 16, 18 and 20
    tokens."""
    driver = with_states(drive, num_host_blocks=9)
    driver.serve("a", prompt(19), max_tokens=8)
    assert driver.num_kept == 8
    assert driver.found(prompt(19)) == 18


# In the tier


@pytest.mark.parametrize("way", ["evict", "drop", "reset"])
def test_an_inner_key_comes_and_leaves_with_its_block(way: str) -> None:
    tier = make_tier(4)
    store(tier, "a")
    inner_keys = [[key("inside the other")], [key("inside")]]
    filled = tier.allocate(2)
    assert commit(tier, filled, ["a", "ab"], inner_keys=inner_keys) == [0]  # has another block
    assert get(tier, key("inside the other")) is None
    assert get(tier, key("inside")) is block(tier, "ab") is filled[1]
    check_tier(tier)
    if way == "evict":
        assert leave(tier) == ["a", "ab"]
    elif way == "reset":
        tier.reset()
    else:
        tier.drop([block(tier, "ab")])
    assert get(tier, key("inside")) is None
    check_tier(tier)
