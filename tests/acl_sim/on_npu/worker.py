"""OffloadWorker, CopyLane and HostPool over NpuBackend, on the real torch_npu."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
import torch_npu
from vllm.v1.kv_cache_interface import KVCacheConfig

from simple_offload.backends import select
from simple_offload.backends.base import CopyBackend
from simple_offload.backends.npu.backend import NpuBackend
from simple_offload.backends.select import BackendName
from simple_offload.config import OffloadConfig
from simple_offload.metadata import StepMetadata
from simple_offload.ranks import Ranks
from simple_offload.transfer import Transfer
from simple_offload.worker import regions
from simple_offload.worker import worker as worker_module
from simple_offload.worker.ascend_regions import KVCache
from simple_offload.worker.worker import OffloadWorker
from tests.acl_sim.sim import Sim

NUM_DEVICE_BLOCKS = 8


# KV caches of vllm-ascend


class Cache(NamedTuple):
    """A rank's KV cache on the NPU."""

    memory: list[torch.Tensor]
    """Its allocations, int8."""
    kv_caches: dict[str, KVCache]


def aligned(size: int) -> torch.Tensor:
    """An allocation of ``size`` bytes in a larger one, aligned like vllm-ascend's: 2 MiB there, 4
    KiB here."""
    memory = torch.empty(size + 4096, dtype=torch.int8, device="npu")
    start = -memory.data_ptr() % 4096
    return memory[start : start + size]


def by_block(memory: list[torch.Tensor]) -> list[torch.Tensor]:
    return [part.view(NUM_DEVICE_BLOCKS, -1) for part in memory]


def attention() -> Cache:
    """Keys and values are separate tensors."""
    key, value = aligned(NUM_DEVICE_BLOCKS * 64), aligned(NUM_DEVICE_BLOCKS * 96)
    views = (key.view(torch.float16).view(-1, 4, 4), value.view(torch.float16).view(-1, 4, 4))
    return Cache([key, value], {"a": views})


def hybrid() -> Cache:
    """Keys lie over states."""
    sizes = [NUM_DEVICE_BLOCKS * page for page in (8, 32, 32)]
    memory = list(aligned(sum(sizes)).split(sizes))
    conv, key, value = by_block(memory)
    return Cache(memory, {"mamba": [conv, key], "attention": (key, value)})


@pytest.fixture
def make_worker(
    sim: Sim, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[Cache], OffloadWorker]]:
    """A function that makes a worker. Its host memory comes in chunks of a few blocks."""
    for module in (select, regions):
        monkeypatch.setattr(module, "current_platform", SimpleNamespace(device_type="npu"))

    def make_backend(name: BackendName, copy_path: str) -> CopyBackend:
        backend = select.make_backend(name, copy_path)
        assert isinstance(backend, NpuBackend)
        backend.chunk_bytes = 1000
        return backend

    monkeypatch.setattr(worker_module, "make_backend", make_backend)
    workers: list[OffloadWorker] = []
    num_host = sim.library.acl_sim_num_host()

    def make(cache: Cache) -> OffloadWorker:
        kv_cache_config = KVCacheConfig(NUM_DEVICE_BLOCKS, [], [])
        config = OffloadConfig.parse({"num_cpu_blocks": 20}, Ranks(1, 1))
        worker = OffloadWorker(kv_cache_config, config, Ranks(1, 1))
        workers.append(worker)
        worker.register_kv_caches(cache.kv_caches)
        worker.host_pool.join()
        assert sim.library.acl_sim_num_host() > num_host + 1
        sim.take_counts()
        return worker

    yield make
    for worker in workers:
        worker.shutdown()
    assert sim.library.acl_sim_num_host() == num_host


@pytest.mark.parametrize("make_cache", [attention, hybrid])
@pytest.mark.parametrize("has_batch", [True, False])
def test_store_evict_load(
    make_worker: Callable[[Cache], OffloadWorker],
    sim: Sim,
    make_cache: Callable[[], Cache],
    has_batch: bool,
) -> None:
    """Bytes come back into other device blocks than the stored ones, and no other block changes."""
    sim.take_batches(has_batch)
    cache = make_cache()
    for part in cache.memory:
        part.copy_(torch.randint(-128, 128, part.shape, dtype=torch.int8))
    worker = make_worker(cache)
    left = by_block([part.cpu() for part in cache.memory])
    stored = {17: 1, 18: 2, 4: 3, 19: 6}  # host block: device block
    worker.bind(StepMetadata(stores=[Transfer.pairing(0, [*stored.values()], [*stored])]))
    worker.submit_stores()
    worker.drain()
    # Evicted: compute of other requests writes over them.
    compute = int(torch_npu.npu.current_stream().npu_stream)
    for part in cache.memory:
        sim.fill(part.data_ptr(), 99, part.numel(), compute)
    back = {5: 18, 2: 17, 7: 4, 0: 19}  # device block: host block
    worker.bind(StepMetadata(loads=[Transfer.pairing(1, [*back], [*back.values()], "r")]))
    worker.drain()
    assert worker.poll() == ({"r"}, set())
    report = worker.drain_report()
    assert report is not None
    assert (report.ended, report.failed) == ({0: 1, 1: 1}, {})
    for now, before in zip(by_block([part.cpu() for part in cache.memory]), left, strict=True):
        for device, host in back.items():
            assert torch.equal(now[device], before[stored[host]])
        assert bool((now[[1, 3, 4, 6]] == 99).all())
    counts = sim.take_counts()
    assert counts.blocking == 0
    assert (counts.batch_calls > 0, counts.single_calls > 0) == (has_batch, not has_batch)
