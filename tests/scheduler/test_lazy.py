"""LazyPolicy: stores blocks shortly before the device evicts them, and no others."""

from collections.abc import Iterator
from typing import Any

import pytest
from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue, KVCacheBlock
from vllm.v1.core.sched.output import SchedulerOutput

from simple_offload.scheduler.policies.lazy import LazyPolicy
from tests.scheduler.conftest import MakeDriver
from tests.scheduler.driver import LOAD, STORE, Driver, make_request, prompt
from tests.scheduler.tiers import get

ASYNC = pytest.mark.parametrize("async_scheduling", [False, True])

ROOMY: dict[str, Any] = {
    "lazy": True,
    "num_device_blocks": 81,
    "num_host_blocks": 400,
    "max_num_seqs": 1,
    "max_num_batched_tokens": 8,
    "max_model_len": 40,
}
"""A device with many more blocks than the eviction horizon."""

SHORT = ROOMY | {"num_device_blocks": 20, "max_num_seqs": 2}
"""A device that always has fewer free blocks than the eviction horizon."""


def policy_of(driver: Driver) -> LazyPolicy:
    policy = driver.scheduler._policy
    assert isinstance(policy, LazyPolicy)
    return policy


def fill(driver: Driver, num_requests: int, first: int = 1) -> None:
    """Run requests of five full blocks each, all different."""
    for family in range(first, first + num_requests):
        driver.serve(f"f{family}", prompt(21, family=family))


def free_blocks(driver: Driver) -> list[KVCacheBlock]:
    return driver.device_pool.free_block_queue.get_all_free_blocks()


# When


