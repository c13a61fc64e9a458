"""OffloadScheduler: what it is built from, and what it tells vLLM."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorWorkerMetadata,
)
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
)
from vllm.v1.outputs import KVConnectorOutput

from simple_offload.config import ConfigError, OffloadConfig
from simple_offload.metadata import RankCapacity
from simple_offload.scheduler.manager import OffloadScheduler
from tests.scheduler.conftest import MakeDriver
from tests.scheduler.driver import STORE, Driver, make_request, prompt
from tests.scheduler.tiers import BLOCK_SIZE
from tests.simulation.world import Shape, make_kv_cache_config, make_vllm_config

MAMBA = MambaSpec(block_size=BLOCK_SIZE, shapes=((4, 4),), dtypes=(torch.float32,))


def make_config(windows: tuple[int, ...] = (0,), **last_group: object) -> KVCacheConfig:
    """A model's groups, the last of which is different."""
    config = make_kv_cache_config(Shape(windows=windows, block_size=BLOCK_SIZE))
    *others, last = config.kv_cache_groups
    return replace(config, kv_cache_groups=[*others, replace(last, **last_group)])  # type: ignore[arg-type]


def make_scheduler(
    kv_cache_config: KVCacheConfig, num_ranks: int = 1, **extra_config: object
) -> OffloadScheduler:
    transfer = KVTransferConfig(
        kv_connector="SimpleCPUOffloadConnector",
        kv_connector_module_path="simple_offload",
        kv_role="kv_both",
    )
    vllm_config = make_vllm_config(Shape(block_size=BLOCK_SIZE, num_ranks=num_ranks), transfer)
    config = OffloadConfig.parse(extra_config, num_ranks)
    return OffloadScheduler(vllm_config, kv_cache_config, config)


# What it is built from


def test_lazy_stores_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"lazy_offload=True: .*; allowed: false"):
        make_scheduler(make_config(), num_cpu_blocks=8, lazy_offload=True)
    make_scheduler(make_config(), num_cpu_blocks=8, lazy_offload=False)


def test_state_layers_are_refused() -> None:
    with pytest.raises(ConfigError, match="Mamba-like state layers are not supported"):
        make_scheduler(make_config((0, 8), kv_cache_spec=MAMBA), num_cpu_blocks=8)


def test_models_without_prefix_caching_are_refused() -> None:
    with pytest.raises(ConfigError, match="no KV cache group that prefix caching covers"):
        make_scheduler(make_config(enable_kv_transfer=False), num_cpu_blocks=8)


def test_groups_in_host_memory_are_refused() -> None:
    with pytest.raises(ConfigError, match="in host memory already"):
        make_scheduler(make_config((0, 8), host_resident=True), num_cpu_blocks=8)


def test_blocks_of_the_tier() -> None:
    config = make_config()
    block_bytes = config.kv_cache_tensors[0].size // config.num_blocks
    assert make_scheduler(config, num_cpu_blocks=8).tier.num_blocks == 8
    sized = make_scheduler(config, num_ranks=2, cpu_bytes_to_use=2 * 7 * block_bytes)
    assert sized.tier.num_blocks == 7


def test_what_the_engine_has_agreed_on_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM 0.33 has asked the ranks before the scheduler is built."""
    monkeypatch.setattr(
        "simple_offload.scheduler.manager.vllm_compat.agreed_num_host_blocks", lambda config: 5
    )
    assert make_scheduler(make_config(), num_cpu_blocks=8).tier.num_blocks == 5


# Agreeing on a capacity


class Foreign(KVConnectorHandshakeMetadata):
    """What another connector's rank says."""

    num_host_blocks = 2


def agree(driver: Driver, capacities: Sequence[int | None]) -> None:
    """Let each rank say its number of blocks; None: something foreign."""
    driver.world.connector.set_xfer_handshake_metadata_pp_aware(
        {
            (0, rank): Foreign() if blocks is None else RankCapacity(blocks, 64)
            for rank, blocks in enumerate(capacities)
        }
    )


@pytest.mark.parametrize("capacities", [(7,), (9, 7), (7, 30, 9), (None, 7, None, 8)], ids=str)
def test_the_smallest_rank_decides(
    drive: MakeDriver, capacities: Sequence[int | None], caplog: pytest.LogCaptureFixture
) -> None:
    driver = drive(num_host_blocks=40)
    caplog.set_level("INFO")
    agree(driver, capacities)
    assert driver.tier.num_blocks == 7
    uneven = len({blocks for blocks in capacities if blocks}) > 1
    assert ("all use 7" in caplog.text) == uneven
    driver.say("a", prompt(60))
    assert driver.num_kept == 6
    driver.forget_device()
    driver.say("b", prompt(60))
    assert driver.world.num_blocks_loaded == 6


@pytest.mark.parametrize("capacities", [(), (None, None), (40, 40)], ids=str)
def test_nothing_changes_when_nothing_differs(
    drive: MakeDriver, capacities: Sequence[int | None]
) -> None:
    driver = drive(num_host_blocks=40)
    before = driver.tier
    agree(driver, capacities)
    assert driver.tier is before


