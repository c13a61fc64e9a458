"""find_regions_by_address: for vllm-ascend's layouts, the regions have every byte of a block
once."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from simple_offload.worker.ascend_regions import KVCache, find_regions_by_address
from tests.worker.kv_memory import check_regions

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
    """Keys and values, MLA's two tensors, or one tensor alone: each in its own allocation. Another
    layer shares one of them, outside any tuple."""
    tensors = [
        shaped(draw, allocate(draw, num_blocks * page_bytes(draw)), num_blocks)
        for _ in range(draw.draw(st.integers(1, 3)))
    ]
    return {"separate": tuple(tensors), "shares it": tensors[0]}


def hybrid(draw: st.DataObject, num_blocks: int) -> Caches:
    """An attention layer and a Mamba layer, in consecutive parts of one allocation. First come the
    convolution's states. Keys come next, over the other states, and then values."""
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
    hybrid,
    interleaved,
    heads_outermost,
]


def check(caches: Caches, num_blocks: int) -> list[int]:
    """The sizes of the pages of the regions of ``caches``, sorted."""
    regions = find_regions_by_address(caches, num_blocks)
    check_regions(regions, caches.values(), num_blocks)
    return sorted(region.shape[1] for region in regions)


@given(st.data(), st.integers(1, 4), st.lists(st.sampled_from(LAYOUTS), max_size=4))
def test_any_layers(
    draw: st.DataObject, num_blocks: int, layouts: list[Callable[[st.DataObject, int], Caches]]
) -> None:
    caches: Caches = {}
    for number, layout in enumerate(layouts):
        made = layout(draw, num_blocks)
        caches |= {f"{number} {name}": cache for name, cache in made.items()}
    check(caches, num_blocks)


# Number of regions: each costs a descriptor for every run of blocks


RAW = torch.zeros(256, dtype=torch.int8)
CONV, KEY, VALUE = RAW[:240].split([6 * 8, 6 * 16, 6 * 16])
ROWS = RAW[:240].view(6, 40)
SPACED = torch.zeros((6, 16), dtype=torch.int8)


@pytest.mark.parametrize(
    ("caches", "pages"),
    [
        ({"a": (torch.zeros((6, 4, 8)), torch.zeros((6, 4, 2)))}, [32, 128]),
        (
            {
                "mamba": [CONV.view(6, 8), KEY.view(torch.float32).view(6, 4)],
                "attention": (KEY.view(12, 8), VALUE.view(12, 8)),
            },
            [8, 16, 16],
        ),
        ({"a": (ROWS[:, 4:20], ROWS[:, 20:28]), "b": ROWS[:, 30:40]}, [40]),
        ({"a": (torch.zeros((0, 8)),), "b": ()}, []),
        ({"a number a block": torch.zeros(6)}, [4]),
        # Bytes between blocks belong to pages. The first or the last block may lack them.
        ({"in front": SPACED[:, 8:]}, [16]),
        ({"behind": SPACED[:, :8]}, [16]),
    ],
    ids=["separate", "keys over states", "interleaved", "none", "numbers", "in front", "behind"],
)
def test_page_sizes_of_the_regions(caches: Caches, pages: list[int]) -> None:
    assert check(caches, 6) == pages


REFUSED = {
    "blocks that do not divide": (
        {"a": torch.zeros((7, 8))},
        r"a: .*\(7, 8\) does not divide into 6 blocks",
    ),
    # Some of vLLM's layers register such a buffer. Only its placement locates the blocks.
    "a buffer without blocks": ({"a": torch.zeros(60)}, "a: .*one dimension"),
    "blocks within one another": ({"a": RAW.as_strided((6, 8), (4, 1))}, "lie within one another"),
    "another page over the same bytes": (
        {"a": RAW[: 6 * 16].view(6, 16), "b": RAW[: 6 * 12].view(6, 12)},
        "a and b: the same bytes .* several blocks",
    ),
    "block 0 over block 1": (
        {"a": RAW[: 6 * 16].view(6, 16), "b": RAW[16 : 16 + 6 * 16].view(6, 16)},
        "a and b: the same bytes .* several blocks",
    ),
    "bytes missing in front of the first and behind the last": (
        {"a": torch.zeros(5 * 16 + 8, dtype=torch.int8).as_strided((6, 8), (16, 1))},
        "leave their allocation",
    ),
}


@pytest.mark.parametrize(("caches", "message"), REFUSED.values(), ids=REFUSED)
def test_refused_layouts(caches: Caches, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        find_regions_by_address(caches, 6)
