"""KV cache tensors of any layout as regions: base + block x stride."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from vllm.platforms import current_platform

from simple_offload.worker.ascend_regions import (
    KVCache,
    find_regions_by_address,
    require_disjoint,
)

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheTensor


def find_regions(
    kv_caches: Mapping[str, KVCache], kv_cache_config: "KVCacheConfig"
) -> list[torch.Tensor]:
    """The memory behind ``kv_caches`` as int8 views ``[num_blocks, page_bytes]``.

    Row b of all regions together holds every byte of device block b once, whatever group the block
    belongs to: groups share memory, and views of the same bytes count once. A layer-outermost
    layout gives one region per layer (LHBNC: per KV head of each layer), a block-outermost layout a
    single region for all layers.

    ``kv_caches``: by layer name, what vLLM registers: a strided view of the layer, or the raw
    buffer for layers that lay out their own memory. On an NPU, placements do not say where tensors
    are: vllm-ascend's runner allocates as it likes, and most layers register several tensors. Their
    addresses show the regions.
    Raises ValueError if tensors overlap other than exactly, leave their storage, or are several for
    a layer on another platform.
    """
    num_blocks = kv_cache_config.num_blocks
    if current_platform.device_type == "npu":
        return find_regions_by_address(kv_caches, num_blocks)
    tensors = {name: c for name, c in kv_caches.items() if isinstance(c, torch.Tensor)}
    if several := kv_caches.keys() - tensors:
        raise ValueError(f"{min(several)} registers several KV cache tensors, as on an NPU only")
    # By address: layers of several groups may have the same memory.
    regions: dict[int, torch.Tensor] = {}
    for placement in kv_cache_config.kv_cache_tensors:
        name = next((layer for layer in placement.layers if layer in tensors), None)
        if name is None:
            continue  # layers of another pipeline stage, or shared with a layer seen already
        # The placement counts from its allocation, which may begin inside the storage.
        cache = tensors[name]
        storage = torch.empty(0, dtype=torch.int8, device=cache.device)
        storage.set_(cache.untyped_storage())
        base = _allocation_start(cache, name, placement)
        # One layer of the placement shows where the others are.
        for start in _region_starts(placement, num_blocks):
            region = _view(storage, base + start, num_blocks, placement.block_stride)
            known = regions.setdefault(region.data_ptr(), region)
            if known.shape != region.shape:
                raise ValueError(
                    f"{name}: pages of {region.shape[1]} bytes start where pages of "
                    f"{known.shape[1]} bytes do"
                )
    require_disjoint(regions.values())
    return list(regions.values())


def _allocation_start(cache: torch.Tensor, name: str, placement: "KVCacheTensor") -> int:
    """Byte offset, in the storage of ``cache``, of the allocation that placements refer to. The
    view ``cache`` shows it; a view need not start where its storage does."""
    start = cache.data_ptr() - cache.untyped_storage().data_ptr()
    if cache.dim() == 1:
        return start  # the raw buffer
    layer: int = placement.layers.index(name)
    return start - int(placement.offset) - layer * int(placement.layer_stride)


def _region_starts(placement: "KVCacheTensor", num_blocks: int) -> range:
    """Byte offsets of the regions of ``placement`` within the allocation."""
    span = num_blocks * placement.block_stride
    if placement.layer_stride < span:
        return range(1)  # block-outermost: a block holds all layers, from byte 0 on
    end = placement.offset + len(placement.layers) * placement.layer_stride
    return range(placement.offset, end, span)


def _view(storage: torch.Tensor, start: int, num_blocks: int, page_bytes: int) -> torch.Tensor:
    end = start + num_blocks * page_bytes
    if start < 0 or end > storage.numel():
        raise ValueError(
            f"KV cache pages at bytes {start} to {end} lie outside their storage of "
            f"{storage.numel()} bytes"
        )
    return storage[start:end].view(num_blocks, page_bytes)
