"""Loads: a hit is pinned when it is offered, and held until every rank is done."""

from itertools import permutations
from typing import Any

import pytest
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import Request, RequestStatus

from tests.scheduler.conftest import MakeDriver
from tests.scheduler.driver import LOAD, STORE, Driver, make_request, prompt, record_steps
from tests.scheduler.tiers import get
from tests.simulation.integrity import loads_of, num_in_flight


def stored(drive: MakeDriver, num_tokens: int = 17, **shape: object) -> Driver:
    """A driver whose tier holds the whole blocks of ``prompt(num_tokens)``. Its device holds no
    block."""
    driver = drive(**shape)
    driver.serve("before", prompt(num_tokens))
    driver.empty_device_cache()
    assert driver.found(prompt(num_tokens)) == num_tokens // 4 * 4
    return driver


# A hit


def test_a_request_with_prompt_logprobs_is_computed(drive: MakeDriver) -> None:
    """Prompt logprobs need every token's logits."""
    driver = stored(drive)
    request = make_request("a", prompt(17), prompt_logprobs=1, max_tokens=1)
    assert request.skip_reading_prefix_cache
    driver.world.stories["a"] = driver.world.stories["before"]
    driver.world.requests["a"] = request
    driver.world.scheduler.add_request(request)
    assert driver.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    driver.run()
    assert driver.world.num_blocks_loaded == 0
    assert driver.world.finished["a"][0] == driver.world.finished["before"][0]


def test_a_hit_is_looked_up_again_when_something_has_changed(drive: MakeDriver) -> None:
    driver = stored(drive)
    request = make_request("a", prompt(33), max_tokens=1)
    offer = driver.scheduler.get_num_new_matched_tokens
    assert offer(request, 0) == (16, True)
    assert driver.num_held == (0, 4)
    driver.start("longer", prompt(33))
    driver.drain()
    driver.empty_device_cache()
    assert offer(request, 0) == (32, True)
    assert driver.num_held == (0, 8)
    assert offer(request, 16) == (16, True)  # as if the device had the first blocks
    assert driver.num_held == (0, 4)
    (fifth_key,) = driver.scheduler.groups.keys(request.block_hashes, 0, 4, 5)
    fifth = get(driver.tier, fifth_key)
    assert fifth is not None
    driver.tier.drop([fifth])
    assert offer(request, 0) == (16, True)
    assert offer(request, 16) == (0, False)
    driver.scheduler.request_finished(request)
    driver.world.check_at_rest()


# What vLLM accepts of a hit


