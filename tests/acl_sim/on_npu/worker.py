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
    """Device blocks and their host blocks."""
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
    rank.step(StepMetadata(stores=[store(0, *stored)]))
    rank.worker.drain()
    rank.step(StepMetadata())
    report = rank.worker.drain_report()
    assert report is not None
    assert (report.ended, report.failed) == ({0: 1}, {})

    # Evicted: compute of other requests writes over them.
    size = rank.storage.numel()
    compute = int(torch_npu.npu.current_stream().npu_stream)
    sim.fill(rank.storage.data_ptr(), 99, size, compute)
    back = [(5, 18), (2, 17), (7, 4), (0, 19)]
    assert rank.step(StepMetadata(loads=[load(1, "r", *back)]))[1] == set()
    rank.worker.drain()
    rank.step(StepMetadata())
    report = rank.worker.drain_report()
    assert report is not None
    assert (report.ended, report.failed) == ({1: 1}, {})
    origin = {host: device for device, host in stored}
    for device, host in back:
        for name, page in rank.pages(device).items():
            assert torch.equal(page, left[origin[host]][name])
    for device in (1, 3, 4, 6):
        assert all((page == 99).all() for page in rank.pages(device).values())
    counts = sim.take_counts()
    assert counts.blocking == 0
    assert (counts.batch_calls > 0, counts.single_calls > 0) == (has_batch, not has_batch)


def test_a_step_is_submitted_once(make_rank: MakeRank) -> None:
    """A step is copied once, however often its hooks are called. A port of vLLM's connector to
    Ascend copied a step again at every poll."""
    rank = make_rank()
    metadata = StepMetadata([load(0, "r", (1, 2))], [store(1, (3, 4))])
    loaded: list[str] = []
    for _ in range(3):
        rank.worker.bind(metadata)
        for _ in range(3):
            rank.worker.submit_loads()
            rank.worker.submit_stores()
            loaded.extend(rank.worker.poll()[0])
    rank.worker.drain()
    loaded.extend(rank.worker.poll()[0])
    assert loaded == ["r"]
    num_regions = len(rank.worker._backend._device_regions.pages)  # type: ignore[attr-defined]
    assert rank.sim.take_counts().descriptors == 2 * num_regions
    report = rank.worker.drain_report()
    assert report is not None
    assert report.ended == {0: 1, 1: 1}


def test_a_load_of_an_earlier_step_is_reported(make_rank: MakeRank) -> None:
    """That port kept the requests of one step only: a request with a longer load hung."""
    rank = make_rank()
    with rank.sim.held(rank.stream(Direction.LOAD)):
        assert rank.step(StepMetadata(loads=[load(0, "r", (1, 2))])) == (set(), set())
        assert rank.step(StepMetadata(loads=[load(1, "s", (2, 3))])) == (set(), set())
        assert rank.step(StepMetadata()) == (set(), set())
    rank.worker.drain()
    assert rank.step(StepMetadata()) == ({"r", "s"}, set())
    assert rank.step(StepMetadata()) == (set(), set())


def test_flushes_lose_nothing(make_rank: MakeRank) -> None:
    """Every transfer is reported once, though the engine drains while threads submit and report.
    That port cleared a list while its thread appended to it."""
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


def test_a_store_waits_for_compute_of_its_step(make_rank: MakeRank) -> None:
    rank = make_rank()
    compute = int(torch_npu.npu.current_stream().npu_stream)
    with rank.sim.held(compute):
        rank.sim.fill(rank.storage.data_ptr(), 5, rank.storage.numel(), compute)
        rank.step(StepMetadata(stores=[store(0, (1, 2))]))
        rank.worker.lanes[Direction.STORE].flush()
        rank.sim.settle(rank.stream(Direction.STORE))
        rank.worker.poll()
        assert rank.worker.drain_report() is None
    rank.worker.drain()
    rank.sim.fill(rank.storage.data_ptr(), 6, rank.storage.numel(), compute)
    rank.step(StepMetadata(loads=[load(1, "r", (3, 2))]))
    rank.worker.drain()
    assert all((page == 5).all() for page in rank.pages(3).values())
    assert all((page == 6).all() for page in rank.pages(2).values())


def test_failures_are_reported(make_rank: MakeRank) -> None:
    rank = make_rank()
    rank.sim.fail_after(0, 107000)
    rank.step(StepMetadata(loads=[load(0, "r", (1, 2))]))
    rank.worker.drain()
    assert rank.step(StepMetadata(loads=[load(1, "s", (2, 3))]))[1] == {"r"}
    rank.worker.drain()
    assert rank.step(StepMetadata()) == ({"s"}, set())
    rank.sim.fail_after(1, 107000)
    rank.step(StepMetadata(stores=[store(2, (1, 2)), store(3, (4, 5))]))
    rank.worker.drain()
    rank.step(StepMetadata())
    report = rank.worker.drain_report()
    assert report is not None
    assert report.ended == {0: 1, 1: 1, 2: 1, 3: 1}
    assert report.failed == {0: 1, 2: 1}
    assert not report.broken


def test_a_kv_cache_of_tuples(make_rank: MakeRank) -> None:
    """Keys and values are separate tensors, as vllm-ascend registers them."""
    memory = make_kv_memory([group(full(), "a")], NUM_DEVICE_BLOCKS, KVCacheLayout.LBHNC)
    config = OffloadConfig.parse({"num_cpu_blocks": NUM_HOST_BLOCKS}, 1)
    worker = OffloadWorker(memory.config, config, Ranks(1, 1))
    contents = [
        torch.randint(-128, 128, (NUM_DEVICE_BLOCKS, n), dtype=torch.int8) for n in (96, 32)
    ]
    parts = [content.to("npu") for content in contents]
    worker.register_kv_caches({"a": tuple(part.view(2 * NUM_DEVICE_BLOCKS, -1) for part in parts)})
    assert worker.capacity.block_bytes == 128
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
        content[[7, 0]] = content[[1, 4]]
        assert torch.equal(part.cpu(), content)
    worker.shutdown()
