"""OffloadWorker, CopyLane and HostPool over NpuBackend, on the real torch_npu."""

import random
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch_npu
from vllm.v1.kv_cache_layout import KVCacheLayout

from simple_offload.backends import select
from simple_offload.backends.base import Direction
from simple_offload.backends.npu.backend import NpuBackend
from simple_offload.config import OffloadConfig
from simple_offload.metadata import StepMetadata, Transfer
from simple_offload.ranks import Ranks
from simple_offload.worker.ascend_regions import KVCache
from simple_offload.worker.worker import OffloadWorker
from tests.acl_sim.sim import Sim
from tests.worker.kv_memory import full, group, make_kv_memory, window

NUM_DEVICE_BLOCKS = 8
NUM_HOST_BLOCKS = 20


class Rank:
    """A rank with a KV cache on the NPU, and the engine's calls on it."""

    def __init__(self, sim: Sim, layout: KVCacheLayout) -> None:
        self.sim = sim
        groups = [group(full(), "a", "b"), group(window(), "c")]
        memory = make_kv_memory(groups, NUM_DEVICE_BLOCKS, layout)
        self.storage = memory.storage.random_(-128, 128).to("npu")
        self._views = memory.kv_caches
        self.kv_caches = self._views_of(self.storage)
        config = OffloadConfig.parse({"num_cpu_blocks": NUM_HOST_BLOCKS}, 1)
        self.worker = OffloadWorker(memory.config, config, Ranks(1, 1))
        assert isinstance(self.worker._backend, NpuBackend)
        self.worker.register_kv_caches(self.kv_caches)
        self.worker.host_pool.join()
        self.worker.drain_report()  # of how much is open
        sim.take_counts()

    def stream(self, direction: Direction) -> int:
        """The handle of the stream for copies of ``direction``."""
        backend: Any = self.worker._backend
        return int(backend._streams[direction].npu_stream)

    def step(self, metadata: StepMetadata) -> tuple[set[str], set[str]]:
        """One engine step: its loads, its compute (none here), its stores, and a poll."""
        self.worker.bind(metadata)
        self.worker.submit_loads()
        self.worker.submit_stores()
        return self.worker.poll()

    def run(self, metadata: StepMetadata) -> tuple[dict[int, int], dict[int, int]]:
        """Run a step until its copies have ended. Returns how many ended, and failed, by id."""
        self.step(metadata)
        self.worker.drain()
        self.worker.poll()
        report = self.worker.drain_report()
        assert report is not None
        assert not report.broken
        return dict(report.ended), dict(report.failed)

    def pages(self, block: int) -> dict[str, torch.Tensor]:
        """The block's bytes, by layer."""
        views = self._views_of(self.storage.cpu())
        return {name: view[block].contiguous().view(torch.int8) for name, view in views.items()}

    def _views_of(self, storage: torch.Tensor) -> dict[str, torch.Tensor]:
        return {
            name: torch.as_strided(
                storage.view(view.dtype), view.shape, view.stride(), view.storage_offset()
            )
            for name, view in self._views.items()
        }


def store(transfer_id: int, *pairs: tuple[int, int]) -> Transfer:
    """Device blocks and their host blocks."""
    return Transfer.pairing(transfer_id, [d for d, _ in pairs], [h for _, h in pairs])


def load(transfer_id: int, request_id: str, *pairs: tuple[int, int]) -> Transfer:
    return Transfer.pairing(transfer_id, [d for d, _ in pairs], [h for _, h in pairs], request_id)


MakeRank = Callable[..., Rank]


@pytest.fixture
def make_rank(sim: Sim, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeRank]:
    """A function that makes a rank. Its host memory comes in chunks of a few blocks."""
    monkeypatch.setattr(select, "current_platform", SimpleNamespace(device_type="npu"))
    monkeypatch.setattr(NpuBackend, "chunk_bytes", 7000)
    ranks: list[Rank] = []
    num_host = sim.library.acl_sim_num_host()

    def make(layout: KVCacheLayout = KVCacheLayout.LBHNC) -> Rank:
        ranks.append(Rank(sim, layout))
        return ranks[-1]

    yield make
    for rank in ranks:
        rank.worker.shutdown()
    assert sim.library.acl_sim_num_host() == num_host


@pytest.mark.parametrize("layout", [KVCacheLayout.LBHNC, KVCacheLayout.LHBNC, KVCacheLayout.BLHNC])
@pytest.mark.parametrize("has_batch", [True, False])
def test_store_evict_load(
    make_rank: MakeRank, sim: Sim, layout: KVCacheLayout, has_batch: bool
) -> None:
    """Bytes come back into other device blocks than the stored ones, and no other block changes."""
    sim.take_batches(has_batch)
    rank = make_rank(layout)
    stored = [(1, 17), (2, 18), (3, 4), (6, 19)]
    left = {device: rank.pages(device) for device, _ in stored}
    assert rank.run(StepMetadata(stores=[store(0, *stored)])) == ({0: 1}, {})
    # Evicted: compute of other requests writes over them.
    size = rank.storage.numel()
    compute = int(torch_npu.npu.current_stream().npu_stream)
    sim.fill(rank.storage.data_ptr(), 99, size, compute)
    back = [(5, 18), (2, 17), (7, 4), (0, 19)]
    assert rank.run(StepMetadata(loads=[load(1, "r", *back)])) == ({1: 1}, {})
    origin = {host: device for device, host in stored}
    for device, host in back:
        for name, page in rank.pages(device).items():
            assert torch.equal(page, left[origin[host]][name])
    for device in (1, 3, 4, 6):
        assert all((page == 99).all() for page in rank.pages(device).values())
    counts = sim.take_counts()
    assert counts.blocking == 0
    assert (counts.batch_calls > 0, counts.single_calls > 0) == (has_batch, not has_batch)


