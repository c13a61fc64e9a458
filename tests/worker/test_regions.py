"""find_regions: for any layout and any address, the regions have every byte of a block once."""

from collections.abc import Callable
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, reject
from hypothesis import strategies as st
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    HiSparseHotSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from simple_offload.worker import regions as regions_module
from simple_offload.worker.regions import find_regions
from tests.worker.kv_memory import (
    KVMemory,
    check_regions,
    full,
    group,
    make_kv_memory,
    mixed_group,
    place,
    window,
)

ALL_LAYOUTS = list(KVCacheLayout)
HAS_ALIGNMENT = "block_stride_alignment" in {field.name for field in fields(FullAttentionSpec)}
"""Whether vLLM can align blocks: from 0.31 on."""


def check(memory: KVMemory, *, may_pad: bool = False) -> list[torch.Tensor]:
    """The regions of ``memory``. ``may_pad``: rows may have bytes that no block owns."""
    regions = find_regions(memory.kv_caches, memory.config)
    # A raw buffer shows no blocks.
    views = [cache for cache in memory.kv_caches.values() if cache.dim() > 1]
    found = check_regions(regions, views, memory.config.num_blocks)
    assert may_pad or not found
    return regions


# Each layout


@pytest.mark.parametrize("layout", ALL_LAYOUTS, ids=lambda layout: layout.name)
@pytest.mark.parametrize("others", [[], [group(window(), "d", "e"), group(window(), "f")]])
def test_number_of_regions(layout: KVCacheLayout, others: list[KVCacheGroupSpec]) -> None:
    """Groups lie over each other: more groups, no more regions."""
    groups = [group(full(), "a", "b", "c"), *others]
    memory = make_kv_memory(groups, 5, layout, in_front=512, behind=4096)
    regions = check(memory)
    assert min(region.data_ptr() for region in regions) == memory.storage.data_ptr() + 512
    expected = {"LHBNC": 6, "LBHNC": 3, "LBNHC": 3}  # with blocks outermost, one region
    assert len(regions) == expected.get(layout.name, 1)


@given(
    layout=st.sampled_from(ALL_LAYOUTS),
    num_blocks=st.integers(1, 4),
    page=st.tuples(st.sampled_from([1, 2, 4]), st.integers(1, 3), st.sampled_from([2, 4])),
    layer_counts=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    other_heads=st.lists(st.integers(1, 3), max_size=2),
    alignment=st.sampled_from([None, None, 40] if HAS_ALIGNMENT else [None]),
    surplus=st.tuples(st.sampled_from([0, 256]), st.sampled_from([0, 4096])),
)
def test_any_memory_that_vllm_makes(
    layout: KVCacheLayout,
    num_blocks: int,
    page: tuple[int, int, int],
    layer_counts: list[int],
    other_heads: list[int],
    alignment: int | None,
    surplus: tuple[int, int],
) -> None:
    def spec_of(num_heads: int) -> KVCacheSpec:
        aligned: dict[str, Any] = {"block_stride_alignment": alignment} if HAS_ALIGNMENT else {}
        return full(num_heads, *page[1:], **aligned)

    spec = spec_of(page[0])
    groups = []
    for number, count in enumerate(layer_counts):
        specs = {f"{number}.{layer}": spec for layer in range(count)}
        specs |= {f"{number}.x{heads}": spec_of(heads) for heads in other_heads}
        groups.append(mixed_group(specs) if other_heads else group(spec, *specs))
    try:
        memory = make_kv_memory(groups, num_blocks, layout, in_front=surplus[0], behind=surplus[1])
    except (AssertionError, ValueError):
        reject()  # vLLM refuses such memory
    check(memory, may_pad=True)


# Layers on this rank


@pytest.mark.parametrize("layout", ALL_LAYOUTS, ids=lambda layout: layout.name)
@pytest.mark.parametrize("missing", ["a", "b", "c"])
def test_layers_without_a_cache_here(layout: KVCacheLayout, missing: str) -> None:
    """Their bytes belong to the block as long as another layer of that memory is on this rank."""
    memory = make_kv_memory([group(full(), "a", "b", "c")], 5, layout)
    every_region = find_regions(memory.kv_caches, memory.config)
    del memory.kv_caches[missing]
    found = find_regions(memory.kv_caches, memory.config)
    spans = [[(r.data_ptr(), r.shape) for r in regions] for regions in (every_region, found)]
    assert spans[0] == spans[1]