def test_a_capacity_may_be_known_before_the_device_blocks_are() -> None:
    scheduler = make_scheduler(make_config(), num_cpu_blocks=8)
    scheduler.agree_on_capacity([RankCapacity(6, 64)])
    assert scheduler.tier.num_blocks == 6


# What it is told


@dataclass
class ForeignReport(KVConnectorWorkerMetadata):
    """What another connector's rank reports."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        return self


@pytest.mark.parametrize("report", [None, ForeignReport()], ids=["none", "foreign"])
def test_reports_of_others_are_ignored(
    drive: MakeDriver, report: KVConnectorWorkerMetadata | None
) -> None:
    driver = drive()
    driver.start("a", prompt(17))
    driver.step(2)
    assert driver.scheduler.num_in_flight == 1
    driver.scheduler.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=report))
    assert driver.scheduler.num_in_flight == 1
    driver.run()


def test_vllm_may_free_a_finished_request(drive: MakeDriver) -> None:
    driver = drive()
    request = driver.start("a", prompt(17), max_tokens=9)
    driver.step(2)
    assert driver.scheduler.request_finished(request) == (False, None)
    assert driver.scheduler.request_finished(request) == (False, None)
    driver.run()


# Where a hit may start


class Chunked:
    """A scheduler side whose second group attends to chunks of two blocks, and whose tier holds
    the blocks of 32 tokens in both groups."""

    def __init__(self, spec: KVCacheSpec | None) -> None:
        last = {} if spec is None else {"kv_cache_spec": spec}
        self.scheduler = make_scheduler(make_config((0, 0), **last), num_cpu_blocks=30)
        self.request = make_request("a", prompt(33))
        tier = self.scheduler.tier
        for group in tier.group_ids:
            for index in range(8):
                key = tier.key(self.request.block_hashes, group, index)
                parent = tier.key(self.request.block_hashes, group, index - 1) if index else None
                block = tier.allocate(parent)
                assert block is not None
                tier.commit(block, key, parent, num_tokens=(index + 1) * BLOCK_SIZE)

    def offered(self, num_computed_tokens: int) -> int:
        num_tokens, is_async = self.scheduler.get_num_new_matched_tokens(
            self.request, num_computed_tokens
        )
        assert is_async == (num_tokens > 0)
        return num_tokens

    @property
    def num_pinned(self) -> int:
        tier = self.scheduler.tier
        return tier.num_blocks - 1 - tier.pool.get_num_free_blocks()


CHUNKED = ChunkedLocalAttentionSpec(
    block_size=BLOCK_SIZE,
    num_kv_heads=1,
    head_size=1,
    dtype=torch.float32,
    attention_chunk_size=2 * BLOCK_SIZE,
)


@pytest.mark.parametrize("num_blocks", range(9))
def test_a_hit_starts_with_a_chunk(num_blocks: int) -> None:
    """Only what the device lacks is looked up, so what is in a chunk with it must be there."""
    chunked = Chunked(CHUNKED)
    wanted = 32 - num_blocks * BLOCK_SIZE if num_blocks % 2 == 0 else 0
    assert chunked.offered(num_blocks * BLOCK_SIZE) == wanted
    assert (chunked.num_pinned > 0) == (wanted > 0)


@pytest.mark.parametrize("num_blocks", range(9))
def test_without_chunks_a_hit_starts_with_a_block(num_blocks: int) -> None:
    assert Chunked(None).offered(num_blocks * BLOCK_SIZE) == 32 - num_blocks * BLOCK_SIZE


def test_a_hit_does_not_start_within_a_block() -> None:
    plain = Chunked(None)
    for num_tokens in (1, 2, 3, 5):
        assert plain.offered(BLOCK_SIZE) > 0
        assert plain.num_pinned > 0
        assert plain.offered(num_tokens) == 0
        assert plain.num_pinned == 0  # what was offered before is let go of


# Integrity


def test_a_leaking_host_block_is_noticed(drive: MakeDriver) -> None:
    driver = drive()
    driver.say("a", prompt(17))
    driver.scheduler.check_integrity()
    leaked = driver.tier.allocate(None)
    assert leaked is not None
    with pytest.raises(AssertionError, match="1 host blocks are held by nobody"):
        driver.scheduler.check_integrity()
    driver.tier.unpin([leaked])
    driver.scheduler.check_integrity()


def test_a_transfer_that_nobody_waits_for_is_noticed(drive: MakeDriver) -> None:
    driver = drive()
    driver.scheduler._in_flight.begin()
    with pytest.raises(AssertionError, match="1 transfers nobody waits for"):
        driver.scheduler.check_integrity()


def test_each_part_is_checked(drive: MakeDriver) -> None:
    driver = drive()
    driver.start("a", prompt(17))
    driver.step(2)
    (store,) = driver.pending(STORE)
    driver.scheduler.check_integrity()
    held = driver.device_pool.blocks[store.device_blocks.tolist()[0]]
    count, held.ref_cnt = held.ref_cnt, 0
    with pytest.raises(AssertionError, match="free during a store"):
        driver.scheduler.check_integrity()
    held.ref_cnt = count
    driver.tier.pool.free_block_queue.num_free_blocks += 1
    with pytest.raises(AssertionError, match="miscounted"):
        driver.scheduler.check_integrity()
    driver.tier.pool.free_block_queue.num_free_blocks -= 1
    driver.run()
