"""The store policies: the tier has a block once the device has evicted it, or at once."""

import gc
from typing import Any

import pytest
from vllm.v1.request import Request

from simple_offload import metrics
from tests.scheduler.conftest import MakeDriver
from tests.scheduler.driver import LOAD, STORE, Driver, make_request, prompt, record_steps
from tests.scheduler.tiers import get
from tests.simulation.integrity import stores_of

ASYNC = pytest.mark.parametrize("async_scheduling", [False, True])
SETTINGS = pytest.mark.parametrize("lazy", [None, True, False])
LAZY = pytest.mark.parametrize("lazy", [None, True])
"""With one KV cache group, stores come before an eviction."""


@ASYNC
@pytest.mark.parametrize(
    ("windows", "lazy"), [((0,), None), ((0,), True), ((0,), False), ((0, 8), None)], ids=str
)
@pytest.mark.parametrize(
    ("num_prompt_tokens", "num_output_tokens"),
    [(17, 1), (15, 1), (15, 2), (13, 4), (1, 8)],
)
def test_the_last_full_block_is_kept(
    roomy: MakeDriver,
    num_prompt_tokens: int,
    num_output_tokens: int,
    windows: tuple[int, ...],
    lazy: bool | None,
    async_scheduling: bool,
) -> None:
    """The last step may have completed it. It may never get a hash. The last sampled token is not
    computed, so a block that ends with it is not full."""
    driver = roomy(windows, lazy=lazy, async_scheduling=async_scheduling)
    history = driver.serve("a", prompt(num_prompt_tokens), max_tokens=num_output_tokens)
    driver.evict_all()
    num_full = (num_prompt_tokens + num_output_tokens - 1) // 4
    assert driver.found([*history, *prompt(4)]) == num_full * 4
    driver.serve("b", [*history, *prompt(4)])
    num_loaded = num_full + (len(windows) - 1) * min(num_full, 2)
    assert driver.world.num_blocks_loaded == num_loaded


@ASYNC
@SETTINGS
def test_computed_blocks_of_an_aborted_request_are_kept(
    roomy: MakeDriver, lazy: bool | None, async_scheduling: bool
) -> None:
    driver = roomy(lazy=lazy, max_num_batched_tokens=8, async_scheduling=async_scheduling)
    request = driver.start("a", prompt(60), max_tokens=5)
    driver.step(4)
    num_computed = request.num_computed_tokens
    assert 24 <= num_computed <= 32
    driver.world.abort("a")
    driver.evict_all()
    assert driver.found(prompt(60)) == num_computed
    driver.serve("b", prompt(60), max_tokens=5)  # the pages have the right contents


@ASYNC
@pytest.mark.parametrize("lazy", [None, False])
def test_nothing_is_lost_when_requests_fill_the_device(
    roomy: MakeDriver, lazy: bool | None, async_scheduling: bool
) -> None:
    driver = roomy(
        lazy=lazy,
        num_device_blocks=20,
        async_scheduling=async_scheduling,
        max_num_batched_tokens=8,
    )
    for family in range(30):
        driver.start(f"{family}", prompt(21, family), max_tokens=8)
    driver.run()
    assert driver.world.ledger(metrics.DROPPED) == 0
    driver.fill(20)
    for family in range(30):
        history = [*prompt(21, family), *driver.world.finished[f"{family}"][0]]
        assert driver.found(history) == 28, family


@SETTINGS
def test_requests_that_share_a_prefix_store_it_once(roomy: MakeDriver, lazy: bool | None) -> None:
    driver = roomy(lazy=lazy, max_num_batched_tokens=64)
    for name in "abc":
        driver.start(name, prompt(17), max_tokens=3)
    driver.run()
    driver.serve("d", prompt(17), max_tokens=3)
    driver.serve("e", [*prompt(17)[:12], *prompt(9, family=1)])
    driver.evict_all()
    assert driver.found(prompt(17)) == 16
    assert driver.found([*prompt(17)[:12], *prompt(9, family=1)]) == 20
    assert driver.num_stored == driver.num_kept