def test_layers_of_other_ranks_and_layers_that_share_a_cache() -> None:
    groups = [group(full(), "a", "b"), group(window(), "c", "d")]
    memory = make_kv_memory(groups, 5, KVCacheLayout.LBHNC)
    del memory.kv_caches["c"], memory.kv_caches["d"]
    memory.kv_caches["e"] = memory.kv_caches["a"]
    assert len(check(memory)) == 2
    assert find_regions({}, memory.config) == []
    assert find_regions({}, KVCacheConfig(5, [], [])) == []


@pytest.mark.parametrize("in_front", [0, 512])
@pytest.mark.parametrize("layout", [KVCacheLayout.LBHNC, KVCacheLayout.BLHNC])
def test_raw_buffers_beside_views(layout: KVCacheLayout, in_front: int) -> None:
    """Layers without views register the raw buffer that they lie in. Their placement may begin
    further inside. Its base is the buffer, not its own address."""
    spec, num_blocks = full(), 5
    page = spec.page_size_bytes
    between, stride = (num_blocks * page, page) if layout.is_layer_compact else (page, 3 * page)
    raw = HiSparseHotSpec(block_size=4, page_size=page, blocks_per_request=2)
    placements = [
        KVCacheTensor(
            size=3 * num_blocks * page,
            layers=layers,
            offset=offset,
            layer_stride=between,
            block_stride=stride,
        )
        for layers, offset in ((["a"], 0), (["b", "c"], between))
    ]
    config = KVCacheConfig(num_blocks, placements, [group(raw, "b", "c"), group(spec, "a")])
    memory = place(config, layout, in_front, behind=100)
    assert all(memory.kv_caches[name].dim() == 1 for name in "bc")
    regions = find_regions(memory.kv_caches, config)
    assert len(regions) == (3 if layout.is_layer_compact else 1)
    views = [
        memory.storage.as_strided((num_blocks, page), (stride, 1), in_front + index * between)
        for index in range(3)
    ]
    assert check_regions(regions, views, num_blocks) == 0


# Several tensors of a layer, or tensors elsewhere than their placements say


def test_on_an_npu_addresses_show_the_regions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where each layer registers one tensor: vllm-ascend gives it memory of its own, and the
    placement is that of a part of a common buffer."""
    memory = make_kv_memory([group(full(), "a", "b")], 5, KVCacheLayout.BLHNC)
    own = {name: torch.zeros_like(view) for name, view in memory.kv_caches.items()}
    monkeypatch.setattr(regions_module, "current_platform", SimpleNamespace(device_type="npu"))
    found = find_regions(own, memory.config)
    assert check_regions(found, own.values(), 5) == 0
    assert len(found) == 2


# Refused placements


ONE = {"offset": 0, "layer_stride": 400, "block_stride": 100}


@pytest.mark.parametrize(
    ("placements", "message"),
    [
        *(([ONE, ONE | {"offset": offset}], "overlap in part") for offset in (1, 100, 200, 399)),
        (
            [ONE, {"layer_stride": 200, "block_stride": 50}],
            "raw1: pages of 50 bytes .* pages of 100 bytes",
        ),
        *(
            ([ONE | {"offset": offset}], "outside their storage of 1000 bytes")
            for offset in (601, 1000, 5000)
        ),
    ],
)
def test_refused_placements(placements: list[dict[str, Any]], message: str) -> None:
    """Of one layer each, with four blocks in a buffer of 1000 bytes."""
    tensors = [
        KVCacheTensor(size=1000, layers=[f"raw{number}"], **placement)
        for number, placement in enumerate(placements)
    ]
    buffer = torch.zeros(1000, dtype=torch.int8)
    kv_caches = {tensor.layers[0]: buffer for tensor in tensors}
    with pytest.raises(ValueError, match=message):
        find_regions(kv_caches, KVCacheConfig(4, tensors, []))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda caches: {"a": (caches["a"],)}, "a registers several KV cache tensors"),
        (lambda caches: {"b": caches["a"]}, "outside their storage"),
    ],
    ids=["several tensors, not on an NPU", "a view outside its placement"],
)
def test_refused_caches(change: Callable[[Any], Any], message: str) -> None:
    memory = make_kv_memory([group(full(), "a", "b")], 5, KVCacheLayout.LBHNC)
    with pytest.raises(ValueError, match=message):
        find_regions(change(memory.kv_caches), memory.config)
