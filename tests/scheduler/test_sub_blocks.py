"""Host blocks of several sub-blocks: stored as a whole, loaded from any sub-block to any other."""

from typing import Any

import pytest

from simple_offload.config import ConfigError
from simple_offload.metadata import RankCapacity
from tests.scheduler.conftest import MakeDriver
from tests.scheduler.driver import LOAD, STORE, make_request, prompt
from tests.scheduler.test_manager import make_config, make_scheduler
from tests.simulation.groups import MODELS
from tests.simulation.shape import Shape
from tests.simulation.vllm_config import make_kv_cache_config

# Stores and loads


def test_the_slots_of_blocks_are_neighbours(drive: MakeDriver) -> None:
    tier = drive(num_sub_blocks=4).tier
    first, second = tier.allocate(2)
    assert tier.slots([second, first]) == [8, 9, 10, 11, 4, 5, 6, 7]
    assert tier.blocks_at([11, 4, 9, 5]) == [second, first]
    tier.unpin([first, second])
    plain = drive().tier
    (block,) = plain.allocate(1)
    assert plain.slots([block]) == [block.block_id] == [1]
    assert plain.blocks_at([1]) == [block]
    plain.unpin([block])


def test_only_host_blocks_that_are_open_as_a_whole_are_used(drive: MakeDriver) -> None:
    """Slots 0 to 3 belong to the null block, and the last 2 to no block."""
    driver = drive(num_sub_blocks=4, num_host_blocks=14)
    assert driver.tier.num_blocks == 3
    driver.serve("a", prompt(60))
    assert (driver.num_kept, driver.found(prompt(60))) == (2, 32)
    driver.empty_device_cache()
    driver.start("b", prompt(60))
    driver.step()
    (load,) = driver.pending(LOAD)
    assert load.host_blocks.tolist() == list(range(4, 12))
    driver.run()


def test_single_sub_blocks_are_not_stored(drive: MakeDriver) -> None:
    """They wait until the conversation has filled the host block."""
    driver = drive(num_sub_blocks=4, num_device_blocks=60)
    history = driver.serve("a", prompt(17), max_tokens=14)  # 30 tokens computed
    assert (driver.num_stored, driver.found(history)) == (4, 16)
    history = driver.serve("b", [*history, *prompt(2, family=1)])
    assert (driver.num_stored, driver.found([*history, 1])) == (8, 32)


def test_host_blocks_are_stored_eight_device_blocks_at_a_time(drive: MakeDriver) -> None:
    driver = drive(num_sub_blocks=2)
    driver.start("a", prompt(9), max_tokens=66)
    driver.step(24)
    assert driver.num_stored == 0
    driver.step()
    assert driver.num_stored == 8
    driver.copy_all()
    driver.run()


@pytest.mark.proves("I2")
def test_a_store_holds_all_sub_blocks_until_its_end(drive: MakeDriver) -> None:
    driver = drive(num_sub_blocks=4)
    driver.start("a", prompt(17))
    while not driver.pending(STORE):
        driver.step()
    (store,) = driver.pending(STORE)
    assert len(store.device_blocks) == 4
    assert driver.num_held == (4, 1)
    assert driver.scheduler.has_pending_block_frees()
    driver.copy(STORE)
    driver.step()
    assert driver.num_held == (0, 0)
    assert driver.found(prompt(17)) == 16
    # The tail of a prefix is the first to be evicted from the device.
    free = [block.block_id for block in driver.device_pool.free_block_queue.get_all_free_blocks()]
    assert free[-4:] == store.device_blocks.tolist()[::-1]


def test_a_load_begins_where_the_device_stops(drive: MakeDriver) -> None:
    driver = drive(num_sub_blocks=4, num_device_blocks=60)
    driver.serve("before", prompt(40))
    driver.empty_device_cache()
    driver.serve("short", prompt(23))  # loads a host block, computes a block and a bit
    driver.start("long", prompt(40))
    driver.step()
    (load,) = driver.pending(LOAD)
    (_, second) = driver.tier.blocks_at(range(4, 12))
    assert load.host_blocks.tolist() == driver.tier.slots([second])[1:]
    driver.run()
    assert driver.world.finished["long"] == driver.world.finished["before"]


