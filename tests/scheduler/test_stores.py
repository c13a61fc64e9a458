"""Stores: blocks are found when every rank has stored them, and pinned until then."""

from itertools import permutations

import pytest
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from simple_offload.metrics import Meter
from simple_offload.scheduler.rank_reports import Ended, TransferLedger
from simple_offload.scheduler.stores import Stores
from simple_offload.scheduler.tier.cpu_tier import CpuTier
from simple_offload.scheduler.tier.run import Run
from tests.scheduler.conftest import MakeDriver
from tests.scheduler.driver import STORE, Driver, prompt
from tests.scheduler.tiers import (
    BLOCK_SIZE,
    block,
    contents,
    hashes,
    key,
    make_tier,
    parent_of,
    prefixes,
)
from tests.simulation.integrity import check_stores, check_tier, groups_of, pool_of


def run_until_stores(driver: Driver, *request_ids: str) -> None:
    """Step until these requests have ended and a store has been submitted."""
    while any(request_id in driver.world.requests for request_id in request_ids):
        driver.step()
    if not driver.pending(STORE):
        driver.step()
    assert driver.pending(STORE)


# In flight


def make_stores(tier: CpuTier) -> Stores:
    return Stores(tier, groups_of(tier), TransferLedger(1), Meter())


class Planner:
    """Plans stores of chains that the tier lacks."""

    def __init__(self) -> None:
        self.tier = make_tier(8)
        self.stores = make_stores(self.tier)
        self.device = pool_of(make_tier(16))

    def plan(self, *names: str) -> None:
        """Plan blocks, each the parent of the next, in a run of their own."""
        run = Run(
            self.device.get_new_blocks(len(names)),
            [key(name) for name in names],
            parent_of(names[0]),
            len(names[0]) * BLOCK_SIZE,
            BLOCK_SIZE,
        )
        assert self.stores.plan(run, frozenset, self.device) == len(names)
        self.device.free_blocks(run.device_blocks)

    def reset(self) -> None:
        self.device.free_blocks(self.stores.reset())

    def submit(self) -> int:
        """Submit the planned stores. Returns the transfer's id."""
        (transfer,) = self.stores.submit()
        return transfer.id

    def end(self, transfer_id: int, ok: bool = True) -> None:
        device_blocks = self.stores.on_ended(Ended(transfer_id, ok))
        assert device_blocks is not None
        self.device.free_blocks(device_blocks)
        check_stores(self.stores, groups_of(self.tier))
        check_tier(self.tier)

    def has(self, last: str) -> str:
        """The chain's longest prefix up to ``last`` that is in the tier or in a store."""
        names = [name for name in prefixes(last) if self.stores.has(key(name))]
        (count,) = {
            self.stores.count_first(hashes(last), 0, len(last), guess)
            for guess in range(len(last) + 2)
        }
        assert names == prefixes(last[:count])
        assert self.stores.has_none([key(name) for name in prefixes(last)]) == (not names)
        for name in prefixes(last)[count:]:
            assert self.stores.has_none([key(name)])
        return last[:count]


def test_blocks_in_a_store_count() -> None:
    """From plan to end, in any store."""
    planner = Planner()
    assert planner.has("abcdef") == ""
    planner.plan("a", "ab")
    assert planner.has("abcdef") == "ab"
    first = planner.submit()
    assert planner.has("abcdef") == "ab"
    planner.plan("abc", "abcd")
    second = planner.submit()
    planner.plan("abcde")
    assert planner.has("abcdef") == "abcde"
    assert planner.has("abx") == "ab"
    planner.end(first)
    assert planner.has("abcdef") == "abcde"
    assert contents(planner.tier) == {"a", "ab"}
    planner.end(second, ok=False)
    assert contents(planner.tier) == {"a", "ab"}
    assert not planner.stores.has(key("abc"))
    assert planner.stores.has(key("abcde"))
    planner.reset()
    assert planner.has("abcdef") == "ab"


