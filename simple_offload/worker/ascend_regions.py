"""KV caches of vllm-ascend as regions, which addresses delimit."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import NamedTuple

import torch

KVCache = torch.Tensor | Sequence["KVCache"]
"""What a layer registers: one tensor, or several (keys and values, MLA's two tensors, Mamba's
states, an indexer's keys and scales), in one allocation or in several."""


class _Rows(NamedTuple):
    """A range of bytes of every block: that of block b begins at ``start + b * stride``."""

    start: int  # address
    stride: int
    width: int
    layer: str
    tensor: torch.Tensor


def find_regions_by_address(
    kv_caches: Mapping[str, KVCache], num_blocks: int
) -> list[torch.Tensor]:
    """The memory behind ``kv_caches`` as int8 views ``[num_blocks, page_bytes]``.

    Row b of all regions together holds every byte of block b once, whatever tensor, layer and group
    the byte belongs to. The first dimension of a tensor is blocks, or kernel blocks, of which every
    block has the same number; there are further dimensions.

    Only addresses show which tensors share pages: vllm-ascend allocates keys and values separately,
    each larger than needed and then sliced, or cuts several tensors out of one allocation.
    Raises ValueError if a tensor does not divide into blocks, if bytes belong to several blocks, or
    if a region would leave its allocation.
    """
    all_rows = [
        rows
        for layer, cache in kv_caches.items()
        for tensor in _tensors(cache)
        for rows in _rows_of(layer, tensor, num_blocks)
    ]
    regions = [_region(cluster, num_blocks) for cluster in _clusters(all_rows, num_blocks)]
    require_disjoint(regions)
    return regions


def _tensors(cache: KVCache) -> Iterator[torch.Tensor]:
    if isinstance(cache, torch.Tensor):
        yield cache
    else:
        for nested in cache:
            yield from _tensors(nested)


def _rows_of(layer: str, tensor: torch.Tensor, num_blocks: int) -> Iterator[_Rows]:
    """The rows of a tensor: one set; if a dimension lies outside the blocks (one head with all its
    blocks, then the next head), one set per index of that dimension."""
    if tensor.numel() == 0:
        return
    item, length, step = tensor.element_size(), tensor.shape[0], tensor.stride(0)
    if length % num_blocks:
        raise ValueError(
            f"{layer}: a KV cache tensor of shape {tuple(tensor.shape)} does not divide into "
            f"{num_blocks} blocks"
        )
    if tensor.dim() == 1 and length != num_blocks:
        raise ValueError(f"{layer}: a KV cache tensor of one dimension does not show its blocks")
    per_block = length // num_blocks
    inner: list[tuple[int, int]] = []
    outer: list[tuple[int, int]] = []
    for size, stride in zip(tensor.shape[1:], tensor.stride()[1:], strict=True):
        (outer if num_blocks > 1 and stride >= length * step else inner).append((size, stride))
    width = (per_block - 1) * step + sum((size - 1) * stride for size, stride in inner) + 1
    block_stride = per_block * step if num_blocks > 1 else width
    if width > block_stride:
        raise ValueError(
            f"{layer}: the blocks of a KV cache tensor of shape {tuple(tensor.shape)} and "
            f"strides {tensor.stride()} lie within one another"
        )
    for indices in product(*(range(size) for size, _ in outer)):
        offset = sum(i * stride for i, (_, stride) in zip(indices, outer, strict=True))
        start = tensor.data_ptr() + offset * item
        yield _Rows(start, block_stride * item, width * item, layer, tensor)


def _clusters(all_rows: Iterable[_Rows], num_blocks: int) -> Iterator[list[_Rows]]:
    """Groups of rows whose address ranges overlap, in the order of addresses."""
    cluster: list[_Rows] = []
    end = 0
    for rows in sorted(all_rows, key=lambda rows: rows.start):
        if cluster and rows.start >= end:
            yield cluster
            cluster = []
        cluster.append(rows)
        end = max(end, rows.start + (num_blocks - 1) * rows.stride + rows.width)
    if cluster:
        yield cluster


def _region(cluster: Sequence[_Rows], num_blocks: int) -> torch.Tensor:
    """One region with every byte of ``cluster``, and the bytes between them."""
    first = cluster[0]
    end = max(rows.start + rows.width for rows in cluster)
    page = first.stride if num_blocks > 1 else end - first.start
    for rows in cluster:
        if num_blocks > 1 and (rows.stride != page or rows.start + rows.width > first.start + page):
            raise ValueError(
                f"{first.layer} and {rows.layer}: the same bytes of a KV cache belong to "
                "several blocks"
            )
    storage = torch.empty(0, dtype=torch.int8, device=first.tensor.device)
    storage.set_(first.tensor.untyped_storage())
    lowest = storage.data_ptr()
    # A page may begin before the block's bytes, as well as end behind them: the allocation may end
    # with the bytes of the last block.
    start = min(first.start, lowest + storage.numel() - num_blocks * page)
    if start < max(lowest, end - page):
        raise ValueError(f"{first.layer}: pages of its KV cache leave their allocation")
    offset = start - lowest
    return storage[offset : offset + num_blocks * page].view(num_blocks, page)


def require_disjoint(regions: Iterable[torch.Tensor]) -> None:
    """Raise ValueError if a byte lies in two regions."""
    end = 0
    for region in sorted(regions, key=lambda region: region.data_ptr()):
        if region.data_ptr() < end:
            raise ValueError("KV cache tensors overlap in part; this layout is not supported")
        end = region.data_ptr() + region.numel()