@pytest.mark.parametrize("num_sub_blocks", [2, 4])
@pytest.mark.parametrize(
    "model", [model for model in MODELS.values() if not model.get("num_states")], ids=str
)
def test_a_host_hit_is_as_long_as_its_whole_host_blocks_allow(
    drive: MakeDriver, model: dict[str, Any], num_sub_blocks: int
) -> None:
    """It begins at any device block; in layers with chunks, where the host block begins a chunk.
    The block of the last token is computed again, and a drafter computes one more."""
    driver = drive(
        num_device_blocks=200,
        num_host_blocks=400,
        num_sub_blocks=num_sub_blocks,
        retention=None,
        **model,
    )
    tokens = driver.serve("a", prompt(35), max_tokens=12)
    coordinator = driver.world.scheduler.kv_cache_manager.coordinator
    device_size = driver.world.shape.scheduler_block_size
    size = device_size * num_sub_blocks
    for length in range(1, len(tokens)):
        request = make_request("looker", tokens[:length])
        _, on_device, _ = coordinator.find_longest_cache_hit(request.block_hashes, length - 1)
        end = min(on_device, length // size * size - (4 if model.get("draft") else 0))
        for start in range(0, length, device_size):
            found = driver.tier.lookup(request.block_hashes, start, length - 1 - start)
            assert found.num_tokens == max(0, end - start)


def test_a_load_that_fails_a_second_time_drops_whole_host_blocks(drive: MakeDriver) -> None:
    driver = drive(num_sub_blocks=4, num_device_blocks=60, load_failures="recompute")
    driver.serve("before", prompt(60))
    for turn in range(2):
        driver.empty_device_cache()
        driver.serve(f"short {turn}", prompt(23))
        driver.start(f"long {turn}", prompt(60))
        driver.step()
        driver.copy(LOAD, fail=True)
        driver.step()
        assert driver.found(prompt(60)) == (16 if turn else 48)
        driver.run()
    assert driver.found(prompt(60)) == 48  # computed and stored again


@pytest.mark.parametrize(("num_on_device", "num_loaded"), [(0, 64), (4, 60), (8, 0), (36, 28)])
def test_a_hit_begins_in_the_first_host_block_of_a_chunk(
    drive: MakeDriver, num_on_device: int, num_loaded: int
) -> None:
    driver = drive(
        chunks=(32,), num_sub_blocks=2, num_device_blocks=90, num_host_blocks=90, retention=None
    )
    driver.serve("before", prompt(65))
    request = make_request("a", prompt(65))
    found = driver.scheduler.get_num_new_matched_tokens(request, num_on_device)
    assert found == (num_loaded, num_loaded > 0)
    driver.scheduler.request_finished(request)
    assert driver.num_held == (0, 0)


# Refused sizes


@pytest.mark.parametrize(
    ("model", "size", "complaint", "nearest"),
    [
        ({"scales": (1, 2)}, 1, "multiple of the 8 tokens", 8),
        ({"scales": (1, 2)}, 12, "multiple of the 8 tokens", 8),
        ({"scales": (1, 2)}, 13, "multiple of the 8 tokens", 16),
        ({"scales": (1, 2)}, 1000001, "multiple of the 8 tokens", 1000000),
        ({"chunks": (12,)}, 8, "attention_chunk_size=12", 12),
        ({"chunks": (12,)}, 20, "attention_chunk_size=12", 24),
        ({"chunks": (8192,)}, 48, "attention_chunk_size=8192", 64),
        ({"chunks": (8192,)}, 8196, "attention_chunk_size=8192", 8192),
    ],
    ids=str,
)
def test_a_size_that_does_not_fit(
    model: dict[str, Any], size: int, complaint: str, nearest: int
) -> None:
    """With chunked attention, a lookup would end inside a host block (Llama 4: 8192 tokens)."""
    windows = (0, 0) if "scales" in model else (0,)
    config = make_kv_cache_config(Shape(windows=windows, block_size=4, **model))
    with pytest.raises(
        ConfigError, match=f"cpu_block_size={size}: .*{complaint}.* nearest is {nearest}$"
    ):
        make_scheduler(config, num_cpu_blocks=9000, cpu_block_size=size)
    make_scheduler(config, num_cpu_blocks=9000, cpu_block_size=nearest)


@pytest.mark.parametrize("num_blocks", [2, 7])
def test_room_for_less_than_two_host_blocks(
    caplog: pytest.LogCaptureFixture, num_blocks: int
) -> None:
    scheduler = make_scheduler(make_config(), num_cpu_blocks=8, cpu_block_size=16)
    with pytest.raises(ConfigError, match=r"cpu_block_size=16: .* room for [01] host blocks of 16"):
        scheduler.agree_on_capacity([RankCapacity("r", num_blocks, num_blocks, 64)])
    caplog.set_level("INFO")
    scheduler.agree_on_capacity([RankCapacity("r", 8, 8, 64)])
    assert scheduler.tier.num_blocks == 2
    assert "Host tier: 2 blocks of 16 tokens" in caplog.text
