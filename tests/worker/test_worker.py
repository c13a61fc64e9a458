"""OffloadWorker on the host backend: its memory has the right size, and bytes return unchanged."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.kv_cache_layout import KVCacheLayout

from simple_offload.config import GIB, ConfigError, OffloadConfig
from simple_offload.memory import MemoryShortageError
from simple_offload.metadata import RankCapacity, StepMetadata, Transfer
from simple_offload.ranks import Ranks
from simple_offload.worker.worker import OffloadWorker
from tests.conftest import Machine, within_patience
from tests.worker.kv_memory import KVMemory, full, group, make_kv_memory, window

pytestmark = pytest.mark.usefixtures("no_thread_left", "machine")

NUM_DEVICE_BLOCKS = 6
BLOCK_BYTES = 2 * full().page_size_bytes

MakeWorker = Callable[..., OffloadWorker]


@pytest.fixture
def make_worker(no_thread_left: None) -> Iterator[MakeWorker]:
    """A function that makes a worker that is shut down after the test."""
    workers: list[OffloadWorker] = []

    def make(
        config: KVCacheConfig, extra_config: dict[str, Any], num_ranks: int = 1
    ) -> OffloadWorker:
        workers.append(
            OffloadWorker(
                config,
                OffloadConfig.parse(extra_config, num_ranks),
                Ranks(num_ranks, num_ranks),
            )
        )
        return workers[-1]

    yield make
    for worker in workers:
        within_patience(worker.shutdown)


def kv_memory(layout: KVCacheLayout = KVCacheLayout.LBHNC) -> KVMemory:
    groups = [group(full(), "a", "b"), group(window(), "c", "d")]
    return make_kv_memory(groups, NUM_DEVICE_BLOCKS, layout)


def sizes(capacity: RankCapacity) -> tuple[int, int, int]:
    """A rank's capacity without its name."""
    return capacity.num_host_blocks, capacity.num_open, capacity.block_bytes


# Capacity


@pytest.mark.parametrize("layout", list(KVCacheLayout), ids=lambda layout: layout.name)
def test_capacity_by_bytes(make_worker: MakeWorker, layout: KVCacheLayout) -> None:
    """Groups lie over each other: a block's bytes count once."""
    memory = kv_memory(layout)
    worker = make_worker(memory.config, {"cpu_bytes_to_use": 10 * BLOCK_BYTES + 7})
    worker.register_kv_caches(memory.kv_caches)
    assert sizes(worker.capacity) == (10, 10, BLOCK_BYTES)
    assert worker.host_pool.num_blocks == 10
    assert worker.host_pool.nbytes == 10 * BLOCK_BYTES


@pytest.mark.parametrize(
    ("extra_config", "num_ranks", "num_blocks"),
    [
        ({"cpu_bytes_to_use": 10 * BLOCK_BYTES}, 2, 5),
        ({"cpu_bytes_to_use": GIB, "cpu_bytes_to_use_per_rank": 4 * BLOCK_BYTES}, 2, 4),
        ({"num_cpu_blocks": 3}, 1, 3),
    ],
    ids=["ranks share", "per rank", "by blocks"],
)
def test_capacity_of_a_rank(
    make_worker: MakeWorker, extra_config: dict[str, Any], num_ranks: int, num_blocks: int
) -> None:
    memory = kv_memory()
    worker = make_worker(memory.config, extra_config, num_ranks)
    worker.register_kv_caches(memory.kv_caches)
    assert sizes(worker.capacity) == (num_blocks, num_blocks, BLOCK_BYTES)


def test_bytes_for_less_than_two_blocks(make_worker: MakeWorker) -> None:
    memory = kv_memory()
    worker = make_worker(memory.config, {"cpu_bytes_to_use": 2 * BLOCK_BYTES - 1})
    with pytest.raises(ConfigError, match=f"cpu_bytes_to_use={2 * BLOCK_BYTES - 1}"):
        worker.register_kv_caches(memory.kv_caches)