@SETTINGS
@pytest.mark.parametrize("runs", [False, True])
def test_blocks_from_before_a_reset_are_not_stored(
    roomy: MakeDriver, lazy: bool | None, runs: bool
) -> None:
    """They come from weights that may have changed. The device may keep them."""
    driver = roomy(lazy=lazy)
    request = driver.start("a", prompt(33), max_tokens=20)
    while request.num_tokens < 40:
        driver.step()
        driver.copy_all()
    if not runs:
        driver.run()
    driver.scheduler.reset_cache()
    driver.run()
    assert driver.num_kept == 0
    driver.evict_all()
    assert driver.found(prompt(33)) == 0
    driver.serve("b", prompt(33))
    driver.evict_all()
    assert driver.found(prompt(33)) == 32


def holders(request: Request) -> set[str]:
    """Modules of this project with an object that refers to ``request``."""
    names = {type(holder).__module__ for holder in gc.get_referrers(request)}
    return {name for name in names if name.startswith("simple_offload")}


@SETTINGS
@pytest.mark.parametrize("events", [False, True])
def test_nothing_refers_to_an_ended_request(
    roomy: MakeDriver, events: bool, lazy: bool | None
) -> None:
    """Its thousands of tokens take time to free, which no hook should spend."""
    driver = roomy(lazy=lazy, kv_events=events)
    request = driver.start("a", prompt(17), max_tokens=3)
    driver.step()
    assert holders(request)
    driver.run()
    assert not holders(request)


# When blocks are stored


ROOMY: dict[str, Any] = {
    "num_device_blocks": 81,
    "num_host_blocks": 400,
    "max_num_seqs": 1,
    "max_num_batched_tokens": 8,
    "max_model_len": 40,
}
"""A device with many more blocks than are stored ahead of evictions."""

CROWDED = ROOMY | {"max_num_batched_tokens": 64, "num_host_blocks": 150}
"""The largest possible need is most of the device, and the tier is soon full."""


def keys_of(driver: Driver, *families: int) -> list[Any]:
    """Keys of the prompts of ``Driver.fill``, in host blocks."""
    return [
        key
        for family in families
        for key in driver.scheduler.groups.keys(
            make_request("x", prompt(21, family)).block_hashes, 0
        )
    ]


def on_device(driver: Driver, key: Any) -> bool:
    return driver.device_pool.cached_block_hash_to_block.get_one_block(key) is not None


def num_shared(driver: Driver) -> int:
    """Blocks that both the device and the tier have."""
    cached = [b.block_hash for b in driver.device_pool.blocks if b.block_hash is not None]
    return sum(map(driver.tier.has, cached))


def num_lost(driver: Driver, *families: int) -> int:
    """Blocks of these prompts that neither the device nor the tier has."""
    keys = keys_of(driver, *families)
    return sum(not on_device(driver, key) and not driver.tier.has(key) for key in keys)


def counted(driver: Driver, *counter: str) -> float:
    return driver.world.ledger(*counter)


@ASYNC
def test_by_default_blocks_are_stored_while_the_tier_has_room(
    drive: MakeDriver, async_scheduling: bool
) -> None:
    """Also those of a running request, and without a further one: the engine steps until then."""
    driver = drive(**ROOMY, async_scheduling=async_scheduling)
    request = driver.start("a", prompt(33))
    driver.step_until(lambda: driver.pending(STORE))
    assert request.num_computed_tokens < 33
    driver.step_until(lambda: "a" not in driver.world.requests)
    while driver.scheduler.has_pending_work():
        assert driver.num_stored <= 8
        driver.step()
        driver.copy_all()
    driver.step()
    assert driver.found(prompt(33)) == 32
    assert num_shared(driver) == driver.num_stored == 8
    driver.run()


@ASYNC
@pytest.mark.parametrize(("num_tokens", "first"), [(9, 8), (97, 1)])
def test_early_stores_come_in_every_eighth_step(
    drive: MakeDriver, num_tokens: int, first: int, async_scheduling: bool
) -> None:
    """And in each step of a long prompt but the first. Steps of 32 tokens."""
    sizes = {"max_num_seqs": 16, "max_num_batched_tokens": 32, "max_model_len": 140}
    driver = drive(**ROOMY | sizes, async_scheduling=async_scheduling)
    steps = record_steps(driver)
    driver.start("a", prompt(num_tokens), max_tokens=40)
    driver.step_until(lambda: len(steps) == 20)
    is_storing = [bool(step.stores) for step in steps if step.num_tokens]
    assert is_storing.index(True) == first
    before = len(steps)
    for number in range(8):
        driver.start(f"short {number}", prompt(5, 60 + number), max_tokens=20)
        driver.step()
    assert sum(bool(step.stores) for step in steps[before:]) == 1
    driver.run()


