"""KV cache memory as vLLM's workers make it: placements from vLLM, views from vLLM. A check of
regions of it."""

import importlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    create_kv_cache_views,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from simple_offload.vllm_compat import vllm_version
from simple_offload.worker.ascend_regions import KVCache

_planner = importlib.import_module(
    "vllm.v1.core.kv_cache_utils" if vllm_version() < (0, 33) else "vllm.v1.core.kv_cache_planning"
)


def full(num_heads: int = 2, head_size: int = 3, block_size: int = 4, **more: Any) -> KVCacheSpec:
    """A page of ``2 * num_heads * head_size * block_size`` float32 values."""
    return FullAttentionSpec(
        block_size=block_size,
        num_kv_heads=num_heads,
        head_size=head_size,
        dtype=torch.float32,
        **more,
    )


def window(num_heads: int = 2, head_size: int = 3, block_size: int = 4) -> KVCacheSpec:
    return SlidingWindowSpec(
        block_size=block_size,
        num_kv_heads=num_heads,
        head_size=head_size,
        dtype=torch.float32,
        sliding_window=2 * block_size,
    )


def group(spec: KVCacheSpec, *layers: str) -> KVCacheGroupSpec:
    return KVCacheGroupSpec(list(layers), spec)


def mixed_group(specs: dict[str, KVCacheSpec]) -> KVCacheGroupSpec:
    """One group whose layers have pages of different sizes."""
    block_size = next(iter(specs.values())).block_size
    return group(UniformTypeKVCacheSpecs(block_size, specs), *specs)


@dataclass
class KVMemory:
    """One rank's KV cache in a storage that may be larger than its allocation."""

    config: KVCacheConfig
    storage: torch.Tensor  # [bytes] int8
    kv_caches: dict[str, torch.Tensor]
    """By layer, as vLLM registers them."""


def make_kv_memory(
    groups: Sequence[KVCacheGroupSpec], num_blocks: int, layout: KVCacheLayout, **around: int
) -> KVMemory:
    """Memory for ``groups``, placed by vLLM. ``around``: as for ``place``. AssertionError or
    ValueError where vLLM refuses."""
    vllm_config = SimpleNamespace(
        attention_config=SimpleNamespace(hisparse_config=None),
        cache_config=SimpleNamespace(
            get_resolved_kv_cache_layout=lambda: layout,
            num_gpu_blocks_override=num_blocks,
            prefix_cache_retention_interval=None,
        ),
    )
    config = _planner.get_kv_cache_config_from_groups(vllm_config, list(groups), 0)
    return place(config, layout, **around)


def place(
    config: KVCacheConfig, layout: KVCacheLayout, in_front: int = 0, behind: int = 0
) -> KVMemory:
    """The memory that ``config`` describes, with one view per layer. ``in_front`` and ``behind``
    are bytes of other storage around it. Layers without a view have the raw buffer."""
    (size,) = {tensor.size for tensor in config.kv_cache_tensors}
    storage = torch.zeros(in_front + size + behind, dtype=torch.int8)
    buffer = storage[in_front:]
    kv_caches: dict[str, torch.Tensor] = {}
    for placement in config.kv_cache_tensors:
        spec = _spec_of(config.kv_cache_groups, placement.layers[0])
        if spec.has_layer_views:
            views = create_kv_cache_views(buffer, spec, config.num_blocks, layout, placement)
            kv_caches |= dict(zip(placement.layers, views, strict=True))
        else:
            kv_caches |= dict.fromkeys(placement.layers, buffer)
    return KVMemory(config, storage, kv_caches)


def _spec_of(groups: Sequence[KVCacheGroupSpec], layer: str) -> KVCacheSpec:
    spec = next(group.kv_cache_spec for group in groups if layer in group.layer_names)
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return spec.kv_cache_specs[layer]
    return spec


def small_kv_memory(num_heads: int = 2) -> KVMemory:
    """Four blocks of two layers, each with these KV heads."""
    return make_kv_memory([group(full(num_heads), "a", "b")], 4, KVCacheLayout.LBHNC)


def check_regions(
    regions: Sequence[torch.Tensor], kv_caches: Iterable[KVCache], num_blocks: int
) -> int:
    """Fail unless every byte of a block lies in one region, once, in the row of its block. The
    views ``kv_caches`` show the blocks. Overwrites them. Returns the number of bytes in rows that
    no block owns."""
    blocks = [
        tensor.view(torch.int8).unflatten(0, (num_blocks, -1))
        for cache in kv_caches
        for tensor in _tensors_of(cache)
        if tensor.numel()
    ]
    for region in regions:
        assert (region.dtype, len(region)) == (torch.int8, num_blocks)
        assert region.is_contiguous()
        region.zero_()
    for number in range(num_blocks):
        for view in blocks:
            view[number] = number + 1
    unowned = 0
    for region in regions:
        for number, row in enumerate(region):
            assert set(row.tolist()) <= {0, number + 1}
        unowned += int((region == 0).sum())
        region.zero_()
    assert not any(view.any() for view in blocks), "a byte outside all regions"
    for region in regions:
        region.add_(1)
    assert all((region == 1).all() for region in regions), "a byte in two regions"
    return unowned


def _tensors_of(cache: KVCache) -> list[torch.Tensor]:
    if isinstance(cache, torch.Tensor):
        return [cache]
    return [tensor for part in cache for tensor in _tensors_of(part)]
