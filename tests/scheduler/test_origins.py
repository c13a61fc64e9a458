"""Origins: whose tokens a device block holds."""

from itertools import pairwise
from typing import Any

import pytest
from vllm.v1.request import Request

from simple_offload.scheduler import event_payload as origins_module
from simple_offload.scheduler.event_payload import Origins, contents_of_host_block
from tests.scheduler.conftest import MakeDriver
from tests.scheduler.driver import Driver, make_request, prompt
from tests.scheduler.tiers import BLOCK_SIZE

PROMPT = prompt(3 * BLOCK_SIZE + 1)


def make_origins(driver: Driver) -> Origins:
    return Origins(driver.tier.groups, driver.world.scheduler.kv_cache_manager)


def origins_of(driver: Driver) -> Origins:
    origins = driver.scheduler._stores.origins
    assert origins is not None
    return origins


def pass_a_step(driver: Driver, number: int) -> None:
    """Let the engine serve somebody else."""
    driver.say(f"other {number}", prompt(3, family=number))


@pytest.mark.parametrize(
    "shape", [{}, {"lazy": True}, {"windows": (0, 8)}, {"num_states": 1, "match_unit": 2}], ids=str
)
def test_what_a_block_holds_is_known_when_its_request_has_gone(
    drive: MakeDriver, shape: dict[str, Any]
) -> None:
    """A policy may store a block long after. The request itself is let go of."""
    driver = drive(num_device_blocks=80, num_host_blocks=40, **shape)
    request = driver.start("r", PROMPT, max_tokens=8)
    driver.run()
    origins = origins_of(driver)
    assert origins._followed == {}
    blocks = [b for b in driver.device_pool.blocks if b.block_hash is not None]
    assert blocks
    for number in range(2):
        pass_a_step(driver, number)
    for block in blocks:
        assert block.block_hash is not None
        assert block.block_hash_num_tokens is not None
        contents = origins.of([block])
        assert isinstance(contents, dict)
        end = block.block_hash_num_tokens
        told = contents[block.block_hash].token_ids.tolist()
        assert told == list(request.all_token_ids[end - len(told) : end])
        assert len(told) in (BLOCK_SIZE, driver.world.shape.hash_size)
    held = [*origins._by_block.values(), *origins._ended, *origins._left]
    assert not any(origin is request for origin in held)


def test_a_long_request_is_let_go_of_over_several_steps(
    drive: MakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the step after its end would take that long."""
    monkeypatch.setattr(origins_module, "_MOST_BLOCKS", 2)
    driver = drive(num_device_blocks=80, num_host_blocks=40)
    request = driver.start("r", prompt(7 * BLOCK_SIZE), max_tokens=1)
    driver.run()
    origins = origins_of(driver)
    blocks = [b for b in driver.device_pool.blocks if b.block_hash is not None]
    num_known: list[int] = []
    driver.start("other", prompt(3, family=1), max_tokens=20)
    while any(left.request is request for left in (*origins._ended, *origins._left)):
        driver.step()
        each = [origins.of([block]) for block in blocks]
        assert all(origin is request or isinstance(origin, dict) for origin in each)
        num_known.append(sum(isinstance(origin, dict) for origin in each))
    assert num_known[-1] == len(blocks) == 7
    assert max(after - before for before, after in pairwise(num_known)) == 2


def test_those_that_wait_to_be_let_go_of_grow_no_more(
    drive: MakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(origins_module, "_MOST_BLOCKS", 0)
    driver = drive(num_device_blocks=400, num_host_blocks=40)
    for number in range(30):
        driver.say(f"r{number}", prompt(3 * BLOCK_SIZE, family=number))
    assert len(origins_of(driver)._left) < 12


def test_parts_are_put_together_when_their_request_has_gone(drive: MakeDriver) -> None:
    driver = drive(num_device_blocks=80, num_host_blocks=40, num_parts=2)
    request = driver.start("r", PROMPT, max_tokens=3)
    driver.step()
    (manager,) = driver.world.scheduler.kv_cache_manager.coordinator.single_type_managers
    parts = manager.req_to_blocks["r"][:2]
    origins = origins_of(driver)
    assert origins.of(parts) is request
    driver.run()
    for number in range(2):
        pass_a_step(driver, number)
    (key,) = driver.tier.groups.keys(request.block_hashes, 0, 0, 1)
    contents = origins.of(parts)
    assert isinstance(contents, dict)
    assert contents == contents_of_host_block(driver.tier.groups, key, (), 2 * BLOCK_SIZE, request)
    assert list(contents) == [part.block_hash for part in parts]
    # Whose first part is somebody else's now, who runs.
    origins._by_block[parts[0].block_id] = request
    assert origins.of(parts) == contents


def test_a_block_that_holds_something_else_by_then_is_not_remembered(drive: MakeDriver) -> None:
    driver = drive(num_device_blocks=40, num_host_blocks=40)
    request = driver.start("r", PROMPT, max_tokens=3)
    driver.step()
    (manager,) = driver.world.scheduler.kv_cache_manager.coordinator.single_type_managers
    kept, lost = manager.req_to_blocks["r"][:2]
    while "r" in driver.world.requests:
        driver.step()
    driver.device_pool.evict_blocks({lost.block_id})
    driver.run()
    for number in range(2):
        pass_a_step(driver, number)
    origins = origins_of(driver)
    assert isinstance(origins.of([kept]), dict)
    now = origins.of([lost])  # somebody else's, of whom it holds no full block
    assert isinstance(now, Request)
    assert now is not request


def test_states_belong_to_who_hands_them_over_in_whatever_step(drive: MakeDriver) -> None:
    """A request may hand over an earlier step's states in one that does not run it."""
    driver = drive(num_states=1)
    origins = make_origins(driver)
    runs, waits = make_request("runs", PROMPT), make_request("waits", PROMPT)
    for request in (runs, waits):
        origins.follow(request)
    origins.on_step(["runs"], {"runs": [3], "waits": [5], "unknown": [7]})
    blocks = driver.device_pool.blocks
    assert [origins.of([blocks[index]]) for index in (3, 5, 7)] == [runs, waits, None]


def test_a_state_that_was_given_up_belongs_to_whose_table_has_the_block(drive: MakeDriver) -> None:
    driver = drive(num_states=1)
    manager = driver.world.scheduler.kv_cache_manager
    origins = make_origins(driver)
    before, now = make_request("before", PROMPT), make_request("now", PROMPT)
    for request in (before, now):
        origins.follow(request)
    assert manager.allocate_slots(now, len(PROMPT)) is not None
    (block, *_) = manager.coordinator.single_type_managers[0].req_to_blocks["now"]
    for request_ids in (["before", "now"], ["now", "before"]):
        origins.on_step(request_ids, {"before": [block.block_id]})
        assert origins.of([block]) is now
        origins.follow(now)


def test_a_block_that_somebody_else_has_by_then_is_theirs(drive: MakeDriver) -> None:
    driver = drive(num_states=1)
    origins = make_origins(driver)
    before, now = make_request("before", PROMPT), make_request("now", PROMPT)
    for request in (before, now):
        origins.follow(request)
    origins.on_step([], {"before": [3]})
    origins.forget("before")
    origins.on_step([], {"now": [3]})
    origins.on_step([], {})
    assert origins.of([driver.device_pool.blocks[3]]) is now