def test_what_the_tier_loses_is_stored_again(drive: MakeDriver) -> None:
    driver = drive(**ROOMY)
    driver.fill(20, first=1)
    kept = [block for key in keys_of(driver, 20) if (block := get(driver.tier, key)) is not None]
    assert len(kept) == 5
    driver.tier.drop(kept)
    driver.fill(30, first=40)
    assert driver.found(prompt(21, family=20)) == 20


def test_by_default_a_full_tier_stores_only_what_is_about_to_leave(drive: MakeDriver) -> None:
    driver = drive(**ROOMY | {"num_host_blocks": 101})
    driver.fill(40, first=1)
    assert driver.tier.num_used == 100
    assert num_shared(driver) <= 100 / 4 + 9  # the share of duplicates, and three steps' need
    assert counted(driver, metrics.DROPPED) == 0


@ASYNC
def test_lazy_stores_come_before_an_eviction_and_not_long_before(
    drive: MakeDriver, async_scheduling: bool
) -> None:
    """The world checks each eviction."""
    driver = drive(**ROOMY, lazy=True, async_scheduling=async_scheduling)
    driver.fill(7, first=1)
    assert driver.num_stored == 0
    assert not driver.scheduler.has_pending_work()
    driver.world.promises_no_loss = True
    driver.fill(33, first=8)
    assert driver.world.num_evicted > 20
    assert num_shared(driver) < 80 // 2
    assert counted(driver, metrics.SKIPPED) == counted(driver, metrics.DROPPED) == 0
    driver.serve("again", prompt(21, family=1))
    assert driver.world.num_blocks_loaded > 0


def test_lazy_stores_are_at_most_a_quarter_of_the_device_ahead(drive: MakeDriver) -> None:
    """However much a step may take."""
    driver = drive(**CROWDED, lazy=True)
    driver.fill(11, first=1)
    assert driver.num_stored == 0


@ASYNC
@pytest.mark.parametrize(
    ("shape", "num_prompt_tokens", "num_output_tokens", "expected"),
    [
        ({"max_model_len": 120}, 17, 76, [4, 8, 8, 3]),
        (
            {"block_size": 64, "max_num_batched_tokens": 128, "max_model_len": 512},
            65,
            257,
            [1, 2, 2],
        ),
        ({"windows": (0, 8), "retention": None}, 17, 16, [8, 2, 2, 2, 2]),
    ],
    ids=["eight blocks", "128 tokens", "a window"],
)
def test_blocks_of_a_running_request_are_stored_in_batches(
    drive: MakeDriver,
    shape: dict[str, Any],
    num_prompt_tokens: int,
    num_output_tokens: int,
    expected: list[int],
    async_scheduling: bool,
) -> None:
    """Of at most 128 tokens; those of prompts, and those about to leave a window, do not wait. The
    request's end stores the rest."""
    driver = drive(
        async_scheduling=async_scheduling,
        num_device_blocks=60,
        num_host_blocks=60,
        lazy=False,
        **shape,
    )
    steps = record_steps(driver)
    driver.serve("a", prompt(num_prompt_tokens), max_tokens=num_output_tokens)
    assert [len(store.host_blocks) for step in steps for store in step.stores] == expected


@pytest.mark.parametrize("num_host_blocks", [2, 3, 7, 16, 32])
@pytest.mark.parametrize(("lazy", "num_states"), [(None, 0), (True, 0), (False, 0), (None, 1)])
def test_stores_stop_with_a_tier_of_any_size(
    drive: MakeDriver, num_host_blocks: int, lazy: bool | None, num_states: int
) -> None:
    """A stored block must not displace one equally near to its eviction: the policy would store
    that one again."""
    shape = ROOMY | {"num_host_blocks": num_host_blocks, "num_states": num_states}
    driver = drive(**shape, lazy=lazy)
    driver.fill(20)
    num_stored = []
    for _ in range(40):
        driver.step()
        driver.copy_all()
        num_stored.append(driver.num_stored)
    assert num_stored[20] == num_stored[-1] > 0


