"""OffloadScheduler: its configuration, and its answers to vLLM."""

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
    KVCacheSpec,
    MambaSpec,
)
from vllm.v1.outputs import KVConnectorOutput

from simple_offload.config import OffloadConfig
from simple_offload.metadata import RankCapacity, WorkerReport
from simple_offload.scheduler.manager import OffloadScheduler
from tests.scheduler.conftest import MakeDriver
from tests.scheduler.driver import STORE, make_request, prompt, record_steps
from tests.scheduler.tiers import BLOCK_SIZE, commit_as
from tests.simulation.integrity import (
    check_scheduler,
    check_tier,
    groups_of,
    ids_in_flight,
    pool_of,
)
from tests.simulation.shape import Shape
from tests.simulation.vllm_config import make_kv_cache_config, make_vllm_config

MAMBA = MambaSpec(block_size=BLOCK_SIZE, shapes=((4, 4),), dtypes=(torch.float32,))


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
    config = OffloadConfig.parse(extra_config, num_ranks)
    return OffloadScheduler(vllm_config, kv_cache_config, config)


# Configuration


@pytest.mark.parametrize(
    ("extra_config", "words"),
    [
        ({}, "eager stores"),
        ({"lazy_offload": True}, "lazy stores"),
        ({"store_threshold": 3}, "eager stores of prefixes that 3 requests had"),
    ],
    ids=str,
)
def test_the_log_has_the_policy(
    extra_config: dict[str, Any], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    scheduler = make_scheduler(make_config(), num_cpu_blocks=8, **extra_config)
    scheduler.agree_on_capacity(capacities(8))
    assert caplog.messages[-1] == f"Host tier: 40 blocks of {BLOCK_SIZE} tokens, {words}"


def test_there_are_no_blocks_until_ranks_open_some() -> None:
    tier = make_scheduler(make_config(), num_cpu_blocks=8).tier
    assert tier.num_blocks == 1  # vLLM's null block
    assert tier.allocate(1) == []
    check_tier(tier)


# Opening


NUM_BLOCKS = 40


class Foreign(KVConnectorHandshakeMetadata):
    """The handshake of another connector's rank."""

    num_host_blocks = num_open = 2


def capacities(*num_open: int) -> list[RankCapacity]:
    """The handshake of each rank."""
    return [
        RankCapacity(f"r{rank}", NUM_BLOCKS, blocks, 64) for rank, blocks in enumerate(num_open)
    ]


def report(scheduler: OffloadScheduler, num_open: dict[str, int]) -> None:
    """Let ranks report their numbers of open blocks."""
    known = {rank: RankCapacity(rank, NUM_BLOCKS, opened, 64) for rank, opened in num_open.items()}
    output = KVConnectorOutput(kv_connector_worker_meta=WorkerReport(capacities=known))
    scheduler.update_connector_output(output)


@pytest.mark.parametrize("num_open", [(7,), (9, 7), (7, 30, 9), (40, 40, 7)], ids=str)
def test_the_smallest_rank_decides(num_open: tuple[int, ...]) -> None:
    scheduler = make_scheduler(make_config(), num_ranks=len(num_open), num_cpu_blocks=NUM_BLOCKS)
    scheduler.agree_on_capacity(capacities(*num_open))
    assert scheduler.tier.num_blocks == 7
    assert scheduler.tier.num_free == 6
    check_tier(scheduler.tier)


@pytest.mark.parametrize("num_blocks", [(8, 8), (9, 7), (9, 7, 8)], ids=str)
def test_the_log_has_the_capacity(
    num_blocks: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    scheduler = make_scheduler(make_config(), num_ranks=len(num_blocks), num_cpu_blocks=NUM_BLOCKS)
    scheduler.agree_on_capacity(
        RankCapacity(f"r{rank}", blocks, 2, 64) for rank, blocks in enumerate(num_blocks)
    )
    assert f"Host tier: {min(num_blocks)} blocks of {BLOCK_SIZE} tokens" in caplog.text
    assert ("all use 7" in caplog.text) == (len(set(num_blocks)) > 1)


@pytest.mark.parametrize("ranks", [(), (7,), (7, 8)], ids=str)
def test_the_tier_waits_for_every_rank(ranks: tuple[int, ...]) -> None:
    """Beside another connector the handshake may reach only some ranks, or none."""
    scheduler = make_scheduler(make_config(), num_ranks=3, num_cpu_blocks=NUM_BLOCKS)
    scheduler.agree_on_capacity(capacities(*ranks))
    report(scheduler, {})
    assert scheduler.tier.num_blocks == 1
    for rank in range(3):
        assert scheduler.tier.num_blocks == 1
        report(scheduler, {f"r{rank}": 5 + rank})
    assert scheduler.tier.num_blocks == 5


def test_the_tier_grows_with_the_slowest_rank() -> None:
    scheduler = make_scheduler(make_config(), num_ranks=2, num_cpu_blocks=NUM_BLOCKS)
    scheduler.agree_on_capacity(capacities(5, 9))
    sizes = []
    for num_open in ({"r1": 12}, {"r0": 9}, {"r0": 40}, {"r1": 30}, {"r0": 40, "r1": 40}):
        report(scheduler, num_open)
        sizes.append(scheduler.tier.num_blocks)
    assert sizes == [5, 9, 12, 30, 40]
    check_tier(scheduler.tier)


@given(st.data())
def test_the_tier_has_the_blocks_that_every_rank_has(data: st.DataObject) -> None:
    """For any reports in any order. A rank's number only grows."""
    num_ranks = data.draw(st.integers(1, 4))
    scheduler = make_scheduler(make_config(), num_ranks, num_cpu_blocks=NUM_BLOCKS)
    known: dict[str, int] = {}
    ranks = st.sets(st.integers(0, num_ranks - 1))
    for _ in range(data.draw(st.integers(1, 6))):
        news = {
            f"r{rank}": min(NUM_BLOCKS, known.get(f"r{rank}", 1) + data.draw(st.integers(0, 15)))
            for rank in data.draw(ranks)
        }
        known |= news
        report(scheduler, news)
        wanted = min(known.values()) if len(known) == num_ranks else 1
        assert scheduler.tier.num_blocks == wanted
        assert scheduler.tier.num_free == wanted - 1
        check_tier(scheduler.tier)


@pytest.mark.parametrize("foreign_first", [True, False])
def test_reports_of_other_connectors_ranks_do_not_count(
    drive: MakeDriver, foreign_first: bool
) -> None:
    driver = drive(num_host_blocks=NUM_BLOCKS, num_handshakes=0)
    metadata: list[KVConnectorHandshakeMetadata] = [Foreign(), *capacities(7)]
    driver.world.connector.set_xfer_handshake_metadata_pp_aware(
        dict(enumerate(metadata if foreign_first else metadata[::-1]))
    )
    assert driver.tier.num_blocks == 7


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


# Reports


@dataclass
class ForeignReport(KVConnectorWorkerMetadata):
    """The report of another connector's rank."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        return self


@pytest.mark.parametrize("report", [None, ForeignReport()], ids=["none", "foreign"])
def test_reports_of_others_are_ignored(
    drive: MakeDriver, report: KVConnectorWorkerMetadata | None
) -> None:
    driver = drive()
    driver.start("a", prompt(17))
    driver.step(2)
    assert len(ids_in_flight(driver.scheduler)) == 1
    driver.scheduler.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=report))
    assert len(ids_in_flight(driver.scheduler)) == 1
    driver.run()


def test_vllm_may_free_a_finished_request(drive: MakeDriver) -> None:
    driver = drive()
    request = driver.start("a", prompt(17), max_tokens=9)
    driver.step(2)
    assert driver.scheduler.request_finished(request) == (False, None)
    assert driver.scheduler.request_finished(request) == (False, None)
    driver.run()


def test_a_step_names_whether_it_computes(drive: MakeDriver) -> None:
    driver = drive()
    steps = record_steps(driver)
    driver.start("a", prompt(17))
    driver.run()
    # Two steps of compute, then steps that wait for the stores.
    assert [step.computes for step in steps][:1] == [True]
    assert [bool(step.stores) for step in steps].count(True) == 1
    assert not steps[-1].computes


# Where a hit may start


class Chunked:
    """A scheduler side whose second group attends to chunks of two blocks. Its tier holds the
    blocks of 32 tokens in both groups."""

    def __init__(self, spec: KVCacheSpec | None) -> None:
        last = {} if spec is None else {"kv_cache_spec": spec}
        self.scheduler = make_scheduler(make_config((0, 0), **last), num_cpu_blocks=30)
        self.request = make_request("a", prompt(33))
        self.scheduler.agree_on_capacity(capacities(30))
        tier = self.scheduler.tier
        for group in groups_of(tier).ids:
            parent = None
            for index, key in enumerate(groups_of(tier).keys(self.request.block_hashes, group)):
                (block,) = tier.allocate(1)
                commit_as(tier, block, key, parent, num_tokens=(index + 1) * BLOCK_SIZE)
                parent = key

    def offered(self, num_computed_tokens: int) -> int:
        num_tokens, is_async = self.scheduler.get_num_new_matched_tokens(
            self.request, num_computed_tokens
        )
        assert is_async == (num_tokens > 0)
        return num_tokens

    @property
    def num_pinned(self) -> int:
        tier = self.scheduler.tier
        return tier.num_blocks - 1 - pool_of(tier).get_num_free_blocks()


CHUNKED = ChunkedLocalAttentionSpec(
    block_size=BLOCK_SIZE,
    num_kv_heads=1,
    head_size=1,
    dtype=torch.float32,
    attention_chunk_size=2 * BLOCK_SIZE,
)


@pytest.mark.parametrize("num_blocks", range(9))
def test_a_hit_starts_with_a_chunk(num_blocks: int) -> None:
    """The lookup covers only blocks that the device lacks, so the tier must have their whole
    chunks."""
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
        assert plain.num_pinned == 0  # the earlier hit is unpinned


# Integrity


@pytest.mark.proves("I7")
def test_a_leaking_host_block_is_noticed(drive: MakeDriver) -> None:
    driver = drive()
    driver.serve("a", prompt(17))
    check_scheduler(driver.scheduler)
    leaked = driver.tier.allocate(1)
    with pytest.raises(AssertionError, match="1 host blocks are pinned by nothing"):
        check_scheduler(driver.scheduler)
    driver.tier.unpin(leaked)
    check_scheduler(driver.scheduler)


def test_a_transfer_that_nothing_waits_for_is_noticed(drive: MakeDriver) -> None:
    driver = drive()
    driver.scheduler._ledger.begin()
    with pytest.raises(AssertionError, match="in flight, and nothing waits for them"):
        check_scheduler(driver.scheduler)


def test_stores_are_checked(drive: MakeDriver) -> None:
    driver = drive()
    driver.start("a", prompt(17))
    driver.step(2)
    (store,) = driver.pending(STORE)
    check_scheduler(driver.scheduler)
    held = driver.device_pool.blocks[store.device_blocks.tolist()[0]]
    count, held.ref_cnt = held.ref_cnt, 0
    with pytest.raises(AssertionError, match="free during a store"):
        check_scheduler(driver.scheduler)
    held.ref_cnt = count
    driver.host_pool.free_block_queue.num_free_blocks += 1
    with pytest.raises(AssertionError, match="miscounted"):
        check_scheduler(driver.scheduler)
    driver.host_pool.free_block_queue.num_free_blocks -= 1
    driver.run()