def test_stored_blocks_do_not_count_after_a_reset() -> None:
    planner = Planner()
    planner.plan("a", "ab")
    first = planner.submit()
    planner.plan("abc")
    planner.reset()
    assert planner.has("abc") == ""
    planner.plan("a", "ab", "abc")
    assert planner.has("abc") == "abc"
    planner.end(first)
    assert planner.has("abc") == "abc"
    planner.end(planner.submit())
    assert contents(planner.tier) == {"a", "ab", "abc"}


@pytest.mark.parametrize("lost", ["by a failed store", "by a failed load"])
def test_children_of_a_lost_block_may_be_copied_twice(lost: str) -> None:
    """The tier keeps them once, from the store that also has the lost block."""
    planner = Planner()
    planner.plan("a", "ab")
    first = planner.submit()
    if lost == "by a failed load":
        planner.end(first)
    planner.plan("abc", "abcd")
    orphans = planner.submit()
    if lost == "by a failed load":
        planner.tier.drop([block(planner.tier, "a")])
    else:
        planner.end(first, ok=False)
    assert planner.stores.has_none([key(name) for name in prefixes("abcd")])
    planner.plan("a", "ab", "abc", "abcd")
    again = planner.submit()
    planner.end(orphans)
    assert contents(planner.tier) == set()
    planner.end(again)
    assert contents(planner.tier) == set(prefixes("abcd"))
    assert planner.tier.num_free == 8


def test_a_window_counts_from_any_block_on() -> None:
    """Window blocks need no earlier ones: each counts by itself."""
    tier = make_tier(8, windows=(0, 2 * BLOCK_SIZE))
    device = pool_of(make_tier(8))
    stores = make_stores(tier)
    last, parent = key("abc", group=1), key("ab", group=1)
    run = Run(device.get_new_blocks(1), [last], parent, 3 * BLOCK_SIZE, BLOCK_SIZE)
    stores.plan(run, frozenset, device)
    for _ in range(2):
        assert not stores.has_none([key(name, group=1) for name in prefixes("abcd")])
        assert stores.has_none([key(name, group=1) for name in prefixes("ab")])
        stores.submit()


# Completion


@pytest.mark.proves("I1")
@pytest.mark.parametrize("order", [*permutations(range(2)), *permutations(range(3))], ids=str)
def test_found_only_when_every_rank_is_done(drive: MakeDriver, order: tuple[int, ...]) -> None:
    driver = drive(num_ranks=len(order))
    driver.start("a", prompt(17))
    run_until_stores(driver, "a")
    (transfer,) = driver.pending(STORE)
    for rank in order:
        driver.step(2)
        assert driver.found(prompt(17)) == 0
        assert driver.num_held == (4, 4)
        assert driver.scheduler.has_pending_work()
        driver.copy(STORE, rank)
    driver.step()
    assert driver.found(prompt(17)) == 16
    assert driver.num_held == (0, 0)
    assert not driver.scheduler.has_pending_work()
    # Committed with the bytes that every rank has copied.
    found = driver.host_pool.blocks
    assert {found[block_id].ref_cnt for block_id in transfer.host_blocks.tolist()} == {0}
    driver.empty_device_cache()
    driver.serve("b", prompt(17))
    assert driver.world.num_blocks_loaded == 4 * len(order)


def test_a_lagging_rank_holds_up_its_own_transfer_only(drive: MakeDriver) -> None:
    driver = drive(num_ranks=2)
    driver.start("a", prompt(9))
    run_until_stores(driver, "a")
    driver.copy(STORE, rank=0)
    driver.start("b", prompt(9, family=1))
    run_until_stores(driver, "b")
    driver.copy(STORE, rank=0)
    driver.step(2)
    assert (driver.found(prompt(9)), driver.found(prompt(9, family=1))) == (0, 0)
    driver.copy(STORE, rank=1)
    driver.step()
    assert (driver.found(prompt(9)), driver.found(prompt(9, family=1))) == (8, 0)
    driver.copy(STORE, rank=1)
    driver.step()
    assert (driver.found(prompt(9)), driver.found(prompt(9, family=1))) == (8, 8)


