"""OffloadScheduler: its configuration, and its answers to vLLM."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import pytest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorWorkerMetadata,
)
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput

from simple_offload.config import OffloadConfig
from simple_offload.metadata import RankCapacity, WorkerReport
from simple_offload.ranks import Ranks
from simple_offload.scheduler.manager import OffloadScheduler
from tests.scheduler.conftest import MakeDriver
from tests.scheduler.driver import make_request, prompt
from tests.scheduler.tiers import BLOCK_SIZE
from tests.simulation.integrity import ids_in_flight
from tests.simulation.shape import Shape
from tests.simulation.vllm_config import make_vllm_config

NUM_BLOCKS = 40


def make_config(windows: tuple[int, ...] = (0,), **last_group: object) -> KVCacheConfig:
    """A model's groups, with changes to the last one."""
    config = Shape(windows=windows, block_size=BLOCK_SIZE).kv_cache_config()
    *others, last = config.kv_cache_groups
    return replace(config, kv_cache_groups=[*others, replace(last, **last_group)])  # type: ignore[arg-type]


def make_scheduler(
    kv_cache_config: KVCacheConfig,
    num_ranks: int = 1,
    settings: Mapping[str, object] = {},
    **extra_config: object,
) -> OffloadScheduler:
    """``settings``: of vLLM, such as "parallel_config.tensor_parallel_size"."""
    transfer = KVTransferConfig(
        kv_connector="SimpleCPUOffloadConnector",
        kv_connector_module_path="simple_offload",
        kv_role="kv_both",
    )
    vllm_config = make_vllm_config(Shape(block_size=BLOCK_SIZE, num_ranks=num_ranks), transfer)
    for name, value in settings.items():
        *owners, last = name.split(".")
        setattr(reduce(getattr, owners, vllm_config), last, value)
    config = OffloadConfig.parse(
        {"num_cpu_blocks": NUM_BLOCKS} | extra_config, Ranks(num_ranks, num_ranks)
    )
    return OffloadScheduler(vllm_config, kv_cache_config, config)


def capacities(*num_blocks: int, num_open: int = NUM_BLOCKS) -> list[RankCapacity]:
    """The handshake of ranks with room for these numbers of host blocks."""
    return [RankCapacity(f"r{i}", blocks, num_open, 64) for i, blocks in enumerate(num_blocks)]


# Capacity


@pytest.mark.parametrize(
    ("extra_config", "num_blocks", "lines"),
    [
        ({}, (8, 8), ["Host tier: 8 blocks of 4 tokens, stores early where there is room"]),
        (
            {"lazy_offload": True},
            (9, 7, 8),
            [
                "Ranks have room for [9, 7, 8] host blocks; all use 7",
                "Host tier: 7 blocks of 4 tokens, stores when the device evicts",
            ],
        ),
        (
            {"lazy_offload": False, "store_threshold": 3},
            (8,),
            ["Host tier: 8 blocks of 4 tokens, stores at once, prefixes that 3 requests had"],
        ),
    ],
    ids=["default", "lazy, unlike ranks", "eager, threshold"],
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


@pytest.mark.parametrize("num_handshakes", [2, 0])
def test_ranks_open_no_more_than_the_smallest_has_room_for(
    drive: MakeDriver, num_handshakes: int
) -> None:
    """Each rank has one chunk before it knows the capacity. With the handshake, an idle engine
    steps once to send it. Without (beside another connector), it steps once more to report."""
    shape = {"uneven_ranks": True, "num_ranks": 2, "num_host_blocks": 10, "chunk_blocks": 2}
    driver = drive(num_handshakes=num_handshakes, lazy=True, **shape)
    large, small = driver.world.ranks
    assert [rank.worker.capacity.num_host_blocks for rank in (large, small)] == [20, 10]
    assert not any(driver.world.can_open(rank) for rank in (large, small))
    if num_handshakes == 0:
        driver.step()
    assert driver.scheduler.has_pending_work()
    driver.step()
    assert not driver.scheduler.has_pending_work()
    for rank in (large, small):
        while driver.world.can_open(rank):
            driver.world.open_chunk(rank)
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


def test_reports_of_unknown_transfers_are_logged_and_ignored(
    drive: MakeDriver, caplog: pytest.LogCaptureFixture
) -> None:
    """The failure of a transfer before its begin does not count."""
    driver = drive()
    report = WorkerReport(Counter([0, 7]), Counter([0]))
    driver.scheduler.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=report))
    assert caplog.messages[-2:] == [
        f"A rank reported transfer {unknown}, which is not in flight" for unknown in (0, 7)
    ]
    driver.serve("a", prompt(17))
    assert driver.found(prompt(17)) == 16


def test_a_request_may_get_blocks_and_end_between_two_steps(drive: MakeDriver) -> None:
    """The load balancer of vllm-ascend (DyntraLB) gives blocks before vLLM schedules. Then aborts
    may come. At rest, the world checks that no map has the request."""
    driver = drive()
    kv_cache_manager = driver.world.scheduler.kv_cache_manager
    request = make_request("early", prompt(9))
    driver.scheduler.get_num_new_matched_tokens(request, 0)
    kv_cache_manager.allocate_slots(request, 9, delay_cache_blocks=True)
    blocks = kv_cache_manager.get_blocks("early")
    # Not by the world, which takes this for a part of a step.
    OffloadScheduler.update_state_after_alloc(driver.scheduler, request, blocks, 0)
    driver.scheduler.request_finished(request)
    kv_cache_manager.free(request)
    driver.serve("next", prompt(9))


# Where a hit may start


@pytest.mark.parametrize(
    ("shape", "first_tokens"),
    [({"windows": (0, 0)}, [0, 4, 8, 12, 16, 20, 24, 28]), ({"chunks": (8,)}, [0, 8, 16, 24])],
    ids=["blocks", "chunks"],
)
def test_a_hit_starts_with_a_block_and_a_chunk(
    drive: MakeDriver, shape: dict[str, Any], first_tokens: list[int]
) -> None:
    """The lookup covers only blocks that the device lacks, so the tier must have their whole
    chunks. Elsewhere an earlier hit is unpinned."""
    driver = drive(num_device_blocks=60, retention=None, **shape)
    driver.serve("before", prompt(33))
    driver.empty_device_cache()
    request = make_request("a", prompt(33))
    for num_tokens in range(33):
        assert driver.scheduler.get_num_new_matched_tokens(request, 0) == (32, True)
        hit = 32 - num_tokens if num_tokens in first_tokens else 0
        assert driver.scheduler.get_num_new_matched_tokens(request, num_tokens) == (hit, hit > 0)
        assert (driver.num_held[1] > 0) == (hit > 0)
