"""Host blocks of several sub-blocks: stored as a whole, loaded from any sub-block to any other."""

from typing import Any

import pytest
from vllm.v1.outputs import KVConnectorOutput

from simple_offload.config import ConfigError
from simple_offload.metadata import RankCapacity, WorkerReport
from simple_offload.vllm_compat import vllm_version
from tests.scheduler.conftest import MakeDriver
from tests.scheduler.driver import LOAD, make_request, prompt, record_steps
from tests.scheduler.test_manager import make_config, make_scheduler
from tests.simulation.groups import MODELS
from tests.simulation.shape import Shape

# Stores and loads


def test_single_sub_blocks_are_not_stored(drive: MakeDriver) -> None:
    """They wait until the conversation has filled the host block."""
    driver = drive(num_sub_blocks=4, num_device_blocks=60)
    history = driver.serve("a", prompt(17), max_tokens=14)  # 30 tokens computed
    assert (driver.num_stored, driver.found(history)) == (4, 16)
    history = driver.serve("b", [*history, *prompt(2, family=1)])
    assert (driver.num_stored, driver.found([*history, 1])) == (8, 32)


def test_host_blocks_are_stored_eight_device_blocks_at_a_time(drive: MakeDriver) -> None:
    """Those of prompts do not wait."""
    driver = drive(num_sub_blocks=2, lazy=False)
    driver.start("a", prompt(9), max_tokens=66)
    steps = record_steps(driver)
    driver.run()
    stores = [store for step in steps for store in step.stores]
    assert [len(store.host_blocks) for store in stores] == [2, 8, 8]


@pytest.mark.parametrize("num_sub_blocks", [2, 4])
@pytest.mark.parametrize(
    "model", [model for model in MODELS.values() if not model.get("num_states")], ids=str
)
def test_a_host_hit_is_as_long_as_its_whole_host_blocks_allow(
    drive: MakeDriver, model: dict[str, Any], num_sub_blocks: int
) -> None:
    """It begins at any device block; in layers with chunks, where the host block begins a chunk.
    The block of the last token is computed again, and a drafter computes one more. Before 0.32,
    vLLM's lookup for a drafter does not see a last block that the prompt fills."""
    sees_all = vllm_version() >= (0, 32) or not model.get("draft")
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
            if sees_all or length % size:
                assert found.num_tokens == max(0, end - start)


def test_a_load_that_fails_drops_whole_host_blocks(drive: MakeDriver) -> None:
    driver = drive(num_sub_blocks=4, num_device_blocks=60, load_failures="recompute")
    driver.serve("before", prompt(60))
    driver.empty_device_cache()
    driver.serve("short", prompt(23))
    driver.start("long", prompt(60))
    driver.step()
    driver.copy(LOAD, fail=True)
    driver.step()
    assert driver.found(prompt(60)) == 16
    driver.run()
    assert driver.found(prompt(60)) == 48  # computed and stored again


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
    config = Shape(windows=windows, block_size=4, **model).kv_cache_config()
    with pytest.raises(
        ConfigError, match=f"cpu_block_size={size}: .*{complaint}.* nearest is {nearest}$"
    ):
        make_scheduler(config, num_cpu_blocks=9000, cpu_block_size=size)
    make_scheduler(config, num_cpu_blocks=9000, cpu_block_size=nearest)


@pytest.mark.parametrize("num_blocks", [2, 7])
@pytest.mark.parametrize("by_report", [False, True], ids=["at start", "beside another connector"])
def test_room_for_less_than_two_host_blocks(
    caplog: pytest.LogCaptureFixture, num_blocks: int, by_report: bool
) -> None:
    scheduler = make_scheduler(make_config(), num_cpu_blocks=8, cpu_block_size=16)

    def tell(num_blocks: int) -> None:
        capacity = RankCapacity("r", num_blocks, num_blocks, 64)
        if by_report:
            report = WorkerReport(capacities={"r": capacity})
            scheduler.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=report))
        else:
            scheduler.agree_on_capacity([capacity])

    with pytest.raises(ConfigError, match=r"cpu_block_size=16: .* room for [01] host blocks of 16"):
        tell(num_blocks)
    caplog.set_level("INFO")
    tell(8)
    assert scheduler.tier.num_blocks == 2
    assert "Host tier: 2 blocks of 16 tokens" in caplog.text
