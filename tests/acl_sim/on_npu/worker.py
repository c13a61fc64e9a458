"""OffloadWorker, CopyLane and HostPool over NpuBackend, on the real torch_npu."""

import random
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
import torch_npu
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.kv_cache_layout import KVCacheLayout

from simple_offload.backends import select
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


# KV caches of vLLM, and of vllm-ascend


class Cache(NamedTuple):
    """A rank's KV cache on the NPU."""

    config: KVCacheConfig
    memory: list[torch.Tensor]
    """Its allocations, int8."""
    kv_caches: dict[str, KVCache]
    views: Callable[[list[torch.Tensor]], list[torch.Tensor]]
    """Tensors whose first dimension is blocks, of such memory on the CPU."""


def of_vllm(layout: KVCacheLayout) -> Cache:
    groups = [group(full(), "a", "b"), group(window(), "c")]
    made = make_kv_memory(groups, NUM_DEVICE_BLOCKS, layout)

    def views_of(memory: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        return {
            name: memory[0]
            .view(view.dtype)
            .as_strided(view.shape, view.stride(), view.storage_offset())
            for name, view in made.kv_caches.items()
        }

    memory = [torch.empty_like(made.storage, device="npu")]
    kv_caches: dict[str, KVCache] = {**views_of(memory)}
    return Cache(made.config, memory, kv_caches, lambda memory: [*views_of(memory).values()])


def aligned(size: int) -> torch.Tensor:
    """An allocation of ``size`` bytes in a larger one, aligned like vllm-ascend's: 2 MiB there, 4
    KiB here."""
    memory = torch.empty(size + 4096, dtype=torch.int8, device="npu")
    start = -memory.data_ptr() % 4096
    return memory[start : start + size]


def by_block(memory: list[torch.Tensor]) -> list[torch.Tensor]:
    return [part.view(NUM_DEVICE_BLOCKS, -1) for part in memory]


def of_ascend(memory: list[torch.Tensor], kv_caches: dict[str, KVCache]) -> Cache:
    config = make_kv_memory([group(full(), "a")], NUM_DEVICE_BLOCKS, KVCacheLayout.LBHNC).config
    return Cache(config, memory, kv_caches, by_block)


def attention() -> Cache:
    """Keys and values are separate tensors."""
    key, value = aligned(NUM_DEVICE_BLOCKS * 64), aligned(NUM_DEVICE_BLOCKS * 96)
    views = (key.view(torch.float16).view(-1, 4, 4), value.view(torch.float16).view(-1, 4, 4))
    return of_ascend([key, value], {"a": views})


def mla() -> Cache:
    memory = [aligned(NUM_DEVICE_BLOCKS * 128), aligned(NUM_DEVICE_BLOCKS * 16)]
    return of_ascend(memory, {"a": tuple(by_block(memory))})


def hybrid() -> Cache:
    """Keys lie over states."""
    sizes = [NUM_DEVICE_BLOCKS * page for page in (8, 32, 32)]
    memory = list(aligned(sum(sizes)).split(sizes))
    conv, key, value = by_block(memory)
    return of_ascend(memory, {"mamba": [conv, key], "attention": (key, value)})


class Rank:
    """A rank with a KV cache of random bytes, and the engine's calls on it."""

    def __init__(self, sim: Sim, cache: Cache) -> None:
        self.cache = cache
        for part in cache.memory:
            part.copy_(torch.randint(-128, 128, part.shape, dtype=torch.int8))
        config = OffloadConfig.parse({"num_cpu_blocks": NUM_HOST_BLOCKS}, 1)
        self.worker = OffloadWorker(cache.config, config, Ranks(1, 1))
        assert isinstance(self.worker._backend, NpuBackend)
        self.worker.register_kv_caches(cache.kv_caches)
        self.worker.host_pool.join()
        self.worker.drain_report()  # of how much is open
        sim.take_counts()

    def step(self, metadata: StepMetadata) -> set[str]:
        """One engine step: its loads, its compute (none here), its stores, and a poll. Returns the
        loaded requests."""
        self.worker.bind(metadata)
        self.worker.submit_loads()
        self.worker.submit_stores()
        loaded, failed = self.worker.poll()
        assert not failed
        return loaded

    def ended(self) -> dict[int, int]:
        """The transfers that the rank reports as ended."""
        report = self.worker.drain_report()
        assert report is None or not report.failed
        return dict(report.ended) if report is not None else {}

    def pages(self) -> list[torch.Tensor]:
        """A copy of all blocks' bytes."""
        views = self.cache.views([part.cpu() for part in self.cache.memory])
        return [view.contiguous().view(torch.int8) for view in views]


def store(transfer_id: int, *pairs: tuple[int, int]) -> Transfer:
    """Device blocks and their host blocks."""
    return Transfer.pairing(transfer_id, [d for d, _ in pairs], [h for _, h in pairs])


def load(transfer_id: int, request_id: str, *pairs: tuple[int, int]) -> Transfer:
    return Transfer.pairing(transfer_id, [d for d, _ in pairs], [h for _, h in pairs], request_id)


MakeRank = Callable[[Cache], Rank]


@pytest.fixture
def make_rank(sim: Sim, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeRank]:
    """A function that makes a rank. Its host memory comes in chunks of a few blocks."""
    monkeypatch.setattr(select, "current_platform", SimpleNamespace(device_type="npu"))
    monkeypatch.setattr(NpuBackend, "chunk_bytes", 7000)
    ranks: list[Rank] = []
    num_host = sim.library.acl_sim_num_host()

    def make(cache: Cache) -> Rank:
        ranks.append(Rank(sim, cache))
        return ranks[-1]

    yield make
    for rank in ranks:
        rank.worker.shutdown()
    assert sim.library.acl_sim_num_host() == num_host


LAYOUTS = (KVCacheLayout.LBHNC, KVCacheLayout.LHBNC, KVCacheLayout.BLHNC)


@pytest.mark.parametrize(
    "make", [*(partial(of_vllm, layout) for layout in LAYOUTS), attention, mla, hybrid]
)
@pytest.mark.parametrize("has_batch", [True, False])
def test_store_evict_load(
    make_rank: MakeRank, sim: Sim, make: Callable[[], Cache], has_batch: bool
) -> None:
    """Bytes come back into other device blocks than the stored ones, and no other block changes."""
    sim.take_batches(has_batch)
    rank = make_rank(make())
    stored = {17: 1, 18: 2, 4: 3, 19: 6}  # host block: device block
    left = rank.pages()
    rank.step(StepMetadata(stores=[store(0, *((d, h) for h, d in stored.items()))]))
    rank.worker.drain()
    # Evicted: compute of other requests writes over them.
    compute = int(torch_npu.npu.current_stream().npu_stream)
    for part in rank.cache.memory:
        sim.fill(part.data_ptr(), 99, part.numel(), compute)
    back = {5: 18, 2: 17, 7: 4, 0: 19}  # device block: host block
    rank.step(StepMetadata(loads=[load(1, "r", *back.items())]))
    rank.worker.drain()
    rank.step(StepMetadata())
    assert rank.ended() == {0: 1, 1: 1}
    for now, before in zip(rank.pages(), left, strict=True):
        for device, host in back.items():
            assert torch.equal(now[device], before[stored[host]])
        assert bool((now[[1, 3, 4, 6]] == 99).all())
    counts = sim.take_counts()
    assert counts.blocking == 0
    assert (counts.batch_calls > 0, counts.single_calls > 0) == (has_batch, not has_batch)


def test_every_transfer_is_copied_and_reported_once(make_rank: MakeRank, sim: Sim) -> None:
    """A step is copied once, however often its hooks are called. A load that takes several steps is
    reported too. Nothing is lost if the engine drains while threads submit and report.

    A port of vLLM's connector to Ascend had these faults: it copied a step again at every poll,
    kept the requests of one step only, and cleared a list while its thread appended to it.
    """
    rank = make_rank(mla())  # two regions
    sim.library.acl_sim_delay_all(100)
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
            loaded.update(rank.step(metadata))
        if dice.random() < 0.2:
            rank.worker.drain()
        ended.update(rank.ended())
    rank.worker.drain()
    loaded.update(rank.step(StepMetadata()))
    ended.update(rank.ended())
    assert next_id > 200
    assert ended == Counter(range(next_id))
    assert set(loaded.values()) == {1}
    assert sim.take_counts().descriptors == 2 * next_id
