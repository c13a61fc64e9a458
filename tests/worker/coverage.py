"""Checks that regions have every byte of a KV cache once."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from simple_offload.worker.ascend_regions import KVCache


def check_regions(
    regions: Sequence[torch.Tensor], kv_caches: Mapping[str, KVCache], num_blocks: int
) -> int:
    """Fail unless every byte of a block lies in one region, once, in the row of its block. The
    views ``kv_caches`` show the blocks. Returns the number of bytes in rows that no block owns."""
    found: dict[int, int] = {}
    for region in regions:
        assert region.dtype == torch.int8
        assert region.shape[0] == num_blocks
        assert region.is_contiguous()
        for block, row in enumerate(region):
            row_bytes = range(row.data_ptr(), row.data_ptr() + row.numel())
            assert found.keys().isdisjoint(row_bytes)
            found |= dict.fromkeys(row_bytes, block)
    owners = _owners_of(kv_caches, num_blocks)
    assert owners.items() <= found.items()
    return len(found) - len(owners)


def _owners_of(kv_caches: Mapping[str, KVCache], num_blocks: int) -> dict[int, int]:
    """By address, the block that owns a byte. Several layers may have the same bytes, but only in
    the same block: otherwise the memory itself is wrong."""
    owners: dict[int, int] = {}
    for tensor in (tensor for cache in kv_caches.values() for tensor in _tensors_of(cache)):
        where = np.unravel_index(np.arange(math.prod(tensor.shape)), tuple(tensor.shape))
        offsets = sum(index * stride for index, stride in zip(where, tensor.stride(), strict=True))
        starts = tensor.data_ptr() + np.asarray(offsets) * tensor.element_size()
        blocks = (where[0] // (tensor.shape[0] // num_blocks)).tolist()
        for within in range(tensor.element_size()):
            claimed = dict(zip((starts + within).tolist(), blocks, strict=True))
            assert {**claimed, **owners}.items() >= claimed.items()
            owners |= claimed
    return owners


def _tensors_of(cache: KVCache) -> list[torch.Tensor]:
    if isinstance(cache, torch.Tensor):
        return [cache]
    return [tensor for part in cache for tensor in _tensors_of(part)]
