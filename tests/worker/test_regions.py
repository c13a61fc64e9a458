"""find_regions: for any layout and any address, the regions have every byte of a block once."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, reject
from hypothesis import strategies as st
from vllm.v1.kv_cache_interface import (
    HiSparseHotSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    MLAAttentionSpec,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from simple_offload.worker.regions import find_regions
from tests.worker.coverage import padding, regions_of
from tests.worker.kv_memory import full, group, make_kv_memory, mixed_group, place, window

ALL_LAYOUTS = list(KVCacheLayout)
LAYER_OUTERMOST = [layout for layout in ALL_LAYOUTS if layout.is_layer_compact]
BLOCK_OUTERMOST = [layout for layout in ALL_LAYOUTS if layout.is_block_outermost]


# Each layout


@pytest.mark.parametrize("layout", ALL_LAYOUTS, ids=lambda layout: layout.name)
@pytest.mark.parametrize("others", [[], [group(window(), "d", "e"), group(window(), "f")]])
def test_number_of_regions(layout: KVCacheLayout, others: list[KVCacheGroupSpec]) -> None:
    """Groups lie over each other: more groups, no more regions."""
    groups = [group(full(), "a", "b", "c"), *others]
    memory = make_kv_memory(groups, 5, layout, in_front=512, behind=4096)
    regions = regions_of(memory)
    assert padding(memory, regions) == 0
    assert min(region.data_ptr() for region in regions) == memory.storage.data_ptr() + 512
    expected = {"LHBNC": 6, "LBHNC": 3, "LBNHC": 3}  # with blocks outermost, one region
    assert len(regions) == expected.get(layout.name, 1)


@pytest.mark.parametrize("name", ["LBHNC", "LBNHC", "BLHNC", "BLNHC"])
def test_pages_of_different_sizes_in_one_group(name: str) -> None:
    layout = KVCacheLayout[name]
    specs = {"a": full(2), "b": full(2), "c": full(1), "d": full(6, head_size=5)}
    memory = make_kv_memory([mixed_group(specs)], 5, layout)
    assert len(memory.config.kv_cache_tensors) == 3
    regions = regions_of(memory)
    assert padding(memory, regions) == 0
    assert len(regions) == (4 if layout.is_layer_compact else 1)


@pytest.mark.parametrize("layout", BLOCK_OUTERMOST[:2], ids=lambda layout: layout.name)
def test_groups_with_pages_of_different_sizes(layout: KVCacheLayout) -> None:
    groups = [
        mixed_group({"a": full(2), "b": full(4)}),
        group(window(1), "c", "d", "e"),
    ]
    memory = make_kv_memory(groups, 5, layout)
    (region,) = regions_of(memory)
    assert region.shape[1] == full(2).page_size_bytes + full(4).page_size_bytes


@pytest.mark.parametrize("name", ["LBHNC", "LBNHC", "BLHNC", "BLNHC"])
def test_padded_pages(name: str) -> None:
    page = full().page_size_bytes
    memory = make_kv_memory(
        [group(full(page_size_padded=page + 64), "a", "b")], 4, KVCacheLayout[name]
    )
    assert padding(memory, regions_of(memory)) == 4 * 2 * 64


@pytest.mark.parametrize("name", ["LBHNC", "LBNHC", "BLHNC", "BLNHC"])
def test_blocks_aligned_beyond_their_pages(name: str) -> None:
    memory = make_kv_memory(
        [group(full(block_stride_alignment=1000), "a", "b", "c")], 4, KVCacheLayout[name]
    )
    assert padding(memory, regions_of(memory)) > 0


@pytest.mark.parametrize("layout", LAYER_OUTERMOST, ids=lambda layout: layout.name)
def test_blocks_split_for_kernels(layout: KVCacheLayout) -> None:
    spec = full(num_heads=1, block_size=8)
    groups = [group(spec, "a", "b"), group(window(num_heads=1, block_size=8), "c", "d")]
    memory = make_kv_memory(groups, 5, layout, kernel_block_size=2)
    assert memory.kv_caches["a"].shape[0] == 5 * 4
    regions = regions_of(memory)
    assert [region.shape for region in regions] == [(5, spec.page_size_bytes)] * 2


@pytest.mark.parametrize("layout", ALL_LAYOUTS, ids=lambda layout: layout.name)
def test_latent_attention(layout: KVCacheLayout) -> None:
    spec = MLAAttentionSpec(block_size=4, num_kv_heads=1, head_size=10, dtype=torch.bfloat16)
    regions_of(make_kv_memory([group(spec, "a", "b", "c")], 5, layout))


@given(
    layout=st.sampled_from(ALL_LAYOUTS),
    num_blocks=st.integers(1, 4),
    page=st.tuples(st.sampled_from([1, 2, 4]), st.integers(1, 3), st.sampled_from([2, 4])),
    layer_counts=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    other_heads=st.lists(st.integers(1, 3), max_size=2),
    alignment=st.sampled_from([None, None, 40]),
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
        return full(num_heads, *page[1:], block_stride_alignment=alignment)

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
    regions_of(memory)


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


def test_a_group_without_layers_on_this_rank() -> None:
    groups = [group(full(), "a", "b"), group(window(), "c", "d")]
    memory = make_kv_memory(groups, 5, KVCacheLayout.LBHNC)
    for name in ("c", "d"):
        del memory.kv_caches[name]
    assert len(regions_of(memory)) == 2


def test_a_rank_without_layers() -> None:
    assert find_regions({}, KVCacheConfig(5, [], [])) == []
    elsewhere = make_kv_memory([group(full(), "a")], 5, KVCacheLayout.LBHNC)
    assert find_regions({}, elsewhere.config) == []


def test_a_layer_that_shares_the_cache_of_another() -> None:
    memory = make_kv_memory([group(full(), "a", "b")], 5, KVCacheLayout.LBHNC)
    memory.kv_caches["c"] = memory.kv_caches["a"]
    assert len(regions_of(memory)) == 2


def raw_config(num_layers: int, page: int, num_blocks: int, **placement: Any) -> KVCacheConfig:
    """Layers without views, which register the raw buffer that they lie in."""
    layers = [f"raw{number}" for number in range(num_layers)]
    spec = HiSparseHotSpec(block_size=4, page_size=page, blocks_per_request=2)
    tensor = KVCacheTensor(size=num_layers * num_blocks * page, layers=layers, **placement)
    return KVCacheConfig(num_blocks, [tensor], [group(spec, *layers)])


@pytest.mark.parametrize("in_front", [0, 512])
@pytest.mark.parametrize("block_outermost", [False, True])
def test_raw_buffers(block_outermost: bool, in_front: int) -> None:
    page, num_blocks = 48, 5
    strides = (page, 3 * page) if block_outermost else (num_blocks * page, page)
    config = raw_config(3, page, num_blocks, layer_stride=strides[0], block_stride=strides[1])
    memory = place(config, KVCacheLayout.BLHNC, in_front, behind=100)
    regions = regions_of(memory)
    assert padding(memory, regions) == 0
    assert len(regions) == (1 if block_outermost else 3)


def test_raw_buffers_beside_views() -> None:
    """A placement further inside the allocation. Its base is the buffer, not its own address."""
    spec = full()
    page, num_blocks = spec.page_size_bytes, 5
    size = 3 * num_blocks * page
    strides: dict[str, Any] = {"layer_stride": num_blocks * page, "block_stride": page}
    raw = HiSparseHotSpec(block_size=4, page_size=page, blocks_per_request=2)
    config = KVCacheConfig(
        num_blocks,
        [
            KVCacheTensor(size=size, layers=["a"], **strides),
            KVCacheTensor(size=size, layers=["r", "s"], offset=num_blocks * page, **strides),
        ],
        [group(spec, "a"), group(raw, "r", "s")],
    )
    assert len(regions_of(place(config, KVCacheLayout.LBHNC, in_front=64))) == 3


# Refused placements


def placed_at(*placements: dict[str, Any], num_blocks: int = 4) -> Callable[[], Any]:
    """A call of ``find_regions`` for one-layer placements in a buffer of 1000 bytes."""
    tensors = [
        KVCacheTensor(size=1000, layers=[f"raw{number}"], **placement)
        for number, placement in enumerate(placements)
    ]
    buffer = torch.zeros(1000, dtype=torch.int8)
    kv_caches = dict.fromkeys((tensor.layers[0] for tensor in tensors), buffer)
    return lambda: find_regions(kv_caches, KVCacheConfig(num_blocks, tensors, []))


def test_partial_overlap() -> None:
    one = {"offset": 0, "layer_stride": 400, "block_stride": 100}
    for offset in (1, 100, 200, 399):
        with pytest.raises(ValueError, match="overlap in part"):
            placed_at(one, one | {"offset": offset})()
    assert len(placed_at(one, one | {"offset": 400})()) == 2


def test_pages_of_two_sizes_at_one_place() -> None:
    one = {"layer_stride": 400, "block_stride": 100}
    with pytest.raises(ValueError, match=r"raw1: pages of 50 bytes .* pages of 100 bytes"):
        placed_at(one, {"layer_stride": 200, "block_stride": 50})()


def test_heads_of_two_sizes_over_each_other() -> None:
    """The pages are equal, but each head has regions of its own."""
    groups = [group(full(4, head_size=1), "a"), group(window(2, head_size=2), "b")]
    memory = make_kv_memory(groups, 5, KVCacheLayout.LHBNC)
    with pytest.raises(ValueError, match="pages of"):
        find_regions(memory.kv_caches, memory.config)


@pytest.mark.parametrize("offset", [601, 1000, 5000])
def test_pages_outside_their_storage(offset: int) -> None:
    inside = {"offset": 600, "layer_stride": 400, "block_stride": 100}
    assert len(placed_at(inside)()) == 1
    with pytest.raises(ValueError, match="outside their storage of 1000 bytes"):
        placed_at(inside | {"offset": offset})()


def test_a_view_outside_its_placement() -> None:
    memory = make_kv_memory([group(full(), "a", "b")], 5, KVCacheLayout.LBHNC)
    memory.kv_caches = {"b": memory.kv_caches["a"]}
    with pytest.raises(ValueError, match="outside their storage"):
        find_regions(memory.kv_caches, memory.config)
