"""A store of blocks whose load is announced and still in flight."""

import pytest

from simple_offload.backends.base import Direction
from simple_offload.worker.worker import OffloadWorker
from tests.simulation.mutations.registry import mutation
from tests.simulation.shape import Shape
from tests.simulation.world import World

LOAD, STORE = Direction.LOAD, Direction.STORE
PROMPT = list(range(20))
OTHER_PROMPT = [*PROMPT[:8], *range(40, 60)]
"""Its common head with the first is so short that both requests load it."""

NO_HOLD_BEFORE_STORES_ALONE = mutation(
    OffloadWorker.bind, "if metadata.admitted:", "if metadata.admitted and metadata.num_tokens:"
)
"""In a step without compute, stores do not wait for the loads that the step admits. Random scripts
never show this."""


def run_to_rest(world: World) -> None:
    while world.scheduler.has_requests():
        world.step()
        world.check()
        let_copies_end(world)


def let_copies_end(world: World) -> None:
    for rank in world.ranks:
        rank.device.run_all()


def store_what_is_being_loaded(world: World) -> None:
    """Two requests load some of the same host blocks. The first of these loads fails, so the blocks
    leave the tier. The second load is announced, and its request is aborted. The policy stores
    these blocks again while the load still writes them."""
    for prompt in (PROMPT, OTHER_PROMPT):
        world.add_request(f"writer of {len(prompt)} tokens", prompt, 1, None, 0)
        run_to_rest(world)
    assert world.reset(tier=False)
    device = world.ranks[0].device
    world.add_request("unlucky", PROMPT, 1, None, 0)
    world.add_request("gone", OTHER_PROMPT, 1, None, 0)
    world.step()
    failing, load = device.copies[LOAD]
    device.copy_one(LOAD, fail_after=0)
    load.nearly_done = True
    world.step()
    world.check()
    assert failing.error is not None
    world.abort("gone")
    world.step()
    (store,) = device.copies[STORE]
    assert set(store.transfer.device_blocks) == set(load.transfer.device_blocks[:2])
    assert not load.ended
    world.check()


def make_world() -> World:
    return World(Shape(load_failures="fail", max_num_batched_tokens=64, lazy=False))


def test_the_store_waits_for_the_load() -> None:
    world = make_world()
    store_what_is_being_loaded(world)
    device = world.ranks[0].device
    assert not device.compute_one()
    assert not device.can_copy(STORE)
    while device.copies[LOAD]:
        device.copy_one(LOAD)
    assert device.compute_one()
    assert device.can_copy(STORE)
    run_to_rest(world)
    world.check_at_rest()
    assert world.reset(tier=False)
    num_loaded = world.num_blocks_loaded
    world.add_request("reader", PROMPT, 1, None, 0)
    run_to_rest(world)  # the runner checks every page
    assert world.num_blocks_loaded > num_loaded
    world.check_finished("reader")
    world.close()


def test_a_store_that_does_not_wait_is_noticed() -> None:
    with NO_HOLD_BEFORE_STORES_ALONE.planted():
        world = make_world()
        with pytest.raises(AssertionError, match="stored while being loaded"):
            store_what_is_being_loaded(world)
        world.close()
