"""OffloadScheduler: its configuration, and its answers to vLLM."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorWorkerMetadata,
)
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    KVCacheConfig,
    MambaSpec,
)
from vllm.v1.outputs import KVConnectorOutput

from simple_offload.config import OffloadConfig
from simple_offload.metadata import RankCapacity, WorkerReport
from simple_offload.scheduler.manager import OffloadScheduler
from tests.scheduler.conftest import MakeDriver
from tests.scheduler.driver import LOAD, STORE, Driver, make_request, prompt, record_steps
from tests.scheduler.tiers import BLOCK_SIZE, commit_as
from tests.simulation.integrity import check_scheduler, check_tier, groups_of, ids_in_flight
from tests.simulation.shape import Shape
from tests.simulation.vllm_config import make_kv_cache_config, make_vllm_config

MAMBA = MambaSpec(block_size=BLOCK_SIZE, shapes=((4, 4),), dtypes=(torch.float32,))
NUM_BLOCKS = 40


def make_config(windows: tuple[int, ...] = (0,), **last_group: object) -> KVCacheConfig:
    """A model's groups, with changes to the last one."""
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
    config = OffloadConfig.parse({"num_cpu_blocks": NUM_BLOCKS} | extra_config, num_ranks)
    return OffloadScheduler(vllm_config, kv_cache_config, config)


def capacities(*num_blocks: int, num_open: int = NUM_BLOCKS) -> list[RankCapacity]:
    """The handshake of ranks with room for these numbers of host blocks."""
    return [RankCapacity(f"r{i}", blocks, num_open, 64) for i, blocks in enumerate(num_blocks)]


# Capacity


@pytest.mark.parametrize(
    ("extra_config", "num_blocks", "lines"),
    [
        ({}, (8, 8), ["Host tier: 8 blocks of 4 tokens, eager stores"]),
        (
            {"lazy_offload": True},
            (9, 7, 8),
            [
                "Ranks have room for [9, 7, 8] host blocks; all use 7",
                "Host tier: 7 blocks of 4 tokens, lazy stores",
            ],
        ),
        (
            {"store_threshold": 3},
            (8,),
            ["Host tier: 8 blocks of 4 tokens, eager stores of prefixes that 3 requests had"],
        ),
    ],
    ids=["eager", "lazy, unlike ranks", "threshold"],
)
def test_the_log_has_capacity_and_policy(
    extra_config: dict[str, Any],
    num_blocks: tuple[int, ...],
    lines: list[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    scheduler = make_scheduler(make_config(), num_ranks=len(num_blocks), **extra_config)
    scheduler.agree_on_capacity(capacities(*num_blocks))
    assert caplog.messages[-len(lines) :] == lines


@given(st.data())
def test_the_smallest_rank_decides(data: st.DataObject) -> None:
    """The tier has the blocks that every rank has opened, and none before each rank has spoken.
    Beside another connector the handshake may reach only some ranks, or none. A rank's number only
    grows."""
    num_ranks = data.draw(st.integers(1, 4))
    scheduler = make_scheduler(make_config(), num_ranks)
    assert scheduler.tier.num_blocks == 1  # vLLM's null block
    known: dict[str, int] = {}
    ranks = st.sets(st.integers(0, num_ranks - 1))
    for turn in range(data.draw(st.integers(1, 6))):
        news = {
            f"r{rank}": min(NUM_BLOCKS, known.get(f"r{rank}", 1) + data.draw(st.integers(0, 15)))
            for rank in data.draw(ranks)
        }
        known |= news
        reported = {rank: RankCapacity(rank, NUM_BLOCKS, news[rank], 64) for rank in news}
        if turn == 0:
            scheduler.agree_on_capacity(reported.values())
        else:
            report = WorkerReport(capacities=reported)
            scheduler.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=report))
        wanted = min(known.values()) if len(known) == num_ranks else 1
        assert scheduler.tier.num_blocks == wanted
        assert scheduler.tier.num_free == len(scheduler.tier.allocate(NUM_BLOCKS)) == wanted - 1
        scheduler.tier.unpin(scheduler.tier._pool.blocks[1:])
        check_tier(scheduler.tier)


