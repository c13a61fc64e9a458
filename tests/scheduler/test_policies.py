"""What both policies promise: the tier has a block once the device has evicted it."""

import gc

import pytest
from vllm.v1.request import Request

from tests.scheduler.conftest import MakeDriver
from tests.scheduler.driver import LOAD, Driver, prompt
from tests.simulation.world import World

ASYNC = pytest.mark.parametrize("async_scheduling", [False, True])
BOTH = pytest.mark.parametrize("lazy", [False, True], ids=["eager", "lazy"])


@pytest.fixture
def drive(drive: MakeDriver) -> MakeDriver:
    """Drivers with a tier for all blocks, whose device has 40 blocks of each group."""

    def make(windows: tuple[int, ...] = (0,), **shape: object) -> Driver:
        roomy = {"num_device_blocks": 40 * len(windows), "num_host_blocks": 400}
        return drive(windows=windows, **roomy | shape)

    return make


def evict_all(driver: Driver) -> None:
    """Serve requests until the device has evicted all earlier blocks."""
    driver.fill(8 * len(driver.world.shape.windows))


@ASYNC
@BOTH
@pytest.mark.parametrize("windows", [(0,), (0, 8)], ids=str)
@pytest.mark.parametrize(
    ("num_prompt_tokens", "num_output_tokens"),
    [(17, 1), (15, 1), (15, 2), (13, 4), (1, 8)],
)
def test_the_last_full_block_is_kept(
    drive: MakeDriver,
    num_prompt_tokens: int,
    num_output_tokens: int,
    windows: tuple[int, ...],
    lazy: bool,
    async_scheduling: bool,
) -> None:
    """The last step may have completed it. It may never get a hash. The last sampled token is not
    computed, so a block that ends with it is not full."""
    driver = drive(windows, lazy=lazy, async_scheduling=async_scheduling)
    history = driver.serve("a", prompt(num_prompt_tokens), max_tokens=num_output_tokens)
    evict_all(driver)
    num_full = (num_prompt_tokens + num_output_tokens - 1) // 4
    assert driver.found([*history, *prompt(4)]) == num_full * 4
    driver.start("b", [*history, *prompt(4)])
    driver.step()
    (load,) = driver.pending(LOAD)
    assert len(load.host_blocks) == num_full + (len(windows) - 1) * min(num_full, 2)
    driver.run()


@ASYNC
@BOTH
def test_computed_blocks_of_an_aborted_request_are_kept(
    drive: MakeDriver, lazy: bool, async_scheduling: bool
) -> None:
    driver = drive(lazy=lazy, max_num_batched_tokens=8, async_scheduling=async_scheduling)
    request = driver.start("a", prompt(60), max_tokens=5)
    driver.step(4)
    num_computed = request.num_computed_tokens
    assert 24 <= num_computed <= 32
    driver.world.abort("a")
    evict_all(driver)
    assert driver.found(prompt(60)) == num_computed
    driver.serve("b", prompt(60), max_tokens=5)  # the pages have the right contents


@ASYNC
@BOTH
def test_nothing_is_lost_when_requests_fill_the_device(
    drive: MakeDriver, lazy: bool, async_scheduling: bool
) -> None:
    driver = drive(lazy=lazy, num_device_blocks=20, async_scheduling=async_scheduling)
    for family in range(12):
        driver.start(f"{family}", prompt(21, family), max_tokens=8)
    driver.run()
    for family in range(12):
        history = [*prompt(21, family), *driver.world.finished[f"{family}"][0]]
        assert driver.found(history) == 28, family


@BOTH
def test_requests_that_share_a_prefix_store_it_once(drive: MakeDriver, lazy: bool) -> None:
    driver = drive(lazy=lazy, max_num_batched_tokens=64)
    for name in "abc":
        driver.start(name, prompt(17), max_tokens=3)
    driver.run()
    driver.serve("d", prompt(17), max_tokens=3)
    driver.serve("e", [*prompt(17)[:12], *prompt(9, family=1)])
    evict_all(driver)
    assert driver.found(prompt(17)) == 16
    assert driver.found([*prompt(17)[:12], *prompt(9, family=1)]) == 20
    assert driver.num_stored == driver.num_kept


@BOTH
@pytest.mark.parametrize("runs", [False, True])
def test_blocks_from_before_a_reset_are_not_stored(
    drive: MakeDriver, lazy: bool, runs: bool
) -> None:
    """They come from weights that may have changed. The device may keep them."""
    driver = drive(lazy=lazy)
    request = driver.start("a", prompt(33), max_tokens=20)
    while request.num_tokens < 40:
        driver.step()
        driver.copy_all()
    if not runs:
        driver.run()
    driver.scheduler.reset_cache()
    driver.run()
    assert driver.num_kept == 0
    evict_all(driver)
    assert driver.found(prompt(33)) == 0
    driver.serve("b", prompt(33))
    evict_all(driver)
    assert driver.found(prompt(33)) == 32


def holders(request: Request) -> set[str]:
    """Modules of this project with an object that refers to ``request``."""
    names = {type(holder).__module__ for holder in gc.get_referrers(request)}
    return {name for name in names if name.startswith("simple_offload")}


@pytest.mark.parametrize(("lazy", "events"), [(False, False), (False, True), (True, True)])
def test_nothing_refers_to_an_ended_request(
    drive: MakeDriver, monkeypatch: pytest.MonkeyPatch, lazy: bool, events: bool
) -> None:
    """Its thousands of tokens take time to free, which no hook should spend. Eager stores without
    KV events drop it at once."""
    if not events:
        monkeypatch.setattr(World, "kv_events_config", lambda self: None)
        monkeypatch.setattr(World, "check_events", lambda self: None)
    driver = drive(lazy=lazy)
    request = driver.start("a", prompt(17), max_tokens=3)
    driver.step()
    assert bool(holders(request)) == events
    while "a" in driver.world.scheduler.requests:
        driver.step()
    assert events or not holders(request)
    driver.run()
    assert not holders(request)