def test_one_transfer_a_step_carries_the_blocks_of_all_requests(drive: MakeDriver) -> None:
    driver = drive()
    for family in range(3):
        driver.start(f"r{family}", prompt(9, family))
    run_until_stores(driver, "r0", "r1", "r2")
    (transfer,) = driver.pending(STORE)
    assert len(transfer.host_blocks) == 6
    assert len(set(transfer.host_blocks.tolist())) == 6
    driver.run()
    assert [driver.found(prompt(9, family)) for family in range(3)] == [8, 8, 8]


# The request ends, or is preempted


@pytest.mark.proves("I2")
def test_blocks_of_a_finished_request_are_held_until_the_end(drive: MakeDriver) -> None:
    driver = drive()
    driver.start("a", prompt(17))
    run_until_stores(driver, "a")
    assert "a" in driver.world.finished
    driver.step(5)
    assert driver.num_held == (4, 4)
    driver.copy(STORE)
    driver.step()
    assert driver.num_held == (0, 0)
    driver.world.check_at_rest()


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_blocks_of_an_aborted_request_are_held_until_the_end(
    drive: MakeDriver, async_scheduling: bool
) -> None:
    driver = drive(async_scheduling=async_scheduling)
    driver.start("a", prompt(17), max_tokens=30)
    while not driver.pending(STORE):
        driver.step()
    driver.world.abort("a")
    driver.step(3)
    assert driver.world.finished.keys() == {"a"}
    assert driver.num_held[1] >= 4
    assert driver.num_held[0] == driver.num_held[1]
    driver.run()
    assert driver.num_held == (0, 0)
    assert driver.found(prompt(17)) == 16


@pytest.mark.proves("I2")
def test_blocks_of_a_preempted_request_are_held_until_the_end(drive: MakeDriver) -> None:
    driver = drive()
    request = driver.start("a", prompt(33), max_tokens=8)
    while not driver.pending(STORE):
        driver.step()
    driver.world.scheduler._preempt_request(driver.world.scheduler.running.pop(), 0.0)
    assert request.num_preemptions == 1
    assert driver.num_held == (8, 8)
    driver.world.check()
    driver.run()
    assert driver.num_stored == 10  # the eight were not stored again
    assert driver.found(prompt(33)) == 32


# Failure


@pytest.mark.proves("I5")
@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("failing_first", [False, True])
def test_a_failed_store_is_not_found_and_holds_nothing(
    drive: MakeDriver, failing: int, failing_first: bool, caplog: pytest.LogCaptureFixture
) -> None:
    driver = drive(num_ranks=2)
    driver.start("a", prompt(17))
    run_until_stores(driver, "a")
    for rank in (failing, 1 - failing) if failing_first else (1 - failing, failing):
        assert driver.num_held == (4, 4)
        driver.copy(STORE, rank, fail=rank == failing)
        driver.step()
    assert driver.found(prompt(17)) == 0
    assert driver.num_kept == 0
    assert driver.num_held == (0, 0)
    assert "Store 0 failed on a rank: its blocks are not kept" in caplog.text
    driver.world.check_at_rest()
    # The next request computes and stores the block again.
    driver.empty_device_cache()
    driver.serve("b", prompt(17))
    assert driver.world.num_blocks_loaded == 0
    assert driver.found(prompt(17)) == 16


def test_children_of_a_failed_store_are_not_kept_either(drive: MakeDriver) -> None:
    driver = drive(num_device_blocks=40, max_num_batched_tokens=32)
    driver.start("a", prompt(65), max_tokens=8)
    while len(driver.pending(STORE)) < 2:
        driver.step()
    driver.copy(STORE, fail=True)
    driver.copy(STORE)
    driver.step()
    assert driver.found(prompt(65)) == 0
    assert driver.num_kept == 0
    # When the request ends, its blocks are still on the device and can be stored.
    driver.run()
    assert driver.found(prompt(65)) == 64


# Stores alone


class Bench:
    """Stores between two small pools."""

    def __init__(self, num_host_blocks: int) -> None:
        self.tier = make_tier(num_host_blocks)
        self.pool = pool_of(make_tier(8))
        self.stores = make_stores(self.tier)

    def plan(self, name: str, device_block: KVCacheBlock) -> bool:
        num_tokens = len(name) * BLOCK_SIZE
        run = Run((device_block,), (key(name),), parent_of(name), num_tokens)
        return self.stores.plan(run, frozenset, self.pool) == 1

    def check(self) -> None:
        check_stores(self.stores, groups_of(self.tier))