# Duplicates


@pytest.mark.parametrize("kv_events", [False, True])
@LAZY
def test_a_duplicate_that_is_still_there_is_not_stored_again(
    drive: MakeDriver, lazy: bool | None, kv_events: bool
) -> None:
    """It counts as skipped when the device gets its contents, and stays longest afterwards."""
    driver = drive(**ROOMY, lazy=lazy, kv_events=kv_events)
    driver.fill(30, first=1)
    driver.serve("again", prompt(21, family=1))
    assert driver.world.num_blocks_loaded == 5
    assert counted(driver, metrics.SKIPPED, "already_stored") == 5
    assert all(on_device(driver, key) for key in keys_of(driver, 1))
    driver.fill(30, first=61)
    assert not any(on_device(driver, key) for key in keys_of(driver, 1))
    assert driver.found(prompt(21, family=1)) == 20
    assert driver.num_stored == driver.num_kept


def test_a_small_tier_keeps_room_for_contents_that_the_device_has_lost(drive: MakeDriver) -> None:
    """Before eviction, a quarter of it is enough for duplicates."""
    driver = drive(**ROOMY | {"max_num_batched_tokens": 40, "num_host_blocks": 25})
    driver.fill(40)
    keys = [block.block_hash for block in driver.host_pool.blocks if block.block_hash]
    assert len(keys) == 24
    assert sum(on_device(driver, key) for key in keys) < 24 / 2


# Loads that need more than is safe


def start_a_big_load(driver: Driver) -> Request:
    """Fill a device with blocks that only it has, and start a request with a load of 25."""
    driver.serve("before", prompt(101))
    driver.fill(20, first=1)
    assert driver.found(prompt(101)) == 100
    return driver.start("big", prompt(101))


BIG = ROOMY | {"lazy": True, "num_device_blocks": 41, "max_model_len": 120}


@ASYNC
def test_what_only_the_device_has_is_withheld_from_a_load(
    drive: MakeDriver, async_scheduling: bool
) -> None:
    """Until it is stored. Too few blocks are left for the load, and no other request passes it."""
    driver = drive(**BIG, async_scheduling=async_scheduling)
    start_a_big_load(driver)
    later = driver.start("later", prompt(9, family=80))
    driver.step(3)
    assert driver.pending(STORE)
    assert not driver.pending(LOAD)
    assert not later.num_computed_tokens
    driver.run()
    assert driver.world.num_blocks_loaded == 25
    assert num_lost(driver, *range(1, 21)) == counted(driver, metrics.DROPPED) == 0


@ASYNC
def test_what_only_the_device_has_is_withheld_from_a_new_prompt(
    drive: MakeDriver, async_scheduling: bool
) -> None:
    driver = drive(
        **BIG | {"max_num_batched_tokens": 120, "num_device_blocks": 81},
        async_scheduling=async_scheduling,
    )
    driver.fill(40, first=1)
    driver.serve("new", prompt(101, family=90))
    assert num_lost(driver, *range(1, 41), 90) == counted(driver, metrics.DROPPED) == 0


def test_a_request_does_not_count_on_the_blocks_that_it_hits(drive: MakeDriver) -> None:
    """They are the first in the device's free queue, and safe. vLLM takes them out of it."""
    shape = {"max_num_batched_tokens": 120, "num_device_blocks": 81, "max_model_len": 240}
    driver = drive(**BIG | shape)
    driver.serve("before", prompt(61, family=90))
    driver.fill(12, first=1)
    driver.serve("longer", [*prompt(60, family=90), *prompt(60, family=91)])
    assert num_lost(driver, *range(1, 13), 90) == counted(driver, metrics.DROPPED) == 0