def test_nothing_is_stored_while_the_device_has_empty_blocks(drive: MakeDriver) -> None:
    driver = drive(**ROOMY)
    lookahead = policy_of(driver)._walk.num_ahead
    fill(driver, (80 - lookahead) // 6 - 1)
    assert driver.num_stored == 0
    assert not driver.scheduler.has_pending_work()


@ASYNC
@pytest.mark.parametrize(
    ("windows", "num_states"), [((0,), 0), ((0, 8), 0), ((8,), 0), ((0,), 1), ((), 1)], ids=str
)
def test_blocks_are_stored_before_they_are_evicted(
    drive: MakeDriver, windows: tuple[int, ...], num_states: int, async_scheduling: bool
) -> None:
    num_groups = len(windows) + num_states
    driver = drive(
        **ROOMY | {"num_device_blocks": 80 * num_groups + 1},
        windows=windows,
        num_states=num_states,
        async_scheduling=async_scheduling,
        retention=None,
    )
    driver.world.promises_no_loss = True
    fill(driver, 40)
    assert driver.world.num_evicted > 20
    assert driver.num_stored > 20
    lookahead = policy_of(driver)._walk.num_ahead
    safe = free_blocks(driver)[:lookahead]
    stores = driver.scheduler._stores
    assert all(b.block_hash is None or stores.has(b.block_hash) for b in safe)
    beyond = free_blocks(driver)[lookahead + 20 * num_groups :]
    assert not any(b.block_hash is not None and stores.has(b.block_hash) for b in beyond)
    # The device has evicted all blocks, or the last ones of some groups.
    driver.start("again", prompt(21, family=1))
    driver.run()
    assert driver.world.num_blocks_loaded > 0


@pytest.mark.parametrize("num_host_blocks", [2, 3, 7, 16, 32])
@pytest.mark.parametrize("num_states", [0, 1])
def test_stores_stop_with_a_tier_of_any_size(
    drive: MakeDriver, num_host_blocks: int, num_states: int
) -> None:
    """A stored block must not displace one equally near the front of the device's queue: the policy
    would store that one again. A tier below the horizon has no room for all."""
    driver = drive(**ROOMY | {"num_host_blocks": num_host_blocks}, num_states=num_states)
    fill(driver, 20)
    num_stored = driver.num_stored
    assert num_stored > 0
    for _ in range(20):
        driver.step()
        driver.copy_all()
    assert driver.num_stored == num_stored


def start_a_store(driver: Driver) -> tuple[list[KVCacheBlock], list[KVCacheBlock]]:
    """Fill the device until a store is in flight. Returns the earlier free queue, and its blocks
    that are now held."""
    fill(driver, 12)
    driver.start("next", prompt(21, family=90))
    before: list[KVCacheBlock] = []
    for _ in range(10):
        before = free_blocks(driver)
        driver.step()
        if driver.pending(STORE):
            break
    stored = set(driver.pending(STORE)[0].device_blocks.tolist())
    return before, [block for block in before if block.block_id in stored]


def test_stored_blocks_return_to_the_front_and_are_not_stored_again(
    drive: MakeDriver,
) -> None:
    driver = drive(**ROOMY)
    _, held = start_a_store(driver)
    assert {block.ref_cnt for block in held} == {1}
    driver.copy(STORE)
    driver.step()
    assert {block.ref_cnt for block in held} == {0}
    assert free_blocks(driver)[: len(held)] == held  # in their earlier order
    driver.run()
    assert driver.num_stored == driver.num_kept  # each key once


def test_a_stored_block_that_is_used_meanwhile_goes_to_the_back(drive: MakeDriver) -> None:
    driver = drive(**ROOMY)
    _, held = start_a_store(driver)
    # The running request gets references to the blocks, as after a hit.
    manager = driver.world.scheduler.kv_cache_manager.coordinator.single_type_managers[0]
    driver.device_pool.touch(held)
    manager.req_to_blocks["next"].extend(held)
    scheduled = SchedulerOutput.make_empty()
    scheduled.scheduled_cached_reqs.req_ids.append("next")
    scheduled.scheduled_cached_reqs.new_block_ids.append(([block.block_id for block in held],))
    policy_of(driver).on_step(scheduled)
    del manager.req_to_blocks["next"][-len(held) :]
    driver.device_pool.free_blocks(held)
    driver.copy(STORE)
    driver.step()
    queue = free_blocks(driver)
    assert min(queue.index(block) for block in held) > len(queue) // 2
    driver.run()


@pytest.fixture
def num_visited(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each block of a free queue that a walk has visited."""
    visited: list[int] = []
    walk = FreeKVCacheBlockQueue.iter_blocks_after

    def counting(self: FreeKVCacheBlockQueue, cursor: KVCacheBlock | None) -> Iterator[Any]:
        for block in walk(self, cursor):
            visited.append(block.block_id)
            yield block

    monkeypatch.setattr(FreeKVCacheBlockQueue, "iter_blocks_after", counting)
    return visited


def test_the_walk_does_not_grow_with_the_queue(drive: MakeDriver, num_visited: list[int]) -> None:
    costs = []
    for num_blocks in (81, 241):
        driver = drive(**ROOMY | {"num_device_blocks": num_blocks})
        fill(driver, num_blocks // 5)
        num_visited.clear()
        steps = driver.world.num_steps
        fill(driver, 20, first=1000)
        costs.append(len(num_visited) / (driver.world.num_steps - steps))
    assert costs[1] <= 1.5 * costs[0]
    # A step allocates a block or two, and the walk sometimes starts over.
    assert max(costs) <= 6


def test_the_walk_does_not_start_over_without_need(
    drive: MakeDriver, num_visited: list[int]
) -> None:
    """Loaded blocks need no store, and no block leaves the tier."""
    shape = ROOMY | {"num_device_blocks": 400, "max_num_batched_tokens": 64}
    driver = drive(**shape | {"num_host_blocks": 1000})
    assert policy_of(driver)._walk.num_ahead > 60
    for _ in range(2):
        fill(driver, 100)
    num_visited.clear()
    num_steps = driver.world.num_steps
    fill(driver, 20)
    assert driver.world.num_blocks_loaded > 500
    # Five of a request's six blocks have contents when they reach the front.
    assert len(num_visited) <= 20 * 6 + 2 * (driver.world.num_steps - num_steps)


def test_decoding_requests_are_seldom_visited(
    drive: MakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    visited: list[str] = []
    record = LazyPolicy._record

    def counting(self: LazyPolicy, followed: Any) -> None:
        visited.append(followed.request.request_id)
        record(self, followed)

    monkeypatch.setattr(LazyPolicy, "_record", counting)
    driver = drive(**ROOMY | {"max_model_len": 80})
    driver.start("a", prompt(8), max_tokens=70)
    driver.step(2)
    visited.clear()
    driver.step(60)
    assert len(visited) == 1  # at the eighth of its fifteen blocks
    driver.run()


def test_a_running_request_goes_on_while_stores_are_slow(drive: MakeDriver) -> None:
    """No store ends, and the device has only blocks that would need a store."""
    driver = drive(**ROOMY)
    fill(driver, 30)
    driver.device_pool.touch(rest := free_blocks(driver)[45:])
    request = driver.start("slow", prompt(9, family=45), max_tokens=30)
    for _ in range(40):
        driver.step()
    assert request.is_finished()
    assert driver.pending(STORE)
    assert driver.device_pool.get_num_free_blocks() > 0
    driver.device_pool.free_blocks(rest)
    driver.run()


CROWDED = ROOMY | {"max_num_batched_tokens": 64, "num_host_blocks": 150}
"""The largest possible need is most of the device, and the tier is soon full."""


def test_a_full_tier_shares_few_blocks_with_the_device(drive: MakeDriver) -> None:
    driver = drive(**CROWDED)
    fill(driver, 60)
    assert driver.tier.num_used > 140
    on_device = [b.block_hash for b in driver.device_pool.blocks if b.block_hash is not None]
    in_both = [key for key in on_device if get(driver.tier, key) is not None]
    # A request has six blocks, and another request starts two steps later.
    assert len(in_both) <= 2 * policy_of(driver)._walk.num_ahead <= 24
    assert len(on_device) > 50
    in_tier = [family for family in range(1, 61) if driver.found(prompt(21, family)) == 20]
    first, last = in_tier[0], in_tier[-1]
    assert in_tier == list(range(first, last + 1))
    assert 5 * (60 - last - 1) <= len(on_device)  # nothing is lost, and one block is in a store
    assert 5 * (60 - first) > 150 + 50


def load_one(driver: Driver) -> int:
    """Fill the tier, and load five blocks of one request: the next to be evicted. Returns the
    request's family."""
    fill(driver, 50)
    family = next(f for f in range(1, 50) if driver.found(prompt(21, f)) == 20)
    driver.serve("again", prompt(21, family))
    assert driver.world.num_blocks_loaded == 5
    return family


def test_loaded_blocks_leave_the_tier_first(drive: MakeDriver) -> None:
    driver = drive(**CROWDED)
    family = load_one(driver)
    fill(driver, 3, first=61)
    assert driver.found(prompt(21, family)) == 0
    assert driver.found(prompt(21, family + 8)) == 20


def test_blocks_that_the_device_is_about_to_evict_leave_the_tier_last(drive: MakeDriver) -> None:
    """Whether the tier still has the block or stores it again."""
    driver = drive(**CROWDED)
    family = load_one(driver)
    fill(driver, 20, first=61)
    request = make_request("x", prompt(21, family))
    assert driver.device_pool.get_cached_block(request.block_hashes[4], [0]) is None
    assert driver.found(prompt(21, family)) == 20


def test_blocks_that_the_tier_still_has_are_not_stored_again(drive: MakeDriver) -> None:
    driver = drive(**CROWDED)
    family = load_one(driver)
    request = make_request("x", prompt(21, family))
    before = driver.tier.lookup(request.block_hashes, 0, 21)
    taken: list[KVCacheBlock] = []
    while driver.device_pool.get_num_free_blocks() > 12:  # the device evicts them next
        taken += driver.device_pool.get_new_blocks(1)
    assert driver.tier._queue.demoted
    driver.start("next", prompt(3))
    driver.step()
    assert not driver.tier._queue.demoted
    driver.device_pool.free_blocks(taken)
    driver.run()
    assert driver.tier.lookup(request.block_hashes, 0, 21) == before


# A device that is short of blocks


def test_blocks_of_running_requests_are_stored_as_they_fill_up(drive: MakeDriver) -> None:
    driver = drive(**SHORT)
    request = driver.start("a", prompt(21), max_tokens=12)
    driver.step(4)
    driver.copy_all()
    driver.step()
    assert driver.found(list(request.all_token_ids)) >= 20
    driver.run()


@ASYNC
def test_nothing_is_lost_when_requests_fill_the_device(
    drive: MakeDriver, async_scheduling: bool
) -> None:
    driver = drive(**SHORT, async_scheduling=async_scheduling)
    for family in range(12):
        driver.start(f"f{family}", prompt(21, family=family), max_tokens=8)
    driver.run()
    for family in range(12):
        answer = driver.world.finished[f"f{family}"][0]
        history = [*prompt(21, family=family), *answer]
        assert driver.found(history) == 28, family


@ASYNC
@pytest.mark.parametrize("num_prompt_tokens", [16, 15, 14])
def test_the_last_block_is_kept(
    drive: MakeDriver, num_prompt_tokens: int, async_scheduling: bool
) -> None:
    """It may never get a hash. Then no lookup finds it on the device."""
    driver = drive(**ROOMY, async_scheduling=async_scheduling)
    history = driver.serve("a", prompt(num_prompt_tokens), max_tokens=21 - num_prompt_tokens)
    request = driver.start("b", [*history, *prompt(4, family=3)])
    driver.step()
    in_tier = driver.scheduler._loads._hits or len(driver.pending(LOAD))
    assert request.num_computed_tokens == 25 or in_tier
    driver.run()


# Resets and new contents


def test_blocks_from_before_a_reset_are_not_stored(drive: MakeDriver) -> None:
    driver = drive(**ROOMY)
    fill(driver, 10)
    num_stored = driver.num_stored
    driver.scheduler.reset_cache()  # the device keeps its blocks
    fill(driver, 6, first=100)
    assert driver.num_kept == 0
    assert driver.num_stored == num_stored


def test_blocks_of_a_running_request_from_before_a_reset_are_not_stored(drive: MakeDriver) -> None:
    driver = drive(**SHORT)
    driver.start("a", prompt(21), max_tokens=12)
    driver.step(3)
    driver.scheduler.reset_cache()
    driver.run()
    assert driver.num_kept == 0


def test_a_block_that_was_filled_anew_is_not_stored_under_its_old_key(drive: MakeDriver) -> None:
    driver = drive(**ROOMY)
    driver.serve("a", prompt(21))
    recorded = policy_of(driver)._contents
    block = next(b for b in free_blocks(driver) if b.block_hash is not None)
    assert recorded.is_storable(block)
    another = make_request("x", prompt(21, family=1))
    (key,) = driver.scheduler.groups.keys(another.block_hashes, 0, stop=1)
    driver.device_pool.evict_blocks({block.block_id})
    driver.device_pool._insert_block_hash(key, block, 4)
    assert not recorded.is_storable(block)
    recorded.record([block], [key], None, another)
    assert recorded.is_storable(block)
    assert recorded.parent_of(block, key) is None
