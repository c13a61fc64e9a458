"""Regions of vllm-ascend's KV caches, on the NPU: cut, stored, loaded."""

import numpy as np
import pytest
import torch

from simple_offload.backends.base import Direction
from simple_offload.backends.npu.backend import NpuBackend
from simple_offload.metadata import Transfer
from simple_offload.worker.ascend_regions import KVCache, find_regions_by_address
from simple_offload.worker.host_pool import HostPool
from tests.acl_sim.sim import Sim

NUM_BLOCKS = 6


def empty(size: int) -> torch.Tensor:
    """An allocation of ``size`` bytes in a larger one, aligned like vllm-ascend's: 2 MiB there, 4
    KiB here."""
    memory = torch.empty(size + 4096, dtype=torch.int8, device="npu")
    start = -memory.data_ptr() % 4096
    return memory[start : start + size]


def attention() -> tuple[list[torch.Tensor], dict[str, KVCache]]:
    key, value = empty(NUM_BLOCKS * 64), empty(NUM_BLOCKS * 96)
    caches = (key.view(torch.float16).view(-1, 4, 4), value.view(torch.float16).view(-1, 4, 4))
    return [key, value], {"attention": caches}


def mla() -> tuple[list[torch.Tensor], dict[str, KVCache]]:
    parts = [empty(NUM_BLOCKS * 128), empty(NUM_BLOCKS * 16)]
    return parts, {"mla": tuple(part.view(NUM_BLOCKS, -1) for part in parts)}


def hybrid() -> tuple[list[torch.Tensor], dict[str, KVCache]]:
    raw = empty(NUM_BLOCKS * (8 + 32 + 32))
    conv, key, value = raw.split([NUM_BLOCKS * 8, NUM_BLOCKS * 32, NUM_BLOCKS * 32])
    views = [part.view(NUM_BLOCKS, -1) for part in (conv, key, value)]
    return [conv, key, value], {"mamba": views[:2], "attention": tuple(views[1:])}


@pytest.mark.parametrize("make", [attention, mla, hybrid])
def test_store_and_load(sim: Sim, make: object) -> None:
    assert callable(make)
    parts, caches = make()
    contents = [torch.randint(-128, 128, (part.numel(),), dtype=torch.int8) for part in parts]
    for part, content in zip(parts, contents, strict=True):
        part.copy_(content)
    regions = find_regions_by_address(caches, NUM_BLOCKS)
    assert sum(region.numel() for region in regions) == sum(part.numel() for part in parts)
    backend = NpuBackend()
    backend.open(regions)
    pool = HostPool(backend, [region.shape[1] for region in regions], 4)
    pool.open()
    stored, loaded = np.array([1, 4]), np.array([5, 0])
    backend.copy(Direction.STORE, Transfer(0, stored, np.array([3, 2])), None).wait()
    backend.copy(Direction.LOAD, Transfer(1, loaded, np.array([3, 2])), None).wait()
    for part, content in zip(parts, contents, strict=True):
        expected = content.view(NUM_BLOCKS, -1).clone()
        expected[loaded] = expected[stored]
        assert torch.equal(part.cpu().view(NUM_BLOCKS, -1), expected)
    pool.close()
    backend.close()