def test_no_request_waits_for_stores_of_blocks_that_another_has_just_left(
    drive: MakeDriver,
) -> None:
    """The device's free queue is short, so blocks of running requests are stored too."""
    driver = drive(**BIG | {"max_model_len": 180, "max_num_batched_tokens": 120})
    running = driver.start("running", prompt(101), max_tokens=58)
    waiting = driver.start("waiting", prompt(61, family=90))
    while not running.is_finished():
        assert not waiting.num_computed_tokens
        driver.step()
        driver.copy_all()
    driver.step()
    assert waiting.num_computed_tokens == 61
    driver.run()
    assert num_lost(driver, 90) == counted(driver, metrics.DROPPED) == 0


def test_two_loads_in_a_step_do_not_count_on_the_same_safe_blocks(drive: MakeDriver) -> None:
    driver = drive(**BIG | {"max_num_seqs": 2})
    families = (70, 71)
    for family in families:
        driver.serve(f"before {family}", prompt(33, family))
    driver.fill(20, first=1)
    for family in families:
        driver.start(f"again {family}", prompt(33, family))
    driver.run()
    assert driver.world.num_blocks_loaded == 2 * 8
    assert num_lost(driver, *range(1, 21)) == counted(driver, metrics.DROPPED) == 0


@pytest.mark.parametrize("why", ["stores fail", "the tier is pinned", "nothing is stored"])
def test_a_waiting_request_is_answered_when_the_stores_have_ended(
    drive: MakeDriver, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    driver = drive(**BIG | ({"store_threshold": 2} if why == "nothing is stored" else {}))
    if why == "nothing is stored":
        driver.serve("once", prompt(101))
    request = start_a_big_load(driver)
    if why == "the tier is pinned":
        monkeypatch.setattr(driver.tier, "allocate", lambda count, keep: [])
    driver.step()
    assert bool(driver.pending(LOAD)) == (why == "nothing is stored")
    for _ in range(12):
        if driver.pending(LOAD) or request.is_finished():
            break
        driver.step()
        while driver.pending(STORE):
            driver.copy(STORE, fail=why == "stores fail")
    assert driver.pending(LOAD) or driver.world.num_blocks_loaded == 25
    driver.run()
    assert driver.world.num_blocks_loaded == 25


# At once


AT_ONCE = pytest.mark.parametrize(
    "shape",
    [
        {"lazy": False},
        {"lazy": True, "windows": (0, 8)},
        {"num_states": 1},
        {"num_sub_blocks": 2},
    ],
    ids=str,
)


@ASYNC
@AT_ONCE
def test_each_block_is_stored_with_the_step_that_completes_it(
    drive: MakeDriver, shape: dict[str, Any], async_scheduling: bool
) -> None:
    """Also in a full tier. The answer's last block comes with the step after its end."""
    sizes = ROOMY | {"num_device_blocks": 161, "num_host_blocks": 41}
    driver = drive(**sizes | shape, retention=None, async_scheduling=async_scheduling)
    driver.fill(20, first=1)
    request = driver.start("a", prompt(29), max_tokens=4)
    stored = stores_of(driver.scheduler)
    while not request.is_finished():
        driver.step()
        driver.copy_all()
        size = driver.world.shape.block_size * driver.world.shape.num_sub_blocks
        num_full = (request.num_computed_tokens - request.num_output_placeholders) // size
        keys = driver.scheduler.groups.keys(request.block_hashes, 0, 0, num_full)
        assert request.is_finished() or not stored.absent(keys)
    driver.run()
    assert driver.found([*prompt(29), *driver.world.finished["a"][0]]) == 32
    assert not counted(driver, metrics.DROPPED)


def test_lazy_stores_are_for_models_with_one_group(
    roomy: MakeDriver, caplog: pytest.LogCaptureFixture
) -> None:
    warning = "lazy_offload=True is for models with one KV cache group"
    for shape in ({}, {"windows": (0, 8)}, {"num_sub_blocks": 2}):
        caplog.clear()
        roomy(lazy=True, **shape)
        assert (warning in caplog.text) == bool(shape)


# What is lost


@LAZY
def test_refused_blocks_are_counted_when_they_are_evicted(
    drive: MakeDriver, lazy: bool | None
) -> None:
    driver = drive(**ROOMY, store_threshold=2, lazy=lazy)
    cached = driver.device_pool.cached_block_hash_to_block
    evicted = 0
    for family in range(1, 41):
        driver.start(f"f{family}", prompt(21, family))
        while driver.world.requests:
            before = set(cached._cache)
            driver.step()
            evicted += len(before - set(cached._cache))
            assert counted(driver, metrics.SKIPPED, "below_threshold") == evicted
        driver.run()
    assert evicted > 50
    assert counted(driver, metrics.DROPPED) == counted(driver, metrics.STORED) == 0


@pytest.mark.parametrize("num_host_blocks", [3, 121])
def test_a_tier_without_room(
    drive: MakeDriver, monkeypatch: pytest.MonkeyPatch, num_host_blocks: int
) -> None:
    """The tier has two blocks, which are always in a store; or many, and all are pinned."""
    driver = drive(**ROOMY | {"num_host_blocks": num_host_blocks}, lazy=True)
    if num_host_blocks > 3:
        monkeypatch.setattr(driver.tier, "allocate", lambda count, keep: [])
    driver.fill(40)
    assert counted(driver, metrics.DROPPED, "tier_full") > 5
    assert counted(driver, metrics.DROPPED, "too_late") == 0


@LAZY
def test_a_store_that_failed_is_not_tried_again(drive: MakeDriver, lazy: bool | None) -> None:
    """Until a request computes or hits its blocks again."""
    driver = drive(**ROOMY, lazy=lazy)
    if lazy is None:
        driver.start("a", prompt(21, family=1))
        driver.step_until(lambda: driver.pending(STORE))
    else:
        driver.fill(14, first=1)
        driver.start("next", prompt(21, family=90))
        driver.step_until(lambda: driver.pending(STORE))
    num_blocks = len(driver.pending(STORE)[0].host_blocks)
    driver.copy(STORE, fail=True)
    driver.run()
    assert counted(driver, metrics.DROPPED, "copy_failed") == num_blocks
    driver.fill(30, first=100)
    assert counted(driver, metrics.DROPPED) == num_blocks
    assert driver.found(prompt(21, family=1)) < 20
    assert not on_device(driver, keys_of(driver, 1)[-1])
    driver.serve("again", prompt(21, family=1))
    driver.fill(30, first=200)
    assert driver.found(prompt(21, family=1)) == 20


@pytest.mark.parametrize("lazy", [None, False])
def test_a_failed_store_is_tried_again_when_a_request_hits_its_blocks(
    drive: MakeDriver, lazy: bool | None
) -> None:
    driver = drive(**ROOMY, lazy=lazy)
    driver.start("a", prompt(21, family=1))
    while driver.world.scheduler.has_requests():
        driver.step()
        while driver.pending(STORE):
            driver.copy(STORE, fail=True)
    driver.fill(2)
    assert driver.found(prompt(21, family=1)) == 0
    driver.serve("again", prompt(21, family=1))
    assert (driver.num_stored, driver.num_kept) == (20, 15)
    assert driver.world.num_blocks_loaded == 0  # they were hit on the device


@SETTINGS
def test_a_stream_of_new_prompts_is_stored_once(drive: MakeDriver, lazy: bool | None) -> None:
    driver = drive(**ROOMY | {"num_host_blocks": 161}, lazy=lazy)
    driver.fill(50, first=1)
    before = driver.num_stored
    driver.fill(40, first=60)
    assert driver.num_stored - before == 40 * 5


@pytest.mark.parametrize("resets", [False, True])
@pytest.mark.parametrize("setting", [{}, {"lazy": False}, {"num_sub_blocks": 2}], ids=str)
def test_what_vllm_withdraws_from_a_step_is_found_nowhere(
    drive: MakeDriver, setting: dict[str, Any], resets: bool
) -> None:
    """An urgent request takes the room of one that the same step has scheduled before: vLLM's
    cache has blocks that nothing computes, and that request would hit them when it goes on. The
    tier may have been reset meanwhile. The world checks every page that is read."""
    driver = drive(
        priority=True,
        long_prefill=8,
        reserves_prompts=False,
        max_num_seqs=2,
        num_device_blocks=20,
        num_host_blocks=60,
        **setting,
    )
    driver.start("patient", prompt(70, 1), priority=1)
    driver.step()
    driver.start("urgent", prompt(24, 2), priority=0)
    if resets:
        driver.step()
        driver.world.reset(tier=True)
    driver.run()
