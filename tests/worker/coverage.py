"""Checks regions against what the views of a KV cache say of its bytes."""

import numpy as np
import torch

from simple_offload.worker.regions import find_regions
from tests.worker.kv_memory import NOBODY, KVMemory


def regions_of(memory: KVMemory) -> list[torch.Tensor]:
    """The regions of ``memory``. Fails unless each byte that belongs to a block lies in exactly
    one region, in the row of its block, and the other bytes of rows belong to nobody."""
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
            assert set(owners[row].tolist()) <= {block, NOBODY}
            covered[row] += 1
    assert covered[owners != NOBODY].tolist() == [1] * int((owners != NOBODY).sum())
    assert covered.max() == 1
    return regions


def padding(memory: KVMemory, regions: list[torch.Tensor]) -> int:
    """Bytes of all rows that belong to nobody."""
    owned = int((memory.owners() != NOBODY).sum())
    return sum(region.numel() for region in regions) - owned