def test_nothing_is_planned_without_room() -> None:
    bench = Bench(num_host_blocks=1)
    first, second = bench.pool.get_new_blocks(2)
    assert bench.plan("a", first)
    assert not bench.plan("x", second)
    assert (first.ref_cnt, second.ref_cnt) == (2, 1)
    assert bench.stores.has(key("a"))
    assert not bench.stores.has(key("x"))
    (transfer,) = bench.stores.submit()
    assert transfer.device_blocks.tolist() == [first.block_id]
    assert bench.stores.submit() == []


def test_a_key_is_known_from_its_plan_to_its_end() -> None:
    bench = Bench(num_host_blocks=4)

    def state() -> tuple[bool, bool]:
        bench.check()
        return bench.stores.idle, bench.stores.has(key("a"))

    for ok in (False, True):
        (device_block,) = bench.pool.get_new_blocks(1)
        assert state() == (True, False)
        bench.plan("a", device_block)
        assert state() == (False, True)
        (transfer,) = bench.stores.submit()
        assert state() == (False, True)
        assert bench.stores.on_ended(Ended(transfer.id, ok)) == [device_block]
        assert state() == (True, ok)
    assert bench.stores.on_ended(Ended(99, ok=True)) is None  # a load


def test_a_store_pairs_each_device_block_with_its_host_block() -> None:
    bench = Bench(num_host_blocks=6)
    device_blocks = bench.pool.get_new_blocks(4)[::-1]
    for name, device_block in zip(prefixes("abcd"), device_blocks, strict=True):
        assert bench.plan(name, device_block)
    (transfer,) = bench.stores.submit()
    assert transfer.device_blocks.tolist() == [held.block_id for held in device_blocks]
    assert bench.stores.on_ended(Ended(transfer.id, ok=True)) == device_blocks
    stored = [block(bench.tier, name).block_id for name in prefixes("abcd")]
    assert transfer.host_blocks.tolist() == stored
    assert contents(bench.tier) == set(prefixes("abcd"))


@pytest.mark.parametrize("submitted", [False, True])
def test_device_blocks_are_returned_in_order_with_their_references(submitted: bool) -> None:
    """The policy drops the references, so it decides the device's order of eviction."""
    bench = Bench(num_host_blocks=6)
    device_blocks = bench.pool.get_new_blocks(3)
    for name, device_block in zip(prefixes("abc"), device_blocks, strict=True):
        bench.plan(name, device_block)
    if submitted:
        (transfer,) = bench.stores.submit()
        returned = bench.stores.on_ended(Ended(transfer.id, ok=False))
    else:
        returned = bench.stores.reset()
    assert returned == device_blocks
    assert [device_block.ref_cnt for device_block in device_blocks] == [2, 2, 2]
    assert bench.tier.num_free == 6


def test_check_stores_raises() -> None:
    bench = Bench(num_host_blocks=4)
    (device_block,) = bench.pool.get_new_blocks(1)
    bench.plan("a", device_block)
    (host_block,) = bench.stores._planned.host_blocks
    bench.pool.free_blocks([device_block])
    bench.check()

    device_block.ref_cnt = 0
    with pytest.raises(AssertionError, match="free during a store"):
        bench.check()
    device_block.ref_cnt = 1

    host_block.ref_cnt = 0
    with pytest.raises(AssertionError, match="free during a store"):
        bench.check()
    host_block.ref_cnt = 1

    pool_of(bench.tier)._insert_block_hash(key("a"), host_block, num_tokens=4)
    with pytest.raises(AssertionError, match="can be found too soon"):
        bench.check()
    bench.tier.drop([host_block])

    keys = bench.stores._planned.keys
    keys.remove(key("a"))
    with pytest.raises(AssertionError, match="keys on their way"):
        bench.check()
    keys.add(key("a"))
    bench.check()