def test_a_tier_that_grows_while_it_serves(drive: MakeDriver) -> None:
    driver = drive(num_host_blocks=10, chunk_blocks=4, num_ranks=2)
    slow, fast = driver.world.ranks
    sizes = []
    for family, opening in enumerate([(), (fast,), (slow,), (slow, fast)]):
        for rank in opening:
            driver.world.open_chunk(rank)
        driver.step()  # ranks report in each step
        driver.serve(f"{family}", prompt(60, family))
        sizes.append((driver.tier.num_blocks, driver.num_kept))
    assert sizes == [(4, 3), (4, 3), (8, 7), (10, 9)]
    driver.empty_device_cache()
    driver.serve("again", prompt(60, family))
    assert driver.world.num_blocks_loaded == 2 * 9  # on two ranks


@pytest.mark.parametrize("num_handshakes", [2, 0])
def test_ranks_open_no_more_than_the_smallest_has_room_for(
    drive: MakeDriver, num_handshakes: int
) -> None:
    """Each rank has one chunk before it knows the capacity. With the handshake, an idle engine
    steps once to send it. Without (beside another connector), it steps once more to report."""
    shape = {"uneven_ranks": True, "num_ranks": 2, "num_host_blocks": 10, "chunk_blocks": 2}
    driver = drive(num_handshakes=num_handshakes, **shape)
    large, small = driver.world.ranks
    assert not any(driver.world.can_open(rank) for rank in (large, small))
    if num_handshakes == 0:
        driver.step()
    assert driver.scheduler.has_pending_work()
    driver.step()
    assert not driver.scheduler.has_pending_work()
    for rank in (large, small):
        while driver.world.can_open(rank):
            driver.world.open_chunk(rank)
    assert [rank.worker.capacity.num_host_blocks for rank in (large, small)] == [20, 10]
    assert [rank.worker.host_pool.num_open for rank in (large, small)] == [10, 10]
    driver.step()
    assert driver.tier.num_blocks == 10


def test_equal_ranks_need_no_step_to_agree(drive: MakeDriver) -> None:
    driver = drive(num_ranks=2, num_host_blocks=10, chunk_blocks=2)
    assert not driver.scheduler.has_pending_work()
    assert all(driver.world.can_open(rank) for rank in driver.world.ranks)


# Other connectors


class ForeignHandshake(KVConnectorHandshakeMetadata):
    """Of another connector's rank."""

    num_host_blocks = num_open = 2


