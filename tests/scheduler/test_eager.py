"""EagerPolicy: stores every full block once its tokens are computed, and only once."""

import gc

import pytest
from vllm.v1.request import Request

from tests.scheduler.conftest import MakeDriver
from tests.scheduler.driver import LOAD, STORE, Driver, make_request, prompt
from tests.simulation.world import World

ASYNC = pytest.mark.parametrize("async_scheduling", [False, True])


# When a request ends


@ASYNC
@pytest.mark.parametrize("windows", [(0,), (0, 8)], ids=str)
@pytest.mark.parametrize(
    ("num_prompt_tokens", "num_output_tokens"),
    [(17, 1), (16, 1), (15, 1), (15, 2), (13, 3), (13, 4), (12, 5), (14, 2), (12, 6), (1, 8)],
)
def test_the_last_full_block_is_stored(
    drive: MakeDriver,
    num_prompt_tokens: int,
    num_output_tokens: int,
    windows: tuple[int, ...],
    async_scheduling: bool,
) -> None:
    """The last step may have completed it. The last sampled token is not computed, so a block that
    ends with it is not full."""
    driver = drive(windows=windows, num_device_blocks=60, async_scheduling=async_scheduling)
    history = driver.serve("a", prompt(num_prompt_tokens), max_tokens=num_output_tokens)
    num_full = (num_prompt_tokens + num_output_tokens - 1) // 4
    assert len(history) == num_prompt_tokens + num_output_tokens
    assert driver.found([*history, *prompt(4)]) == num_full * 4
    # Of the window: the blocks that the prompt's end and the answer's end need.
    most = num_full * len(windows)
    least = num_full + (min(num_full, 2) if len(windows) == 2 else 0)
    assert least <= driver.num_stored <= most
    driver.empty_device_cache()
    driver.start("b", [*history, *prompt(4)])
    driver.step()
    (load,) = driver.pending(LOAD)
    assert len(load.host_blocks) == least
    driver.run()


@ASYNC
def test_computed_blocks_of_an_aborted_request_are_stored(
    drive: MakeDriver, async_scheduling: bool
) -> None:
    driver = drive(max_num_batched_tokens=8, async_scheduling=async_scheduling)
    request = driver.start("a", prompt(60), max_tokens=5)
    driver.step(4)
    num_computed = request.num_computed_tokens
    assert 24 <= num_computed <= 32
    driver.world.abort("a")
    driver.run()
    assert driver.found(prompt(60)) == num_computed
    driver.empty_device_cache()
    driver.serve("b", prompt(60), max_tokens=5)
    assert driver.world.num_blocks_loaded == num_computed // 4


@ASYNC
def test_reserved_tokens_are_not_stored(drive: MakeDriver, async_scheduling: bool) -> None:
    """Async scheduling reserves room for a token before it is known."""
    driver = drive(async_scheduling=async_scheduling)
    request = driver.start("a", prompt(12), max_tokens=20)
    for _ in range(12):
        driver.step()
        driver.copy_all()
        assert driver.num_stored <= (request.num_tokens - 1) // 4
    driver.world.abort("a")
    driver.run()
    history = [*prompt(12), *driver.world.finished["a"][0]]
    assert driver.found(history) == (len(history) - 1) // 4 * 4


def holders(request: Request) -> set[str]:
    """Modules of this project with an object that refers to ``request``."""
    names = {type(holder).__module__ for holder in gc.get_referrers(request)}
    return {name for name in names if name.startswith("simple_offload")}


@pytest.mark.parametrize("lazy", [False, True])
def test_nothing_refers_to_an_ended_request(drive: MakeDriver, lazy: bool) -> None:
    driver = drive(lazy=lazy)
    request = driver.start("a", prompt(17))
    driver.step()
    assert holders(request)
    driver.run()
    assert not holders(request)


@pytest.mark.parametrize("events", [False, True])
def test_only_kv_events_keep_an_ended_request(
    drive: MakeDriver, monkeypatch: pytest.MonkeyPatch, events: bool
) -> None:
    """Otherwise vLLM frees it. Its thousands of tokens take time to free, which no hook should
    spend."""
    if not events:
        monkeypatch.setattr(World, "kv_events_config", lambda self: None)
    driver = drive()
    request = driver.start("a", prompt(17))
    while "a" in driver.world.scheduler.requests:
        driver.step()
    assert driver.scheduler.has_pending_work()
    assert bool(holders(request)) == events


