"""KV caches of vllm-ascend as regions, cut by address."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import NamedTuple

import torch

KVCache = torch.Tensor | Sequence["KVCache"]
"""What a layer registers: a tensor, or tensors (keys and values, the two parts of MLA, the states
of Mamba, an indexer's keys and scales), of one allocation or of several."""


class _Rows(NamedTuple):
    """Some bytes of every block: those of block b begin at ``start + b * stride``."""

    start: int  # address
    stride: int
    width: int
    layer: str
    tensor: torch.Tensor


def find_regions_by_address(
    kv_caches: Mapping[str, KVCache], num_blocks: int
) -> list[torch.Tensor]:
    """The memory behind ``kv_caches`` as int8 views ``[num_blocks, page_bytes]``.

    Row b of all regions together has every byte of block b once, whichever tensors, layers and
    groups it belongs to. The first dimension of a tensor, which has others, is blocks, or kernel
    blocks, of which each block has the same number.

    vllm-ascend allocates keys and values one by one, each larger than needed and sliced, or it
    carves several tensors from one allocation: so neither the allocations nor where they begin
    tell what belongs to whom.
    Raises ValueError when a tensor does not divide into blocks, when bytes belong to several
    blocks, or when a region would leave its allocation.
    """
    rows = [
        part
        for layer, cache in kv_caches.items()
        for tensor in _tensors(cache)
        for part in _rows_of(layer, tensor, num_blocks)
    ]
    regions = [_region(cluster, num_blocks) for cluster in _clusters(rows, num_blocks)]
    _require_disjoint(regions)
    return regions


def _tensors(cache: KVCache) -> Iterator[torch.Tensor]:
    if isinstance(cache, torch.Tensor):
        yield cache
    else:
        for part in cache:
            yield from _tensors(part)


def _rows_of(layer: str, tensor: torch.Tensor, num_blocks: int) -> Iterator[_Rows]:
    """The rows of a tensor: one set, or, where a dimension lies outside the blocks (a head with
    all its blocks, then the next), one for each index of it."""
    if tensor.numel() == 0:
        return
    item, length, step = tensor.element_size(), tensor.shape[0], tensor.stride(0)
    if length % num_blocks:
        raise ValueError(
            f"{layer}: a KV cache tensor of shape {tuple(tensor.shape)} does not divide into "
            f"{num_blocks} blocks"
        )
    if tensor.dim() == 1 and length != num_blocks:
        raise ValueError(f"{layer}: a KV cache tensor of one dimension does not tell its blocks")
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


def _clusters(rows: Iterable[_Rows], num_blocks: int) -> Iterator[list[_Rows]]:
    """Rows whose ranges of addresses overlap, together, by address."""
    cluster: list[_Rows] = []
    end = 0
    for part in sorted(rows, key=lambda part: part.start):
        if cluster and part.start >= end:
            yield cluster
            cluster = []
        cluster.append(part)
        end = max(end, part.start + (num_blocks - 1) * part.stride + part.width)
    if cluster:
        yield cluster


def _region(cluster: Sequence[_Rows], num_blocks: int) -> torch.Tensor:
    """One region that has every byte of ``cluster``, and those between them."""
    first = cluster[0]
    end = max(part.start + part.width for part in cluster)
    page = first.stride if num_blocks > 1 else end - first.start
    for part in cluster:
        if num_blocks > 1 and (part.stride != page or part.start + part.width > first.start + page):
            raise ValueError(
                f"{first.layer} and {part.layer}: the same bytes of a KV cache belong to "
                "several blocks"
            )
    storage = torch.empty(0, dtype=torch.int8, device=first.tensor.device)
    storage.set_(first.tensor.untyped_storage())
    lowest = storage.data_ptr()
    # What lies before a block's bytes may serve as its page's other bytes as well as what lies
    # behind: behind the last block the allocation may end.
    start = min(first.start, lowest + storage.numel() - num_blocks * page)
    if start < max(lowest, end - page):
        raise ValueError(f"{first.layer}: pages of its KV cache leave their allocation")
    offset = start - lowest
    return storage[offset : offset + num_blocks * page].view(num_blocks, page)


def _require_disjoint(regions: Iterable[torch.Tensor]) -> None:
    end = 0
    for region in sorted(regions, key=lambda region: region.data_ptr()):
        if region.data_ptr() < end:
            raise ValueError("pages of KV cache tensors overlap in part; this is not supported")
        end = region.data_ptr() + region.numel()