@dataclass
class ForeignReport(KVConnectorWorkerMetadata):
    """Of another connector's rank."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        return self


@pytest.mark.parametrize("foreign_first", [True, False])
def test_handshakes_of_other_connectors_do_not_count(
    drive: MakeDriver, foreign_first: bool
) -> None:
    driver = drive(num_host_blocks=NUM_BLOCKS, num_handshakes=0)
    metadata = [ForeignHandshake(), *capacities(NUM_BLOCKS, num_open=7)]
    driver.world.connector.set_xfer_handshake_metadata_pp_aware(
        dict(enumerate(metadata if foreign_first else metadata[::-1]))
    )
    assert driver.tier.num_blocks == 7


@pytest.mark.parametrize("report", [None, ForeignReport()], ids=["none", "foreign"])
def test_reports_of_other_connectors_do_not_count(
    drive: MakeDriver, report: KVConnectorWorkerMetadata | None
) -> None:
    driver = drive()
    driver.start("a", prompt(17))
    driver.step(2)
    in_flight = ids_in_flight(driver.scheduler)
    assert len(in_flight) == 1
    driver.scheduler.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=report))
    assert ids_in_flight(driver.scheduler) == in_flight
    driver.run()


# Steps


def test_a_step_names_whether_it_computes(drive: MakeDriver) -> None:
    """A step of compute, then steps that wait for the store."""
    driver = drive()
    steps = record_steps(driver)
    request = driver.start("a", prompt(17))
    driver.step()
    assert steps[0].computes
    for _ in range(2):  # vLLM may free it, and tells so again
        assert driver.scheduler.request_finished(request) == (False, None)
    driver.run()
    assert [bool(step.stores) for step in steps].count(True) == 1
    assert not steps[-1].computes


# Where a hit may start


CHUNKED = ChunkedLocalAttentionSpec(
    block_size=BLOCK_SIZE,
    num_kv_heads=1,
    head_size=1,
    dtype=torch.float32,
    attention_chunk_size=2 * BLOCK_SIZE,
)


@pytest.mark.parametrize(
    ("last_group", "first_tokens"),
    [({}, [0, 4, 8, 12, 16, 20, 24, 28]), ({"kv_cache_spec": CHUNKED}, [0, 8, 16, 24])],
    ids=["blocks", "chunks"],
)
def test_a_hit_starts_with_a_block_and_a_chunk(
    last_group: dict[str, Any], first_tokens: list[int]
) -> None:
    """The lookup covers only blocks that the device lacks, so the tier must have their whole
    chunks. Elsewhere an earlier hit is unpinned."""
    scheduler = make_scheduler(make_config((0, 0), **last_group))
    scheduler.agree_on_capacity(capacities(NUM_BLOCKS))
    tier, request = scheduler.tier, make_request("a", prompt(33))
    for group in groups_of(tier).ids:
        parent = None
        for index, key in enumerate(groups_of(tier).keys(request.block_hashes, group)):
            (block,) = tier.allocate(1)
            commit_as(tier, block, key, parent, num_tokens=(index + 1) * BLOCK_SIZE)
            parent = key
    for num_tokens in range(33):
        assert scheduler.get_num_new_matched_tokens(request, 0) == (32, True)
        hit = 32 - num_tokens if num_tokens in first_tokens else 0
        assert scheduler.get_num_new_matched_tokens(request, num_tokens) == (hit, hit > 0)
        assert (tier.num_free < NUM_BLOCKS - 1) == (hit > 0)


# The tests' own checks


def _leak_a_host_block(driver: Driver) -> None:
    driver.run()
    driver.tier.allocate(1)


def _begin_a_transfer(driver: Driver) -> None:
    driver.run()
    driver.scheduler._ledger.begin()


def _free_a_block_of_a_store(driver: Driver) -> None:
    (store,) = driver.pending(STORE)
    driver.device_pool.blocks[store.device_blocks[0]].ref_cnt = 0


def _find_a_block_too_soon(driver: Driver) -> None:
    (store,) = driver.scheduler._stores._in_flight.values()
    (run,) = store.runs
    driver.host_pool._insert_block_hash(run.keys[0], run.host_blocks[0], num_tokens=4)
    driver.tier.num_used += 1


def _free_a_block_of_a_load(driver: Driver) -> None:
    (load,) = driver.pending(LOAD)
    driver.device_pool.blocks[load.device_blocks[0]].ref_cnt = 0


@pytest.mark.proves("I7")
@pytest.mark.parametrize(
    ("corrupt", "complaint"),
    [
        (_leak_a_host_block, "1 host blocks are pinned by nothing"),
        (_begin_a_transfer, "in flight, and nothing waits for them"),
        (_free_a_block_of_a_store, "free during a store"),
        (_find_a_block_too_soon, "can be found too soon"),
        (_free_a_block_of_a_load, "b: block is free"),
    ],
)
def test_what_the_scheduler_side_loses_is_noticed(
    drive: MakeDriver, corrupt: Callable[[Driver], None], complaint: str
) -> None:
    driver = drive(num_device_blocks=40)
    driver.serve("before", prompt(17, family=1))
    driver.empty_device_cache()
    driver.start("a", prompt(17))
    driver.step(2)
    driver.start("b", prompt(17, family=1))
    driver.step()
    assert driver.pending(LOAD)
    check_scheduler(driver.scheduler)
    corrupt(driver)
    with pytest.raises(AssertionError, match=complaint):
        check_scheduler(driver.scheduler)