@pytest.mark.parametrize(("num_ranks", "fitting"), [(1, 1000), (2, 500)])
def test_more_blocks_than_the_machine_has_memory_for(
    make_worker: MakeWorker, machine: Machine, num_ranks: int, fitting: int
) -> None:
    """The ranks share one machine."""
    machine.num_bytes = 1000 * BLOCK_BYTES
    machine.available = GIB
    memory = kv_memory()
    worker = make_worker(memory.config, {"num_cpu_blocks": fitting + 1}, num_ranks)
    with pytest.raises(ConfigError, match=f"num_cpu_blocks={fitting + 1} "):
        worker.register_kv_caches(memory.kv_caches)
    worker = make_worker(memory.config, {"num_cpu_blocks": fitting}, num_ranks)
    worker.register_kv_caches(memory.kv_caches)
    assert worker.capacity.num_host_blocks == fitting


def test_memory_that_comes_as_it_is_written_must_be_available_at_start(
    make_worker: MakeWorker, machine: Machine
) -> None:
    """On CPUs the kernel would end a process later, without an error before. The memory of all
    ranks counts, because none has touched its pages yet."""
    machine.available = 30 * GIB
    memory = kv_memory()
    worker = make_worker(memory.config, {"cpu_bytes_to_use_per_rank": 10 * GIB}, 2)
    worker.register_kv_caches(memory.kv_caches)
    worker = make_worker(memory.config, {"cpu_bytes_to_use_per_rank": 11 * GIB}, 2)
    with pytest.raises(MemoryShortageError, match=r"22\.00 GiB of host memory asked for, 30\.00"):
        worker.register_kv_caches(memory.kv_caches)


def test_a_backend_that_is_not_for_this_platform(make_worker: MakeWorker) -> None:
    with pytest.raises(ConfigError, match="backend='cuda'"):
        make_worker(kv_memory().config, {"backend": "cuda"})


# Bytes


@pytest.mark.parametrize("layout", list(KVCacheLayout), ids=lambda layout: layout.name)
def test_blocks_come_back_as_they_left(make_worker: MakeWorker, layout: KVCacheLayout) -> None:
    memory = kv_memory(layout)
    worker = make_worker(memory.config, {"num_cpu_blocks": 8})
    worker.register_kv_caches(memory.kv_caches)
    for view in memory.kv_caches.values():
        view.copy_(torch.randn(view.shape))
    left = {name: view.clone() for name, view in memory.kv_caches.items()}

    worker.bind(StepMetadata(stores=[Transfer.pairing(0, [1, 2, 5], [7, 3, 1])]))
    worker.submit_stores()
    worker.drain()
    assert worker.poll() == (set(), set())
    memory.storage.fill_(-1)

    # Into other device blocks than their source.
    worker.bind(StepMetadata(loads=[Transfer.pairing(1, [4, 2, 3], [7, 3, 1], "r")]))
    worker.submit_loads()
    worker.drain()
    assert worker.poll() == ({"r"}, set())
    untouched = torch.full_like(memory.storage[: BLOCK_BYTES // 4], -1).view(torch.float32)
    for name, view in memory.kv_caches.items():
        for origin, now in ((1, 4), (2, 2), (5, 3)):
            assert torch.equal(view[now], left[name][origin])
        for block in (0, 1, 5):
            found = view[block].reshape(-1)
            wanted = untouched[:1].expand_as(found)
            assert torch.equal(found.view(torch.int8), wanted.contiguous().view(torch.int8))


# A rank without layers


def test_a_rank_without_layers(make_worker: MakeWorker) -> None:
    """It copies nothing, and reports every transfer as ended."""
    worker = make_worker(KVCacheConfig(NUM_DEVICE_BLOCKS, [], []), {"cpu_bytes_to_use": GIB})
    worker.register_kv_caches({})
    assert worker.capacity.block_bytes == 0
    assert worker.capacity.num_host_blocks >= 2**20  # the other ranks decide
    assert worker.host_pool.nbytes == 0
    load = Transfer.pairing(0, [1], [5], "r")
    worker.bind(StepMetadata([load], [Transfer.pairing(1, [2], [6])]))
    worker.submit_loads()
    worker.submit_stores()
    worker.drain()
    assert worker.poll() == ({"r"}, set())
    report = worker.drain_report()
    assert report is not None
    assert (report.ended, report.failed) == ({0: 1, 1: 1}, {})


def test_a_rank_without_layers_and_a_number_of_blocks(make_worker: MakeWorker) -> None:
    worker = make_worker(KVCacheConfig(NUM_DEVICE_BLOCKS, [], []), {"num_cpu_blocks": 9})
    worker.register_kv_caches({})
    assert sizes(worker.capacity) == (9, 9, 0)
