"""Hashes finer than blocks: a hit may end inside a block."""

import pytest

from tests.scheduler.conftest import MakeDriver
from tests.scheduler.driver import LOAD, STORE, Driver, prompt
from tests.scheduler.tiers import (
    allocate,
    block,
    commit_as,
    get,
    hashes,
    key,
    leave,
    make_tier,
    parent_of,
    store,
)
from tests.simulation.integrity import check_tier, pool_of


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


def test_another_request_goes_on_from_inside_the_block(drive: MakeDriver) -> None:
    """The block's tokens behind the hit are the first request's."""
    driver = with_states(drive)
    driver.serve("before", prompt(19), max_tokens=6)
    driver.empty_device_cache()
    driver.serve("other", [*prompt(18), *prompt(9, family=3)], max_tokens=6)
    assert driver.world.hits_inside_blocks == {"other"}


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


def test_the_state_inside_a_block_is_stored_from_its_copy(drive: MakeDriver) -> None:
    """The request goes on with the original block, which that same step changes."""
    driver = with_states(drive)
    request = driver.start("a", prompt(19), max_tokens=6)
    table = driver.world.scheduler.kv_cache_manager.coordinator.single_type_managers[1]
    key_inside = driver.scheduler.groups.key_at(request.block_hashes, 1, 18)
    while not driver.scheduler._stores.has(key_inside):
        driver.step()
    assert request.num_computed_tokens == 19
    *_, store = driver.scheduler._stores._in_flight.values()
    ((copied,),) = [run.device_blocks for run in store.runs if key_inside in run.keys]
    running = table.req_to_blocks["a"][4]
    assert copied is not running
    assert copied.block_id in driver.pending(STORE)[-1].device_blocks
    driver.run()
    assert get(driver.tier, key_inside) is not None


def test_later_blocks_do_not_evict_the_state_inside_a_block(drive: MakeDriver) -> None:
    """The tier has room for five blocks of tokens, and for the states after 16, 18 and 20
    tokens."""
    driver = with_states(drive, num_host_blocks=9)
    driver.serve("a", prompt(19), max_tokens=8)
    assert driver.num_kept == 8
    assert driver.found(prompt(19)) == 18


# In the tier


def test_a_block_is_found_by_its_inner_keys() -> None:
    tier = make_tier(8)
    store(tier, "ab")
    filled = allocate(tier, "ab")
    assert filled is not None
    inner = key("ab and a half")
    assert commit_as(tier, filled, key("abc"), parent_of("abc"), 12, [inner])
    assert get(tier, inner) is filled is get(tier, key("abc"))
    check_tier(tier)
    assert leave(tier)[:1] == ["abc"]
    assert get(tier, inner) is None


def test_inner_keys_leave_with_their_block() -> None:
    for way in ("drop", "reset", "drop parent"):
        tier = make_tier(8)
        store(tier, "ab")
        filled = allocate(tier, "ab")
        assert filled is not None
        inner = key("ab and a half")
        commit_as(tier, filled, key("abc"), parent_of("abc"), 12, [inner])
        if way == "reset":
            tier.reset()
        else:
            tier.drop([block(tier, "abc" if way == "drop" else "ab")])
        assert get(tier, inner) is None
        check_tier(tier)


def test_an_inner_key_of_two_blocks() -> None:
    """Two prompts end alike inside a block, and go on differently."""
    tier = make_tier(8)
    inner = key("a half")
    first, second = allocate(tier), allocate(tier)
    assert first is not None
    assert second is not None
    commit_as(tier, first, key("a"), None, 4, [inner])
    commit_as(tier, second, key("b"), None, 4, [inner])
    assert get(tier, inner) in (first, second)
    check_tier(tier)
    tier.drop([first])
    assert get(tier, inner) is second
    check_tier(tier)
    tier.drop([second])
    assert get(tier, inner) is None
    check_tier(tier)


def test_a_lost_inner_key_is_noticed() -> None:
    tier = make_tier(8)
    filled = allocate(tier)
    assert filled is not None
    commit_as(tier, filled, key("a"), None, 4, [key("a half")])
    check_tier(tier)
    pool_of(tier).cached_block_hash_to_block.pop(key("a half"), filled.block_id)
    with pytest.raises(AssertionError, match="has lost an inner key"):
        check_tier(tier)


def test_a_useless_block_has_no_inner_key() -> None:
    tier = make_tier(8)
    store(tier, "a")
    orphan = allocate(tier, "a")
    assert orphan is not None
    tier.drop([block(tier, "a")])
    assert not commit_as(tier, orphan, key("ab"), key("a"), 8, [key("a and a half")])
    assert get(tier, key("a and a half")) is None
    assert tier.lookup(hashes("ab"), 0, 8).num_tokens == 0
