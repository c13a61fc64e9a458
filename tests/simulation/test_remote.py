"""Another connector beside this project's, in vLLM's MultiConnector."""

from typing import cast

import pytest

from tests.simulation.remote import WorldWithRemote
from tests.simulation.shape import Shape
from tests.simulation.test_announced import let_copies_end, run_to_rest

PROMPT = list(range(20))
OFFERED = 16


@pytest.fixture(params=[False, None], ids=["at once", "early"])
def lazy(request: pytest.FixtureRequest) -> bool | None:
    """Both store blocks before the device needs their room."""
    return cast(bool | None, request.param)


@pytest.fixture(params=[False, True], ids=["ours first", "remote first"])
def world(request: pytest.FixtureRequest, lazy: bool | None) -> WorldWithRemote:
    """The tier has enough room for early stores, which only models with one group have."""
    windows = (0,) if lazy is None else (0, 8)
    shape = Shape(windows=windows, num_device_blocks=48, num_host_blocks=400, lazy=lazy)
    return WorldWithRemote(shape, request.param)


def ask(world: WorldWithRemote, request_id: str, offered: int = 0) -> None:
    world.remote.offers[request_id] = offered
    world.add_request(request_id, PROMPT, 3, None, 0)
    world.step()


def load(world: WorldWithRemote, request_id: str) -> None:
    """Ask for what the other machine offers, and wait for it."""
    ask(world, request_id, OFFERED)
    assert world.loading


def empty_device_cache(world: WorldWithRemote) -> None:
    run_to_rest(world)
    assert world.reset(tier=False)


def end(world: WorldWithRemote) -> None:
    run_to_rest(world)
    world.check_at_rest()
    for request_id in world.finished:
        world.check_finished(request_id)
    world.close()


def read_again(world: WorldWithRemote) -> int:
    """The number of blocks that a request with the same prompt loads from the tier. The runner
    checks every page."""
    empty_device_cache(world)
    assert world.num_blocks_loaded == 0
    ask(world, "reader")
    end(world)
    return world.num_blocks_loaded


def test_blocks_from_another_machine_are_stored(world: WorldWithRemote) -> None:
    load(world, "first")
    world.receive("first", OFFERED)
    assert read_again(world) > 0


def test_blocks_that_have_not_arrived_are_not_stored(world: WorldWithRemote) -> None:
    """The request is aborted while the other machine still sends."""
    load(world, "gone")
    world.abort("gone")
    world.arrived.add("gone")  # vLLM frees the blocks upon this report
    assert read_again(world) == 0


def test_what_never_arrives_is_computed(world: WorldWithRemote) -> None:
    """The other machine has died, with some bytes sent. Both tiers keep what was computed."""
    load(world, "unlucky")
    world.receive("unlucky", OFFERED // 2)
    world.lost.add("unlucky")
    assert read_again(world) > 0


@pytest.mark.parametrize("lazy", [None], indirect=True)
def test_the_rest_of_what_arrives_in_part_is_computed(world: WorldWithRemote) -> None:
    """The request keeps its blocks, and goes on behind those that have arrived. (vLLM takes numbers
    of lost blocks of models with one group only.)"""
    load(world, "unlucky")
    world.receive("unlucky", OFFERED // 2)
    (table,) = world.scheduler.kv_cache_manager.get_block_ids("unlucky")
    world.lost_blocks.update(table[OFFERED // 2 // world.shape.block_size :])
    assert read_again(world) > 0


def test_blocks_that_wait_for_another_machine_are_stored(world: WorldWithRemote) -> None:
    """A server that computes prompts for others: the blocks of a request that has ended stay on the
    device until they have been fetched."""
    world.remote.fetched.add("kept")
    ask(world, "kept")
    while "kept" not in world.finished:
        world.step()
    for _ in range(5):
        world.step()
        let_copies_end(world)
    assert not world.reset(tier=False), "the other machine fetches the blocks"
    world.sent.add("kept")
    world.step()
    assert read_again(world) > 0


def test_one_of_them_serves_a_hit_of_both(world: WorldWithRemote) -> None:
    ask(world, "writer")
    empty_device_cache(world)
    load(world, "both")
    if world.remote_first:
        world.receive("both", OFFERED)
    end(world)
    assert (world.num_blocks_loaded == 0) == world.remote_first


def test_a_session_and_loads_of_both_connectors_do_not_stop_each_other() -> None:
    """All have blocks, and vLLM stops at the session, which gets no more of them."""
    shape = Shape(num_device_blocks=28, num_host_blocks=100)
    world = WorldWithRemote(shape, remote_first=True)
    cached = list(range(100, 164))
    world.add_request("writer", cached, 1, None, 0)
    empty_device_cache(world)
    world.add_request("session", list(range(200, 224)), 2, None, 0, resumable=True)
    while not world.is_waiting_for_input("session"):
        world.step()
    ask(world, "remote", OFFERED)
    world.add_request("parked", cached, 1, None, 0)
    world.step()
    manager = world.scheduler.kv_cache_manager
    held = [len(manager.get_block_ids(each)[0]) for each in ("session", "remote", "parked")]
    assert held == [7, 4, 15], "one block is free"
    world.resume("session", list(range(300, 312)), 2)
    world.receive("remote", OFFERED)
    for _ in range(50):
        world.step()
        let_copies_end(world)
    assert {"remote", "parked"} <= world.finished.keys()
    world.resume("session", [], 1)
    end(world)
    assert "session" in world.finished
