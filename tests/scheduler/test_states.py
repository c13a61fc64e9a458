"""State layers (Mamba and the like): one block holds all of a prefix."""

from dataclasses import replace
from typing import Any

import pytest
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.output import KVConnectorBlockState
from vllm.v1.request import Request

from simple_offload.scheduler.tier import block_pool
from tests.scheduler.conftest import MakeDriver
from tests.scheduler.driver import STORE, Driver, prompt
from tests.scheduler.tiers import get
from tests.simulation.integrity import groups_of
from tests.simulation.watch import watch

STATE = 1
"""The group of states, after one of full attention."""


def state_of(driver: Driver, request: Request, num_tokens: int) -> KVCacheBlock | None:
    """The host block with the state after ``num_tokens`` tokens, if there is one."""
    tier = driver.tier
    return get(tier, groups_of(tier).key_at(request.block_hashes, STATE, num_tokens))


def test_a_state_is_stored_with_the_step_that_completes_it(drive: MakeDriver) -> None:
    """Later, the request may have freed its block."""
    driver = drive(windows=(0,), num_states=1)
    request = driver.start("a", prompt(18), max_tokens=2)
    driver.step()  # vLLM ends the first chunk where it keeps a state
    assert request.num_computed_tokens == 16
    (store,) = driver.pending(STORE)
    stored = [driver.device_pool.blocks[i].block_hash for i in store.device_blocks.tolist()]
    assert driver.scheduler.groups.key_at(request.block_hashes, STATE, 16) in stored
    driver.run()
    assert state_of(driver, request, 16) is not None


def test_a_hit_ends_where_there_is_a_state(drive: MakeDriver) -> None:
    driver = drive(windows=(0,), num_states=1, num_device_blocks=60, retention=None)
    request = driver.start("a", prompt(17), max_tokens=8)
    driver.run()
    stored = [n for n in range(4, request.num_tokens, 4) if state_of(driver, request, n)]
    assert stored == [16, 20, 24]
    tokens = [*prompt(17), *driver.world.finished["a"][0]]
    for boundary, next_best in ((24, 20), (20, 16), (16, 0)):
        assert driver.found(tokens) == boundary
        state = state_of(driver, request, boundary)
        assert state is not None
        driver.tier.drop([state])
        assert driver.found(tokens) == next_best


def test_a_state_that_was_not_handed_over_is_found_in_the_device_cache(drive: MakeDriver) -> None:
    driver = drive(windows=(0,), num_states=1, num_device_blocks=60)
    request = driver.start("a", prompt(18))
    driver.run()
    driver.scheduler.reset_cache()
    assert state_of(driver, request, 16) is None
    driver.serve("b", prompt(18))  # starts from the device's state
    assert state_of(driver, request, 16) is not None
    assert driver.world.num_blocks_loaded == 0


def test_a_state_that_has_left_the_block_table_is_stored(drive: MakeDriver) -> None:
    """With async scheduling and drafts, vLLM hashes the last state of an answer, and removes it
    from the table before the request ends. The next turn begins with it."""
    driver = drive(
        windows=(0,),
        num_states=1,
        num_device_blocks=60,
        num_host_blocks=400,
        retention=None,
        async_scheduling=True,
        num_drafted=2,
    )
    history = driver.serve("a", prompt(19), max_tokens=2)
    driver.fill(14)
    assert driver.found(history) == 20


@pytest.mark.parametrize("match_unit", [None, 2])
def test_a_later_state_leaves_first(drive: MakeDriver, match_unit: int | None) -> None:
    """Blocks of tokens do so too, and the state is useless without them. States between the ends of
    prompt and answer leave before both: no turn begins there."""
    driver = drive(
        windows=(0,), num_states=1, num_device_blocks=60, match_unit=match_unit, retention=None
    )
    request = driver.start("a", prompt(19), max_tokens=8)
    driver.run()
    boundaries = [16, 20, 24] if match_unit is None else [16, 18, 20, 24]
    keys = [driver.scheduler.groups.key_at(request.block_hashes, STATE, n) for n in boundaries]
    leaving: list[object] = []
    while driver.tier.allocate(1):
        leaving += [key for key in keys if not driver.tier.has(key) and key not in leaving]
    assert leaving[-2:] == [keys[-1], keys[0]]
    assert set(leaving) == set(keys)


# States that vLLM hands over


@pytest.mark.parametrize(
    ("gone", "is_stored"),
    [
        ({}, True),
        ({"preempted_req_ids": {"b"}}, True),
        ({"preempted_req_ids": {"a"}}, False),
        ({"finished_req_ids": {"a"}}, False),
    ],
)
def test_states_of_requests_that_give_up_their_blocks_are_not_stored(
    drive: MakeDriver, gone: dict[str, Any], is_stored: bool
) -> None:
    """With the step in which vLLM hands them over: that does not complete them."""
    driver = drive(windows=(0,), num_states=1, num_device_blocks=60)
    request = driver.start("a", prompt(18), max_tokens=20)
    driver.step()
    driver.copy_all()
    driver.step()
    key = driver.scheduler.groups.key_at(request.block_hashes, STATE, 16)
    driver.tier.drop(driver.tier.blocks_at(driver.tier.ids_of([key])))
    (block,) = block_pool.blocks_with(driver.device_pool, [key])
    state = KVConnectorBlockState(
        req_ids=set(),
        resolve_block_ids=lambda _: (),
        boundary_state_offloads={"a": [(STATE, block.block_id, 16)]},
    )
    watch(
        driver.scheduler,
        "build_connector_meta",
        lambda build, step: build(replace(step, kv_connector_block_state=state, **gone)),
    )
    driver.step()
    stored = [i for store in driver.pending(STORE) for i in store.device_blocks.tolist()]
    assert (block.block_id in stored) is is_stored
    driver.run()


def test_a_state_does_not_displace_its_own_prefix(drive: MakeDriver) -> None:
    """The tier has room for four blocks of tokens and one state. There are states at 16, 20 and 24
    tokens."""
    driver = drive(windows=(0,), num_states=1, num_device_blocks=60, num_host_blocks=6)
    driver.serve("a", prompt(18), max_tokens=8)
    assert driver.num_kept == 5
    assert driver.found(prompt(18)) == 16


@pytest.mark.parametrize("empty_device", [False, True])
def test_a_state_does_not_displace_the_prefix_that_its_request_has_hit(
    drive: MakeDriver, empty_device: bool
) -> None:
    """The request hits it on the device or in the tier. vLLM hands the state over in the request's
    first step."""
    driver = drive(windows=(0,), num_states=1, num_device_blocks=60, num_host_blocks=6)
    driver.serve("a", prompt(18))
    if empty_device:
        driver.empty_device_cache()
    driver.serve("b", [*prompt(18), *prompt(10, family=3)])
    assert driver.found(prompt(18)) == 16


def test_a_state_that_loses_its_key_during_its_store_is_not_committed(drive: MakeDriver) -> None:
    """vLLM would overwrite the running state then (vllm#57505). No policy plans such a store."""
    driver = drive(windows=(0,), num_states=1)
    request = driver.start("a", prompt(18), max_tokens=2)
    driver.step_until(lambda: not driver.world.requests)
    assert driver.pending(STORE)
    key = driver.scheduler.groups.key_at(request.block_hashes, STATE, 16)
    (block,) = block_pool.blocks_with(driver.device_pool, [key])
    driver.device_pool.evict_blocks({block.block_id})
    driver.run()
    assert state_of(driver, request, 16) is None
    assert driver.tier.num_used > 0