# While it runs


@ASYNC
def test_blocks_of_a_prompt_are_stored_as_they_fill_up(
    drive: MakeDriver, async_scheduling: bool
) -> None:
    """The policy stores eight blocks at a time."""
    driver = drive(async_scheduling=async_scheduling, max_num_batched_tokens=6)
    request = driver.start("a", prompt(68), max_tokens=6)
    found = []
    while not request.is_finished():
        before = request.num_computed_tokens - request.num_output_placeholders
        driver.step()
        driver.copy_all()
        # This step stores the blocks computed before it, unless they are fewer than eight.
        assert driver.num_stored > before // 4 - 8
        found.append(driver.found(prompt(68)))
    assert found == sorted(found)
    assert found[8] >= 32  # before the end of the prompt was computed
    driver.run()
    assert driver.found(prompt(68)) == 68


def sizes_of_stores(driver: Driver) -> list[int]:
    """Number of blocks that each later step stores, until no request is left."""
    sizes = []
    while driver.world.requests or driver.world.scheduler.has_requests():
        driver.step()
        sizes.append(sum(len(store.host_blocks) for store in driver.pending(STORE)))
        driver.copy_all()
    driver.run()
    return sizes


@ASYNC
def test_blocks_are_stored_in_batches_of_eight(drive: MakeDriver, async_scheduling: bool) -> None:
    """The request's end stores the rest."""
    driver = drive(
        async_scheduling=async_scheduling,
        num_device_blocks=40,
        num_host_blocks=60,
        max_model_len=120,
    )
    driver.start("a", prompt(17), max_tokens=76)
    sizes = sizes_of_stores(driver)
    assert [size for size in sizes if size] == [8, 8, 7]
    first, second = (step for step, size in enumerate(sizes) if size == 8)
    assert second - first == 32  # as soon as the eighth block is complete


def test_a_batch_has_at_most_128_tokens(drive: MakeDriver) -> None:
    """A preemption may lose a whole batch."""
    driver = drive(block_size=64, max_num_batched_tokens=128, max_model_len=512)
    driver.start("a", prompt(65), max_tokens=64 * 4 + 1)
    assert [size for size in sizes_of_stores(driver) if size] == [2, 2, 1]


def test_found_blocks_do_not_count_for_a_batch(drive: MakeDriver) -> None:
    driver = drive(num_device_blocks=60)
    history = driver.serve("a", prompt(17), max_tokens=8)
    driver.empty_device_cache()
    driver.start("b", [*history, *prompt(28, family=1)], max_tokens=20)
    assert [size for size in sizes_of_stores(driver) if size] == [8, 4]


def test_blocks_about_to_leave_a_window_are_stored_at_once(drive: MakeDriver) -> None:
    driver = drive(windows=(0, 8), num_device_blocks=60, retention=None)
    driver.start("a", prompt(17), max_tokens=16)
    assert [size for size in sizes_of_stores(driver) if size] == [8, 2, 2, 2, 2]


def test_blocks_without_room_before_do_not_wait_for_a_batch(drive: MakeDriver) -> None:
    driver = drive(num_host_blocks=11, num_device_blocks=60, max_num_seqs=2)
    driver.start("other", prompt(25, family=1))
    driver.step(3)
    assert len(driver.pending(STORE)[0].host_blocks) == 6  # pinned until the copy ends
    driver.start("a", prompt(9), max_tokens=60)
    while driver.num_stored < 6 + 4:
        driver.step()
    driver.step(2)
    assert driver.num_stored == 6 + 4
    driver.copy(STORE)
    driver.step(2)
    assert driver.num_stored == 6 + 9
    driver.copy_all()
    driver.run()


def test_requests_that_share_a_prefix_store_it_once(drive: MakeDriver) -> None:
    driver = drive(max_num_seqs=3, max_num_batched_tokens=64)
    for name in "abc":
        driver.start(name, prompt(17), max_tokens=3)
    driver.run()
    driver.serve("d", prompt(17), max_tokens=3)
    assert driver.num_stored == 4
    driver.serve("e", [*prompt(17)[:12], *prompt(9, family=1)])
    assert driver.num_stored == 4 + 2


def test_blocks_found_on_the_device_are_stored_if_the_tier_lacks_them(drive: MakeDriver) -> None:
    driver = drive()
    driver.serve("a", prompt(17))
    driver.scheduler.reset_cache()
    assert driver.found(prompt(17)) == 0
    driver.serve("b", prompt(17))
    assert driver.found(prompt(17)) == 16
    assert driver.num_stored == 8


