"""OffloadWorker on the host backend: its memory has the right size, and bytes return unchanged."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.kv_cache_layout import KVCacheLayout

from simple_offload.config import GIB, ConfigError, OffloadConfig
from simple_offload.memory import MemoryShortageError
from simple_offload.metadata import StepMetadata
from simple_offload.ranks import Ranks
from simple_offload.transfer import Transfer
from simple_offload.worker.worker import OffloadWorker
from tests.conftest import Machine
from tests.worker.conftest import StartWorkers
from tests.worker.kv_memory import KVMemory, full, group, make_kv_memory, window
from tests.worker.rank import run

pytestmark = pytest.mark.usefixtures("no_thread_left", "machine")

NUM_DEVICE_BLOCKS = 6
BLOCK_BYTES = 2 * full().page_size_bytes

MakeWorker = Callable[..., OffloadWorker]


def kv_memory(layout: KVCacheLayout = KVCacheLayout.LBHNC) -> KVMemory:
    groups = [group(full(), "a", "b"), group(window(), "c", "d")]
    return make_kv_memory(groups, NUM_DEVICE_BLOCKS, layout)


@pytest.fixture
def make_worker(start_workers: StartWorkers) -> MakeWorker:
    """A function that makes a worker with registered memory. It is shut down after the test."""

    def make(
        extra_config: dict[str, Any], num_ranks: int = 1, memory: KVMemory | None = None
    ) -> OffloadWorker:
        extra_config = {"num_cpu_blocks": None} | extra_config
        (worker,) = start_workers([memory or kv_memory()], num_ranks=num_ranks, **extra_config)
        assert isinstance(worker, OffloadWorker)
        return worker

    return make


def sizes(worker: OffloadWorker) -> tuple[int, int, int]:
    """A rank's capacity without its name."""
    capacity = worker.capacity
    return capacity.num_host_blocks, capacity.num_open, capacity.block_bytes


# Capacity


def test_ranks_share_the_bytes(make_worker: MakeWorker, machine: Machine) -> None:
    """Also where they are a share of the machine's memory."""
    assert sizes(make_worker({"cpu_bytes_to_use": 10 * BLOCK_BYTES}, 2)) == (5, 5, BLOCK_BYTES)
    machine.num_bytes = 20 * BLOCK_BYTES
    assert sizes(make_worker({"cpu_bytes_to_use": "50%"}, 2)) == (5, 5, BLOCK_BYTES)
    assert sizes(make_worker({"cpu_bytes_to_use_per_rank": "50%"}, 2)) == (10, 10, BLOCK_BYTES)


@pytest.mark.parametrize(("num_ranks", "fitting"), [(1, 1000), (2, 500)])
def test_more_blocks_than_the_machine_has_memory_for(
    make_worker: MakeWorker, machine: Machine, num_ranks: int, fitting: int
) -> None:
    """The ranks share one machine."""
    machine.num_bytes = 1000 * BLOCK_BYTES
    machine.available = GIB
    with pytest.raises(ConfigError, match=f"num_cpu_blocks={fitting + 1} "):
        make_worker({"num_cpu_blocks": fitting + 1}, num_ranks)
    assert make_worker({"num_cpu_blocks": fitting}, num_ranks).capacity.num_host_blocks == fitting


def test_memory_that_comes_as_it_is_written_must_be_available_at_start(
    make_worker: MakeWorker, machine: Machine
) -> None:
    """On CPUs the kernel would end a process later, without an error before. The memory of all
    ranks counts, because none has touched its pages yet."""
    machine.available = 30 * GIB
    make_worker({"cpu_bytes_to_use_per_rank": 10 * GIB}, 2)
    with pytest.raises(MemoryShortageError, match=r"22\.00 GiB of host memory asked for, 30\.00"):
        make_worker({"cpu_bytes_to_use_per_rank": 11 * GIB}, 2)


def test_a_container_that_shrinks_before_memory_is_opened(machine: Machine) -> None:
    """Loading weights takes minutes. The error is that of memory that is there no more."""
    memory = kv_memory()
    config = OffloadConfig.parse({"cpu_bytes_to_use": 50 * GIB}, Ranks(1, 1))
    worker = OffloadWorker(memory.config, config, Ranks(1, 1))
    machine.num_bytes = 40 * GIB
    with pytest.raises(MemoryShortageError, match=r"50\.00 GiB of host memory asked for, 40\.00"):
        worker.register_kv_caches(memory.kv_caches)


# Bytes


@pytest.mark.parametrize("layout", list(KVCacheLayout), ids=lambda each: each.name)
def test_blocks_come_back_as_they_left(make_worker: MakeWorker, layout: KVCacheLayout) -> None:
    """Groups lie over each other: a block's bytes count once."""
    memory = kv_memory(layout)
    worker = make_worker({"cpu_bytes_to_use": 10 * BLOCK_BYTES + 7}, memory=memory)
    assert sizes(worker) == (10, 10, BLOCK_BYTES)
    assert (worker.host_pool.num_blocks, worker.host_pool.nbytes) == (10, 10 * BLOCK_BYTES)
    memory.storage.random_(-128, 128)
    views = {name: view.view(torch.int8) for name, view in memory.kv_caches.items()}
    left = {name: view.clone() for name, view in views.items()}
    stored = StepMetadata(stores=[Transfer.pairing(0, [1, 2, 5], [7, 3, 1])])
    assert run(worker, stored) == (set(), set())
    memory.storage.fill_(-1)
    # Into other device blocks than their source.
    loaded = StepMetadata([Transfer.pairing(1, [4, 2, 3], [7, 3, 1], "r")])
    assert run(worker, loaded) == ({"r"}, set())
    for name, view in views.items():
        for origin, now in ((1, 4), (2, 2), (5, 3)):
            assert torch.equal(view[now], left[name][origin])
        assert bool((view[[0, 1, 5]] == -1).all())


@pytest.mark.parametrize(
    ("extra_config", "num_blocks"),
    [({"cpu_bytes_to_use": GIB}, 2**20), ({"num_cpu_blocks": 9}, 9)],
)
def test_a_rank_without_layers(
    make_worker: MakeWorker, extra_config: dict[str, Any], num_blocks: int
) -> None:
    """It copies nothing, and reports every transfer as ended. The other ranks decide how many
    blocks there are."""
    memory = KVMemory(KVCacheConfig(NUM_DEVICE_BLOCKS, [], []), torch.zeros(0), {})
    worker = make_worker(extra_config, memory=memory)
    assert worker.capacity.num_host_blocks >= num_blocks
    assert (worker.capacity.block_bytes, worker.host_pool.nbytes) == (0, 0)
    load, store = Transfer.pairing(0, [1], [5], "r"), Transfer.pairing(1, [2], [6])
    assert run(worker, StepMetadata([load], [store])) == ({"r"}, set())
    report = worker.drain_report()
    assert report is not None
    assert (report.ended, report.failed) == ({0: 1, 1: 1}, {})