class Allocation:
    """A request for the tier's 16 tokens. The test gives it device blocks."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self.request: Request = make_request("a", prompt(21), max_tokens=1)

    def look_up(self) -> None:
        assert self._driver.scheduler.get_num_new_matched_tokens(self.request, 0) == (16, True)

    def accept(self, num_tokens: int, *tables: str) -> None:
        """Load the first ``num_tokens`` into block tables of both groups: "x" is a new block, "."
        the null block."""
        blocks = tuple([self._block(entry) for entry in table] for table in tables)
        self._driver.scheduler.update_state_after_alloc(
            self.request, KVCacheBlocks(blocks), num_tokens
        )

    def _block(self, entry: str) -> KVCacheBlock:
        pool = self._driver.device_pool
        return pool.get_new_blocks(1)[0] if entry == "x" else pool.null_block


@pytest.fixture
def allocation(drive: MakeDriver) -> Allocation:
    """The second group has a window of two blocks."""
    return Allocation(stored(drive, windows=(0, 8), num_device_blocks=60, retention=None))


@pytest.mark.parametrize(
    ("num_tokens", "full", "window", "complaint"),
    [
        (20, "xxxxx", "...xx", "takes 20 external tokens of 16, which the host tier cannot supply"),
        (16, "xxxx", ".xxx", r"a: group 1 has device block \d+ within the hit and no host block"),
        (16, "xxx", "..xx", "a: group 0 has 3 device blocks within the hit, and the host tier 4"),
        (16, "xxxx", "..xx", "a: vLLM allocated 16 external tokens that no lookup offered"),
    ],
)
def test_a_load_that_would_leave_a_block_empty_is_refused(
    allocation: Allocation, num_tokens: int, full: str, window: str, complaint: str
) -> None:
    if "no lookup" not in complaint:
        allocation.look_up()
    with pytest.raises(RuntimeError, match=complaint):
        allocation.accept(num_tokens, full, window)


def test_vllm_may_accept_less_than_the_hit(
    drive: MakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A window then has other blocks than those of the hit."""
    driver = stored(drive, num_tokens=33, windows=(0, 8), num_device_blocks=60, retention=None)
    offer = driver.scheduler.get_num_new_matched_tokens

    def offer_less(request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        num_tokens, is_async = offer(request, num_computed_tokens)
        assert num_tokens is not None
        return num_tokens - 12, is_async

    monkeypatch.setattr(driver.scheduler, "get_num_new_matched_tokens", offer_less)
    driver.start("a", prompt(33))
    driver.step()
    (load,) = driver.pending(LOAD)
    assert len(load.host_blocks) == 5 + 2
    driver.run()  # the pages have the right contents


# Completion


@pytest.mark.proves("I2")
@pytest.mark.parametrize("aborts", [False, True])
@pytest.mark.parametrize("order", [(0,), *permutations(range(3))], ids=str)
def test_blocks_are_held_until_every_rank_is_done(
    drive: MakeDriver, order: tuple[int, ...], aborts: bool
) -> None:
    driver = stored(drive, num_ranks=len(order))
    request = driver.start("a", prompt(17))
    driver.step()
    if aborts:
        driver.world.abort("a")
    steps = record_steps(driver)
    for rank in order:
        driver.step(2)
        assert aborts or request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
        assert driver.num_held == (4, 4)
        assert driver.scheduler.has_pending_work()
        driver.copy(LOAD, rank)
    driver.step()
    if not aborts:
        assert driver.num_held == (4, 4)
        driver.step()  # the request runs
    assert driver.num_held[1] == 0
    num_stored = driver.num_stored
    driver.run()
    assert driver.num_stored == num_stored  # no block of a half-loaded request is stored
    assert driver.found(prompt(17)) == 16
    assert not any(step.admitted for step in steps)  # nothing is left to wait for


# Admission: loads that every rank announces before their end


class Loading:
    """A request "a" whose load of the first 16 tokens is in flight."""

    def __init__(self, drive: MakeDriver, **shape: Any) -> None:
        self.driver = stored(drive, async_scheduling=True, **shape)
        tokens = [*prompt(17)[:16], *prompt(24, family=5)]
        self.request = self.driver.start("a", tokens, max_tokens=4)
        self.driver.step()
        (self.load,) = self.driver.pending(LOAD)
        self.steps = record_steps(self.driver)

    def step_until_admitted(self) -> None:
        for _ in range(20):
            self.driver.step()
            if self.admitted:
                return
        raise AssertionError("no load is admitted")

    @property
    def admitted(self) -> list[int]:
        """Ids of the loads that the steps have admitted, in order."""
        return [load_id for step in self.steps for load_id in step.admitted]


@pytest.mark.proves("I2")
@pytest.mark.parametrize("windows", [(0,), (0, 8)], ids=str)
def test_blocks_of_an_admitted_load_are_held_after_its_request_has_ended(
    drive: MakeDriver, windows: tuple[int, ...]
) -> None:
    loading = Loading(drive, num_ranks=2, windows=windows, num_device_blocks=60)
    driver, load = loading.driver, loading.load
    for rank in range(2):
        driver.announce(LOAD, rank)
    loading.step_until_admitted()
    driver.world.abort("a")
    for rank in range(2):
        assert [copy.id for copy in driver.pending(LOAD, rank)] == [load.id]
    for pool, ids in (
        (driver.device_pool, load.device_blocks),
        (driver.host_pool, load.host_blocks),
    ):
        assert all(pool.blocks[block_id].ref_cnt > 0 for block_id in ids.tolist())
    driver.run()
    # The tail leaves the device first.
    queue = [block.block_id for block in driver.device_pool.free_block_queue.get_all_free_blocks()]
    chain = load.device_blocks.tolist()[:4]
    assert sorted(chain, key=queue.index) == chain[::-1]


@pytest.mark.proves("I2")
def test_host_blocks_are_free_when_a_preempted_request_has_loaded_them_again(
    drive: MakeDriver,
) -> None:
    """It has run before its first load has ended, and does not before its second one begins."""
    loading = Loading(drive, num_device_blocks=60)
    driver = loading.driver
    vllm = driver.world.scheduler
    driver.announce(LOAD)
    loading.step_until_admitted()
    vllm.set_pause_state(PauseState.PAUSED_ALL)
    with pytest.raises(RuntimeError, match="Failed to reset KV cache even when"):
        driver.world.reset(tier=False, preempt=True)  # the load holds its blocks
    while driver.scheduler.has_pending_work():
        driver.step()
        driver.copy_all()
    driver.empty_device_cache()
    vllm.set_pause_state(PauseState.UNPAUSED)
    driver.step()
    assert len(driver.pending(LOAD)) == 1
    assert max(block.ref_cnt for block in driver.host_pool.blocks[1:]) == 1
    driver.run()


@pytest.mark.proves("I2")
def test_host_blocks_are_free_when_a_preempted_request_has_loaded_more_of_them(
    drive: MakeDriver,
) -> None:
    """A store has brought more of its prefix into the tier, and the device has lost that. The first
    load ends after the second one has begun."""
    shape = {"async_scheduling": True, "num_device_blocks": 60, "max_num_batched_tokens": 8}
    driver = stored(drive, lazy=False, **shape)
    vllm, device = driver.world.scheduler, driver.device_pool
    tokens = [*prompt(17)[:16], *prompt(24, family=5)]
    driver.start("other", tokens)
    driver.step()
    while driver.pending(LOAD):
        driver.copy(LOAD)
    driver.step_until(lambda: "other" in driver.world.finished)
    device.evict_blocks({block.block_id for block in device.blocks if block.ref_cnt == 0})
    request = driver.start("a", tokens)
    driver.step()
    while driver.pending(STORE):
        driver.copy(STORE)
    driver.announce(LOAD)
    driver.step_until(lambda: request.status is RequestStatus.RUNNING)
    with pytest.raises(RuntimeError, match="Failed to reset KV cache even when"):
        driver.world.reset(tier=False, preempt=True)  # the load holds its blocks
    device.evict_blocks({block.block_id for block in device.blocks if block.ref_cnt == 0})
    driver.step()
    assert num_in_flight(loads_of(driver.scheduler)) == 2
    vllm.set_pause_state(PauseState.PAUSED_ALL)
    while driver.scheduler.has_pending_work():
        driver.step()
        driver.copy_all()
    assert driver.num_held[1] == 4 + 3
    vllm.set_pause_state(PauseState.UNPAUSED)
    driver.run()