def test_blocks_behind_a_window_are_stored(drive: MakeDriver) -> None:
    """The device frees them before the policy sees them as computed, but they are intact."""
    driver = drive(windows=(0, 8), num_device_blocks=60, retention=None)
    driver.serve("a", prompt(33))
    assert driver.num_stored == 8 + 8
    for num_blocks in range(1, 9):
        assert driver.found(prompt(33)[: num_blocks * 4]) == num_blocks * 4


def test_evicted_blocks_are_not_stored(drive: MakeDriver) -> None:
    """The device may have evicted blocks behind a window."""
    driver = drive(windows=(0, 8), num_device_blocks=60, max_num_batched_tokens=64)
    driver.start("a", prompt(49), max_tokens=4)
    driver.step()
    request = driver.world.requests["a"]
    pool = driver.device_pool
    lost = driver.scheduler.groups.keys(request.block_hashes, 1, stop=12)
    gone = [pool.cached_block_hash_to_block.get_one_block(key) for key in lost]
    pool.evict_blocks({block.block_id for block in gone[:10] if block is not None})
    driver.run()
    assert driver.num_stored == 13 + 13 - 10
    driver.empty_device_cache()
    driver.serve("b", prompt(49))


# Its place in the order of eviction


def test_a_finished_request_is_the_most_recently_used(drive: MakeDriver) -> None:
    driver = drive(num_host_blocks=9, num_device_blocks=60)
    driver.serve("first", prompt(17))
    driver.serve("second", prompt(17, family=1))
    driver.serve(
        "first again", prompt(17)
    )  # the device has the prompt: nothing is loaded or stored
    assert (driver.num_stored, driver.world.num_blocks_loaded) == (8, 0)
    driver.serve("third", prompt(9, family=2))
    assert driver.found(prompt(17)) == 16
    assert driver.found(prompt(17, family=1)) == 8


@pytest.mark.parametrize("loads", [False, True])
def test_a_loaded_prefix_keeps_the_place_of_its_load(drive: MakeDriver, loads: bool) -> None:
    """Also after a long answer. Without a load, the request's end counts."""
    driver = drive(num_device_blocks=60)
    prompts = [prompt(17), prompt(17, family=1)]
    for name, tokens in zip("ab", prompts, strict=True):
        driver.serve(name, tokens)
    for num_tokens in ((2, 12), (12, 2)):  # the second request finds them protected
        if loads:
            driver.empty_device_cache()
        for name, tokens, count in zip("cd", prompts, num_tokens, strict=True):
            driver.start(f"{name}{count}", tokens, max_tokens=count)
        driver.run()
    free = driver.host_pool.free_block_queue.get_all_free_blocks()
    place = {block.block_id: place for place, block in enumerate(free)}
    first, second = (
        driver.tier.lookup(make_request("looker", tokens).block_hashes, 0, 17).blocks[0][0]
        for tokens in prompts
    )
    assert (place[first.block_id] < place[second.block_id]) == loads


def test_an_evicted_tail_is_stored_again_when_its_request_ends(drive: MakeDriver) -> None:
    driver = drive(num_host_blocks=9, num_device_blocks=60)
    request = driver.start("long", prompt(33), max_tokens=14)
    driver.step(3)
    driver.copy_all()
    driver.step()
    assert driver.found(prompt(33)) == 32
    driver.start("other", prompt(25, family=1))
    while driver.found(prompt(25, family=1)) < 24:
        driver.step()
        if driver.pending(STORE):
            driver.copy(STORE)
    assert driver.found(prompt(33)) < 32
    assert not request.is_finished()
    driver.run()
    assert driver.found(list(request.all_token_ids)) == 32


def test_a_request_with_the_oldest_prefix_is_stored(drive: MakeDriver) -> None:
    """Its prefix, the oldest in a full tier, becomes the most recently used: others make room."""
    driver = drive(num_host_blocks=9, num_device_blocks=60)
    driver.serve("first", prompt(17))
    driver.serve("second", prompt(17, family=1))
    assert driver.num_kept == 8
    driver.serve("first goes on", [*prompt(17), *prompt(8, family=2)])
    assert driver.found([*prompt(17), *prompt(8, family=2)]) == 24
    assert driver.found(prompt(17, family=1)) == 8
