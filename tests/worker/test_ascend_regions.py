"""find_regions_by_address: for vllm-ascend's layouts, the regions have every byte of a block
once."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.kv_cache_layout import KVCacheLayout

from simple_offload.worker.ascend_regions import KVCache, find_regions_by_address
from tests.worker.kv_memory import full, group, make_kv_memory, window

UNOWNED = -1
Caches = dict[str, KVCache]


# Layouts. Each draws the layers of a number of blocks from a random source.


def allocate(draw: st.DataObject, size: int) -> torch.Tensor:
    """An int8 slice of ``size`` bytes in a larger allocation: vllm-ascend aligns addresses to 2
    MiB, here 64 bytes."""
    slack = draw.draw(st.sampled_from([0, 64]))
    memory = torch.zeros(size + slack, dtype=torch.int8)
    start = -memory.data_ptr() % 64 if slack else 0
    return memory[start : start + size]


def shaped(draw: st.DataObject, raw: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """``raw`` as blocks, or kernel blocks, of some type and shape."""
    page = raw.numel() // num_blocks
    dtype = draw.draw(st.sampled_from([torch.int8, torch.float16, torch.float32]))
    split = draw.draw(st.sampled_from([1, 2, 4]))
    return raw.view(dtype).view(num_blocks * split, 2, page // dtype.itemsize // split // 2)


def page_bytes(draw: st.DataObject) -> int:
    """Divisible by every item, split and inner dimension above."""
    return 32 * draw.draw(st.integers(1, 3))


def separate(draw: st.DataObject, num_blocks: int) -> Caches:
    """Keys and values, MLA's two tensors, or one tensor alone: each in its own allocation."""
    tensors = [
        shaped(draw, allocate(draw, num_blocks * page_bytes(draw)), num_blocks)
        for _ in range(draw.draw(st.integers(1, 3)))
    ]
    return {"separate": tuple(tensors)}


def alone(draw: st.DataObject, num_blocks: int) -> Caches:
    """A tensor outside any tuple, which two layers share."""
    cache = shaped(draw, allocate(draw, num_blocks * page_bytes(draw)), num_blocks)
    return {"alone": cache, "shares it": cache}


def carved(draw: st.DataObject, num_blocks: int) -> Caches:
    """Mamba's states, or an indexer's keys and scales, consecutive in one allocation."""
    pages = [page_bytes(draw) for _ in range(draw.draw(st.integers(2, 3)))]
    raw = allocate(draw, num_blocks * sum(pages))
    sizes = [num_blocks * page for page in pages]
    return {"carved": [shaped(draw, part, num_blocks) for part in raw.split(sizes)]}


def hybrid(draw: st.DataObject, num_blocks: int) -> Caches:
    """An attention layer and a Mamba layer in one allocation. First come the convolution's states.
    Keys come next, over the other states, and then values."""
    conv, key, value = (page_bytes(draw) for _ in range(3))
    raw = allocate(draw, num_blocks * (conv + key + value))
    tensors = raw.split([num_blocks * page for page in (conv, key, value)])
    first, second, third = (shaped(draw, tensor, num_blocks) for tensor in tensors)
    return {"mamba": [first, second], "attention": (shaped(draw, tensors[1], num_blocks), third)}


def interleaved(draw: st.DataObject, num_blocks: int) -> Caches:
    """Blocks of several layers, interleaved: after all layers' blocks come all layers' next blocks.
    The bytes between them are unowned."""
    pages = [page_bytes(draw) for _ in range(draw.draw(st.integers(1, 3)))]
    gap = draw.draw(st.sampled_from([0, 32]))
    block = sum(pages) + gap
    raw = allocate(draw, num_blocks * block).view(num_blocks, block)
    in_front = draw.draw(st.sampled_from([0, gap]))
    layers = raw[:, in_front : in_front + sum(pages)].split(pages, dim=1)
    return {f"interleaved {i}": layer for i, layer in enumerate(layers)}


def heads_outermost(draw: st.DataObject, num_blocks: int) -> Caches:
    """All blocks of a head, then those of the next head."""
    num_heads, page = draw.draw(st.integers(1, 3)), page_bytes(draw)
    raw = allocate(draw, num_heads * num_blocks * page)
    return {"heads": raw.view(num_heads, num_blocks, page).transpose(0, 1)}


LAYOUTS: list[Callable[[st.DataObject, int], Caches]] = [
    separate,
    alone,
    carved,
    hybrid,
    interleaved,
    heads_outermost,
]


# The owner of every byte, by the views


def tensors_of(cache: KVCache) -> list[torch.Tensor]:
    if isinstance(cache, torch.Tensor):
        return [cache]
    return [tensor for part in cache for tensor in tensors_of(part)]


def owners_of(caches: Caches, num_blocks: int) -> dict[int, int]:
    """By address, the block that owns a byte, element by element."""
    owners: dict[int, int] = {}
    for cache in caches.values():
        for tensor in tensors_of(cache):
            count = math.prod(tensor.shape)
            where = np.unravel_index(np.arange(count), tuple(tensor.shape))
            offsets = sum(
                index * stride for index, stride in zip(where, tensor.stride(), strict=True)
            )
            blocks = where[0] // (tensor.shape[0] // num_blocks)
            for offset, block in zip(np.asarray(offsets).tolist(), blocks.tolist(), strict=True):
                address = tensor.data_ptr() + offset * tensor.element_size()
                for byte in range(address, address + tensor.element_size()):
                    assert owners.setdefault(byte, block) == block
    return owners


