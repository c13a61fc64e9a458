"""Another connector beside this project's, in vLLM's MultiConnector."""

from typing import cast

import pytest

from tests.simulation.remote import WorldWithRemote
from tests.simulation.shape import Shape
from tests.simulation.test_announced import run_to_rest

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


def end(world: WorldWithRemote) -> None:
    run_to_rest(world)
    world.check_at_rest()
    for request_id in world.finished:
        world.check_finished(request_id)
    world.close()


def test_blocks_from_another_machine_are_stored(world: WorldWithRemote) -> None:
    ask(world, "first", OFFERED)
    assert world.loading
    world.receive("first", OFFERED)
    run_to_rest(world)
    assert world.num_blocks_loaded == 0
    assert world.reset(tier=False)
    ask(world, "again")
    end(world)
    assert world.num_blocks_loaded > 0


def test_blocks_that_have_not_arrived_are_not_stored(world: WorldWithRemote) -> None:
    """The request is aborted while the other machine still sends."""
    ask(world, "gone", OFFERED)
    assert world.loading
    world.abort("gone")
    world.arrived.add("gone")  # vLLM frees the blocks upon this report
    run_to_rest(world)
    assert world.reset(tier=False)
    ask(world, "reader")
    end(world)  # the runner checks every page
    assert world.num_blocks_loaded == 0


def test_one_of_them_serves_a_hit_of_both(world: WorldWithRemote) -> None:
    ask(world, "writer")
    run_to_rest(world)
    assert world.reset(tier=False)
    ask(world, "both", OFFERED)
    assert world.loading
    if world.remote_first:
        world.receive("both", OFFERED)
    end(world)
    assert (world.num_blocks_loaded == 0) == world.remote_first
