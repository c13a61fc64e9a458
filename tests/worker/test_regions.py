"""find_regions: every byte of a block, once, whatever the layout."""

import pytest
import torch
from hypothesis import given, reject
from hypothesis import strategies as st
from vllm.v1.kv_cache_interface import KVCacheSpec, MLAAttentionSpec
from vllm.v1.kv_cache_layout import KVCacheLayout

from tests.worker.coverage import padding, regions_of
from tests.worker.kv_memory import full, group, make_kv_memory, mixed_group, window

ALL_LAYOUTS = list(KVCacheLayout)
LAYER_OUTERMOST = [layout for layout in ALL_LAYOUTS if layout.is_layer_compact]
BLOCK_OUTERMOST = [layout for layout in ALL_LAYOUTS if layout.is_block_outermost]


# Each layout


@pytest.mark.parametrize("layout", ALL_LAYOUTS, ids=lambda layout: layout.name)
def test_one_group(layout: KVCacheLayout) -> None:
    memory = make_kv_memory([group(full(), "a", "b", "c")], 5, layout)
    regions = regions_of(memory)
    assert padding(memory, regions) == 0
    expected = {"LHBNC": 6, "LBHNC": 3, "LBNHC": 3}  # block-outermost: all in one
    assert len(regions) == expected.get(layout.name, 1)


@pytest.mark.parametrize("layout", ALL_LAYOUTS, ids=lambda layout: layout.name)
def test_groups_that_overlay_each_other(layout: KVCacheLayout) -> None:
    groups = [group(full(), "a", "b"), group(window(), "c", "d"), group(window(), "e")]
    memory = make_kv_memory(groups, 5, layout)
    regions = regions_of(memory)
    assert padding(memory, regions) == 0
    alone = make_kv_memory(groups[:1], 5, layout)
    assert [region.shape for region in regions] == [region.shape for region in regions_of(alone)]


@pytest.mark.parametrize("layout", ALL_LAYOUTS, ids=lambda layout: layout.name)
def test_a_single_block_and_a_single_layer(layout: KVCacheLayout) -> None:
    regions_of(make_kv_memory([group(full(), "a")], 1, layout))
    regions_of(make_kv_memory([group(full(), "a")], 3, layout))
    regions_of(make_kv_memory([group(full(), "a", "b")], 1, layout))


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
        reject()  # vLLM has no such memory
    regions_of(memory)