def test_every_transfer_is_copied_and_reported_once(make_rank: MakeRank) -> None:
    """A step is copied once, however often its hooks are called. A load that takes several steps is
    reported too. Nothing is lost if the engine drains while threads submit and report.

    A port of vLLM's connector to Ascend had these faults: it copied a step again at every poll,
    kept the requests of one step only, and cleared a list while its thread appended to it.
    """
    rank = make_rank()
    rank.sim.library.acl_sim_delay_all(100)
    dice = random.Random(7)
    ended: Counter[int] = Counter()
    loaded: Counter[str] = Counter()
    next_id = 0
    for _ in range(200):
        metadata = StepMetadata()
        for _ in range(dice.randrange(4)):
            blocks = (dice.randrange(NUM_DEVICE_BLOCKS), dice.randrange(NUM_HOST_BLOCKS))
            if dice.random() < 0.5:
                metadata.loads.append(load(next_id, f"r{next_id}", blocks))
            else:
                metadata.stores.append(store(next_id, blocks))
            next_id += 1
        for _ in range(dice.randrange(1, 3)):
            loaded.update(rank.step(metadata)[0])
        if dice.random() < 0.2:
            rank.worker.drain()
        if (report := rank.worker.drain_report()) is not None:
            ended.update(report.ended)
    rank.worker.drain()
    loaded.update(rank.step(StepMetadata())[0])
    if (report := rank.worker.drain_report()) is not None:
        ended.update(report.ended)
        assert not report.failed
    assert next_id > 200
    assert ended == Counter(range(next_id))
    assert set(loaded.values()) == {1}
    num_regions = len(rank.worker._backend._device_regions.pages)  # type: ignore[attr-defined]
    assert rank.sim.take_counts().descriptors == next_id * num_regions


# vllm-ascend's KV caches


def aligned(size: int) -> torch.Tensor:
    """An allocation of ``size`` bytes in a larger one, aligned like vllm-ascend's: 2 MiB there, 4
    KiB here."""
    memory = torch.empty(size + 4096, dtype=torch.int8, device="npu")
    start = -memory.data_ptr() % 4096
    return memory[start : start + size]


Parts = tuple[list[torch.Tensor], dict[str, KVCache]]
"""Memory with a share for each block, and the layers' views of it."""


def attention() -> Parts:
    """Keys and values are separate tensors."""
    key, value = aligned(NUM_DEVICE_BLOCKS * 64), aligned(NUM_DEVICE_BLOCKS * 96)
    views = (key.view(torch.float16).view(-1, 4, 4), value.view(torch.float16).view(-1, 4, 4))
    return [key, value], {"a": views}


def mla() -> Parts:
    parts = [aligned(NUM_DEVICE_BLOCKS * 128), aligned(NUM_DEVICE_BLOCKS * 16)]
    return parts, {"a": tuple(part.view(NUM_DEVICE_BLOCKS, -1) for part in parts)}


def hybrid() -> Parts:
    """Keys lie over states."""
    sizes = [NUM_DEVICE_BLOCKS * page for page in (8, 32, 32)]
    parts = list(aligned(sum(sizes)).split(sizes))
    views = [part.view(NUM_DEVICE_BLOCKS, -1) for part in parts]
    return parts, {"mamba": views[:2], "attention": tuple(views[1:])}


@pytest.mark.usefixtures("make_rank")  # the platform, and small chunks
@pytest.mark.parametrize("make", [attention, mla, hybrid])
def test_a_kv_cache_of_tuples(make: Callable[[], Parts]) -> None:
    parts, kv_caches = make()
    contents = [torch.randint(-128, 128, (part.numel(),), dtype=torch.int8) for part in parts]
    for part, content in zip(parts, contents, strict=True):
        part.copy_(content)
    memory = make_kv_memory([group(full(), "a")], NUM_DEVICE_BLOCKS, KVCacheLayout.LBHNC)
    config = OffloadConfig.parse({"num_cpu_blocks": NUM_HOST_BLOCKS}, 1)
    worker = OffloadWorker(memory.config, config, Ranks(1, 1))
    worker.register_kv_caches(kv_caches)
    worker.host_pool.join()
    assert worker.capacity.block_bytes == sum(map(len, parts)) // NUM_DEVICE_BLOCKS
    for metadata in (
        StepMetadata(stores=[store(0, (1, 5), (4, 6))]),
        StepMetadata(loads=[load(1, "r", (7, 5), (0, 6))]),
    ):
        worker.bind(metadata)
        worker.submit_loads()
        worker.submit_stores()
        worker.drain()
    assert worker.poll() == ({"r"}, set())
    for part, content in zip(parts, contents, strict=True):
        expected = content.view(NUM_DEVICE_BLOCKS, -1)
        expected[[7, 0]] = expected[[1, 4]]
        assert torch.equal(part.cpu().view(NUM_DEVICE_BLOCKS, -1), expected)
    worker.shutdown()