def check(caches: Caches, num_blocks: int) -> list[torch.Tensor]:
    """The regions of ``caches``. Fails unless every byte of a block lies once in the row of its
    block. No row may have a byte of another block."""
    owners = owners_of(caches, num_blocks)
    found: dict[int, int] = {}
    regions = find_regions_by_address(caches, num_blocks)
    for region in regions:
        assert region.dtype == torch.int8
        assert region.shape[0] == num_blocks
        assert region.is_contiguous()
        for block in range(num_blocks):
            row = region[block]
            for byte in range(row.data_ptr(), row.data_ptr() + row.numel()):
                assert byte not in found
                found[byte] = block
                assert owners.get(byte, block) == block
    assert owners.keys() <= found.keys()
    assert all(found[byte] == block for byte, block in owners.items())
    return regions


@given(st.data(), st.integers(1, 4), st.lists(st.sampled_from(LAYOUTS), max_size=4))
def test_any_layers(
    draw: st.DataObject, num_blocks: int, layouts: list[Callable[[st.DataObject, int], Caches]]
) -> None:
    caches: Caches = {}
    for number, layout in enumerate(layouts):
        made = layout(draw, num_blocks)
        caches |= {f"{number} {name}": cache for name, cache in made.items()}
    check(caches, num_blocks)


@pytest.mark.parametrize("layout", list(KVCacheLayout), ids=lambda layout: layout.name)
def test_views_of_vllm(layout: KVCacheLayout) -> None:
    """It works without vLLM's placements."""
    memory = make_kv_memory([group(full(), "a", "b"), group(window(), "c", "d")], 5, layout)
    check(dict(memory.kv_caches), 5)


# Number of regions: each costs a descriptor for every run of blocks


def test_tensors_one_by_one_are_regions() -> None:
    key, value = torch.zeros((6, 4, 8)), torch.zeros((6, 4, 2))
    regions = check({"a": (key, value)}, 6)
    assert sorted(region.shape[1] for region in regions) == [32, 128]


def test_keys_over_states_are_one_region() -> None:
    raw = torch.zeros(6 * (8 + 16 + 16), dtype=torch.int8)
    conv, key, value = raw.split([6 * 8, 6 * 16, 6 * 16])
    mamba = [conv.view(6, 8), key.view(torch.float32).view(6, 4)]
    regions = check({"mamba": mamba, "attention": (key.view(12, 8), value.view(12, 8))}, 6)
    assert sorted(region.shape[1] for region in regions) == [8, 16, 16]


def test_interleaved_layers_are_one_region() -> None:
    raw = torch.zeros((6, 40), dtype=torch.int8)
    regions = check({"a": (raw[:, 4:20], raw[:, 20:28]), "b": raw[:, 30:40]}, 6)
    assert [region.shape[1] for region in regions] == [40]


def test_a_layer_without_memory() -> None:
    assert check({"a": (torch.zeros((0, 8)),), "b": ()}, 6) == []


# Refused layouts


def test_blocks_that_do_not_divide() -> None:
    with pytest.raises(ValueError, match=r"layer: .*\(7, 8\) does not divide into 6 blocks"):
        find_regions_by_address({"layer": torch.zeros((7, 8))}, 6)


def test_a_buffer_that_has_no_blocks() -> None:
    """Some of vLLM's layers register such a buffer. Only its placement locates the blocks."""
    with pytest.raises(ValueError, match=r"layer: .*one dimension"):
        find_regions_by_address({"layer": torch.zeros(60)}, 6)
    check({"a number a block": torch.zeros(6)}, 6)


def test_blocks_within_one_another() -> None:
    memory = torch.zeros(100)
    with pytest.raises(ValueError, match="lie within one another"):
        find_regions_by_address({"layer": memory.as_strided((6, 8), (4, 1))}, 6)


@pytest.mark.parametrize(
    ("start", "page"),
    [
        (0, 12),  # another page over the same bytes
        (4, 16),  # the same page, not where the other's begins
        (16, 16),  # block 0 over the other's block 1
    ],
)
def test_bytes_of_several_blocks(start: int, page: int) -> None:
    raw = torch.zeros(200, dtype=torch.int8)
    caches = {
        "a": raw[: 6 * 16].view(6, 16),
        "b": raw[start : start + 6 * page].view(6, page),
    }
    with pytest.raises(ValueError, match=r"a and b: the same bytes .* several blocks"):
        find_regions_by_address(caches, 6)


def test_pages_that_leave_their_allocation() -> None:
    """Between their blocks lie bytes that are missing in front of the first or behind the last."""
    memory = torch.zeros(5 * 16 + 8, dtype=torch.int8)
    with pytest.raises(ValueError, match="leave their allocation"):
        find_regions_by_address({"a": memory.as_strided((6, 8), (16, 1))}, 6)
    spaced = torch.zeros(6 * 16, dtype=torch.int8).view(6, 16)
    check({"in front": spaced[:, 8:]}, 6)
    check({"behind": spaced[:, :8]}, 6)
