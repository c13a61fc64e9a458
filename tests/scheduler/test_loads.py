"""Loads: a hit is pinned when it is offered, and held until every rank is done."""

from itertools import permutations

import pytest
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.request import Request, RequestStatus

from tests.scheduler.conftest import MakeDriver
from tests.scheduler.driver import LOAD, Driver, make_request, prompt, record_steps
from tests.scheduler.tiers import get


def stored(drive: MakeDriver, num_tokens: int = 17, **shape: object) -> Driver:
    """A driver whose tier holds the whole blocks of ``prompt(num_tokens)``. Its device holds no
    block."""
    driver = drive(**shape)
    driver.serve("before", prompt(num_tokens))
    driver.empty_device_cache()
    assert driver.found(prompt(num_tokens)) == num_tokens // 4 * 4
    return driver


# A hit


@pytest.mark.parametrize("num_tokens", [16, 17])
def test_the_last_token_is_computed(drive: MakeDriver, num_tokens: int) -> None:
    """Its logits are needed. Its block is loaded only if another block comes after it."""
    driver = stored(drive, num_tokens=20)
    driver.start("a", prompt(20)[:num_tokens])
    driver.step()
    (load,) = driver.pending(LOAD)
    assert len(load.host_blocks) == (num_tokens - 1) // 4
    driver.run()
    assert driver.world.finished["a"][1] == RequestStatus.FINISHED_LENGTH_CAPPED


def test_only_blocks_that_the_device_lacks_are_loaded(drive: MakeDriver) -> None:
    driver = stored(drive, num_tokens=33)
    driver.serve("short", prompt(33)[:13])
    assert driver.world.num_blocks_loaded == 3
    request = driver.start("long", prompt(33))
    driver.step()
    (load,) = driver.pending(LOAD)
    tables = driver.world.scheduler.kv_cache_manager.get_block_ids("long")
    assert load.request_id == "long"
    assert load.device_blocks.tolist() == tables[0][3:8]
    wanted = driver.scheduler.groups.keys(request.block_hashes, 0, 3, 8)
    assert [driver.host_pool.blocks[id].block_hash for id in load.host_blocks.tolist()] == wanted
    # The head is not loaded, but must not leave while its tail is loaded.
    assert driver.num_held[1] == 8
    driver.run()


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


# Pins


@pytest.mark.parametrize("aborts", [False, True])
def test_repeated_lookups_pin_once(drive: MakeDriver, aborts: bool) -> None:
    driver = stored(drive)
    request = driver.start("a", prompt(17))
    with driver.full_device():
        for _ in range(3):
            driver.step()  # vLLM looks the request up in every step
            assert request.status == RequestStatus.WAITING
            assert driver.scheduler.get_num_new_matched_tokens(request, 0) == (16, True)
        assert driver.num_held[1] == 4
        assert max(block.ref_cnt for block in driver.host_pool.blocks) == 1
        if aborts:
            driver.world.abort("a")
            assert driver.num_held[1] == 0
    driver.run()
    assert driver.world.num_blocks_loaded == (0 if aborts else 4)


def test_a_hit_is_looked_up_again_when_something_has_changed(drive: MakeDriver) -> None:
    driver = stored(drive)
    request = make_request("a", prompt(33), max_tokens=1)
    offer = driver.scheduler.get_num_new_matched_tokens
    assert offer(request, 0) == (16, True)
    assert driver.num_held == (0, 4)
    driver.start("longer", prompt(33))
    driver.drain()
    assert offer(request, 0) == (32, True)
    assert driver.num_held == (0, 8)
    assert offer(request, 16) == (16, True)  # the device has the first blocks now
    assert driver.num_held == (0, 8)
    (fifth_key,) = driver.scheduler.groups.keys(request.block_hashes, 0, 4, 5)
    fifth = get(driver.tier, fifth_key)
    assert fifth is not None
    driver.tier.drop([fifth])
    assert offer(request, 0) == (16, True)
    assert offer(request, 16) == (0, False)
    driver.world.check_at_rest()


def test_a_pinned_hit_is_not_evicted(drive: MakeDriver) -> None:
    driver = stored(drive, num_host_blocks=9)
    request = make_request("a", prompt(17), max_tokens=1)
    assert driver.scheduler.get_num_new_matched_tokens(request, 0) == (16, True)
    driver.start("other", prompt(60, family=2))
    driver.drain()
    assert driver.found(prompt(17)) == 16
    assert driver.scheduler.get_num_new_matched_tokens(request, 0) == (16, True)
    driver.scheduler.request_finished(request)
    driver.world.check_at_rest()
    driver.serve("another", prompt(60, family=3))
    assert driver.found(prompt(17)) < 16


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
    ],
)
def test_a_load_that_would_leave_a_block_empty_is_refused(
    allocation: Allocation, num_tokens: int, full: str, window: str, complaint: str
) -> None:
    allocation.look_up()
    with pytest.raises(RuntimeError, match=complaint):
        allocation.accept(num_tokens, full, window)


def test_a_load_without_a_lookup_is_refused(allocation: Allocation) -> None:
    complaint = "a: vLLM allocated 16 external tokens that no lookup offered"
    with pytest.raises(RuntimeError, match=complaint):
        allocation.accept(16, "xxxx", "..xx")


def test_vllm_may_accept_less_than_the_hit(
    drive: MakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A window then has other blocks than those of the hit."""
    driver = stored(drive, num_tokens=33, windows=(0, 8), num_device_blocks=60, retention=None)
    offer = driver.scheduler.get_num_new_matched_tokens

    def offer_less(request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        num_tokens, is_async = offer(request, num_computed_tokens)
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
    assert driver.num_held == (0 if aborts else 4, 0)
    num_stored = driver.num_stored
    driver.run()
    assert driver.num_stored == num_stored  # no block of a half-loaded request is stored
    assert driver.found(prompt(17)) == 16
    assert not any(step.admitted for step in steps)  # nothing is left to wait for


@pytest.mark.proves("I2")
def test_a_load_has_its_own_references_to_blocks_that_may_leave_a_table(drive: MakeDriver) -> None:
    """A request that waits for a load keeps its blocks, except those outside its window."""
    driver = stored(drive, windows=(0, 8), num_device_blocks=60)
    driver.start("a", prompt(17))
    driver.step()
    (load,) = driver.pending(LOAD)
    blocks = [driver.device_pool.blocks[block_id] for block_id in load.device_blocks.tolist()]
    assert [block.ref_cnt for block in blocks] == [1] * 4 + [2] * 2
    driver.run()


def test_two_requests_load_the_same_blocks(drive: MakeDriver) -> None:
    driver = stored(drive)
    driver.start("a", prompt(17))
    driver.start("b", prompt(17))
    driver.step()
    first, second = driver.pending(LOAD)
    assert first.host_blocks.tolist() == second.host_blocks.tolist()
    assert not {*first.device_blocks.tolist()} & {*second.device_blocks.tolist()}
    for num_left in (4, 0):
        driver.copy(LOAD)
        driver.step()
        assert driver.num_held[1] == num_left
    driver.run()
