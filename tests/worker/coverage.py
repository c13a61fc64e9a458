"""Checks regions against the views of a KV cache."""

import numpy as np
import torch

from simple_offload.worker.regions import find_regions
from tests.worker.kv_memory import UNOWNED, KVMemory


def regions_of(memory: KVMemory) -> list[torch.Tensor]:
    """The regions of ``memory``. Fails unless each byte of a block lies in exactly one region, in
    the row of its block. Other bytes of rows must be unowned."""
    num_blocks = memory.config.num_blocks
    regions = find_regions(memory.kv_caches, memory.config)
    owners = memory.owners()
    covered = np.zeros(len(owners), dtype=np.int64)
    for region in regions:
        assert region.dtype == torch.int8
        assert region.shape[0] == num_blocks
        assert region.stride(1) == 1
        start = region.data_ptr() - memory.storage.data_ptr()
        for block in range(num_blocks):
            row = slice(start + block * region.stride(0), None)
            row = slice(row.start, row.start + region.shape[1])
            assert set(owners[row].tolist()) <= {block, UNOWNED}
            covered[row] += 1
    assert covered[owners != UNOWNED].tolist() == [1] * int((owners != UNOWNED).sum())
    assert covered.max() == 1
    return regions


def padding(memory: KVMemory, regions: list[torch.Tensor]) -> int:
    """Number of bytes in rows that no block owns."""
    owned = int((memory.owners() != UNOWNED).sum())
    return sum(region.numel() for region in regions) - owned
