"""LayerGroups: each layer's bytes are in the groups that it waits for, and every byte is in one."""

import pytest
import torch
from vllm.v1.kv_cache_interface import KVCacheGroupSpec
from vllm.v1.kv_cache_layout import KVCacheLayout

from simple_offload.worker.layer_groups import LayerGroups
from simple_offload.worker.regions import find_regions
from tests.worker.kv_memory import KVMemory, full, group, make_kv_memory, mixed_group, window

ABCDEF = group(full(), *"abcdef")
GROUPS: dict[str, list[KVCacheGroupSpec]] = {
    "one": [ABCDEF],
    "windows": [group(full(), *"abcd"), group(window(), *"efgh"), group(window(), *"ijk")],
    "mixed": [mixed_group({name: full(num_heads=i + 1) for i, name in enumerate("abcde")})],
}
HEADS_OUTERMOST = "BHLNC"
"""Every layer has bytes near a block's end."""


def find(memory: KVMemory, num_groups: int = 4, least_part_bytes: int = 1) -> LayerGroups:
    regions = find_regions(memory.kv_caches, memory.config)
    return LayerGroups.find(memory.kv_caches, regions, least_part_bytes, num_groups)


def groups_of(cache: torch.Tensor, found: LayerGroups, regions: list[torch.Tensor]) -> set[int]:
    """The groups that have bytes of a layer, from 1."""
    for region in regions:
        region.zero_()
    cache.view(torch.int8).fill_(1)
    return {
        number
        for number, parts in enumerate(found.parts, 1)
        for part in parts
        if regions[part.region][:, part.start : part.stop].any()
    }


@pytest.mark.proves("I3")
@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("layout", KVCacheLayout, ids=lambda layout: layout.name)
@pytest.mark.parametrize("num_groups", [2, 3, 4, 8])
def test_layers_and_groups(groups: str, layout: KVCacheLayout, num_groups: int) -> None:
    try:
        memory = make_kv_memory(GROUPS[groups], 5, layout, in_front=512, behind=64)
    except (AssertionError, ValueError):
        pytest.skip("vLLM refuses this layout")
    found = find(memory, num_groups)
    if found.num == 1:
        assert layout.name == HEADS_OUTERMOST
        return
    regions = find_regions(memory.kv_caches, memory.config)
    assert found.num == len(found.parts) <= num_groups
    assert found.num_needed.keys() == memory.kv_caches.keys()
    for name, cache in memory.kv_caches.items():
        assert max(groups_of(cache, found, regions)) == found.num_needed[name]
    for region in regions:
        region.zero_()
    for part in (part for parts in found.parts for part in parts):
        regions[part.region][:, part.start : part.stop] += 1
    assert all((region == 1).all() for region in regions)


@pytest.mark.parametrize("layout", ["LBHNC", "BLHNC"])
def test_groups_are_of_equal_size_and_have_whole_layers(layout: str) -> None:
    memory = make_kv_memory([group(full(), *"abcdefgh")], 5, KVCacheLayout[layout])
    assert find(memory).num_needed == dict(zip("abcdefgh", (1, 1, 2, 2, 3, 3, 4, 4), strict=True))


def test_pages_are_not_cut_into_small_parts() -> None:
    """Fewer groups where parts would be too small. Whole pages may be small."""
    page = full().page_size_bytes
    for least_part_bytes, num_groups in ((2 * page, 4), (2 * page + 1, 2), (4 * page + 1, 1)):
        for layout, expected in (("BLHNC", num_groups), ("LBHNC", 4)):
            memory = make_kv_memory([group(full(), *"abcdefgh")], 5, KVCacheLayout[layout])
            assert find(memory, least_part_bytes=least_part_bytes).num == expected


def test_kernels_with_smaller_blocks() -> None:
    """vLLM's views then have several rows for a block."""
    memory = make_kv_memory([ABCDEF], 5, KVCacheLayout.LBHNC)
    whole = find(memory)
    memory.kv_caches = {n: c.view(10, 2, 2, 6) for n, c in memory.kv_caches.items()}
    assert find(memory) == whole


def test_without_a_view_of_each_layer_there_is_one_group() -> None:
    memory = make_kv_memory([ABCDEF], 5, KVCacheLayout.LBHNC)
    regions = find_regions(memory.kv_caches, memory.config)
    raw = memory.kv_caches | {"c": memory.storage}
    assert LayerGroups.find(raw, regions, 1).num == 1
    elsewhere = memory.kv_caches | {"c": memory.kv_caches["c"].clone()}
    assert LayerGroups.find(elsewhere, regions, 1).num == 1
    assert LayerGroups.find({}, [], 1) == LayerGroups()
