"""Descriptors copy every byte of every pair of blocks once, with neighbours merged."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from simple_offload.backends.descriptors import (
    Descriptors,
    Regions,
    find_extents,
    in_pieces,
    plan_copies,
)
from simple_offload.transfer import BlockIds
from tests.backends.sides import in_chunks, make_regions

_PAGES = (8, 24)
_NUM_BLOCKS = 40
Pairs = list[tuple[int, int]]
"""Source and destination blocks."""


class Side:
    """Memory without gaps, chunk after chunk and, in each, region after region. A descriptor that
    wrongly continues into the next chunk would therefore reach the right bytes.

    ``gap``: as for ``make_regions``.
    """

    def __init__(self, chunk_blocks: int, gap: int | None) -> None:
        self.chunk_blocks, self.is_dense = chunk_blocks, gap is None
        self.where: dict[tuple[int, int], int] = {}
        """By region and block, the address of the page."""
        rest = torch.zeros(_NUM_BLOCKS * (sum(_PAGES) + 2 * (gap or 0)), dtype=torch.int8)

        def allocate(num_bytes: int) -> torch.Tensor:
            nonlocal rest
            memory, rest = rest[:num_bytes], rest[num_bytes:]
            return memory

        chunks = []
        for first in range(0, _NUM_BLOCKS, chunk_blocks):
            count = min(chunk_blocks, _NUM_BLOCKS - first)
            chunks.append(make_regions(allocate, count, _PAGES, gap)[0])
            for region, pages in enumerate(chunks[-1]):
                for block, page in enumerate(pages, first):
                    self.where[region, block] = page.data_ptr()
        self.regions = in_chunks(chunks)

    def chunk_of(self, block: int) -> int:
        return block // self.chunk_blocks


def rows(plan: Descriptors) -> list[tuple[int, int, int]]:
    """The descriptors as tuples of destination, source and bytes."""
    return list(zip(*(part.tolist() for part in plan), strict=True))


def columns(pairs: Pairs) -> tuple[BlockIds, BlockIds]:
    sources, destinations = np.array(pairs, np.int64).reshape(-1, 2).T.copy()
    return sources, destinations


@st.composite
def drawn_pairs(draw: st.DrawFn) -> Pairs:
    """Many neighbours, upwards, downwards or mixed; no block twice on a side."""
    sources = draw(st.lists(st.integers(0, _NUM_BLOCKS - 1), unique=True, max_size=_NUM_BLOCKS))
    order = draw(st.sampled_from(["up", "down", "mixed"]))
    if order != "mixed":
        sources.sort(reverse=order == "down")
    shift, num_swaps = draw(st.integers(0, _NUM_BLOCKS)), draw(st.integers(0, 3))
    destinations = [(block + shift) % _NUM_BLOCKS for block in sources]
    for index in range(min(num_swaps, len(destinations) - 1)):
        destinations[index], destinations[-1] = destinations[-1], destinations[index]
    return list(zip(sources, destinations, strict=True))


def joins(before: tuple[int, int], after: tuple[int, int], sides: tuple[Side, Side]) -> bool:
    """Whether one descriptor copies both pairs. Two chunks may be neighbours in memory, but each is
    pinned separately."""
    steps = [now - then for then, now in zip(before, after, strict=True)]
    return steps in ([1, 1], [-1, -1]) and all(
        side.is_dense and side.chunk_of(now) == side.chunk_of(then)
        for side, then, now in zip(sides, before, after, strict=True)
    )


@given(
    st.tuples(*[st.integers(1, _NUM_BLOCKS + 3)] * 2),
    st.tuples(*[st.sampled_from([None, None, 0, 5])] * 2),
    drawn_pairs(),
)
def test_every_byte_of_every_pair_once_with_neighbours_merged(
    chunk_blocks: tuple[int, int], gaps: tuple[int | None, int | None], pairs: Pairs
) -> None:
    source, destination = map(Side, chunk_blocks, gaps)
    assert source.regions.num_blocks == destination.regions.num_blocks == _NUM_BLOCKS
    plan = plan_copies(source.regions, destination.regions, *columns(pairs))
    assert copied_bytes(plan) == sorted(
        (destination.where[region, to] + offset, source.where[region, of] + offset)
        for region, page in enumerate(_PAGES)
        for of, to in pairs
        for offset in range(page)
    )
    num_joins = sum(joins(*both, (source, destination)) for both in pairwise(pairs))
    assert len(plan.sizes) == len(_PAGES) * (len(pairs) - num_joins)
    # The kernel takes pairs, of some extents or of all.
    extents = find_extents(source.regions, destination.regions, *columns(pairs))
    chosen = np.arange(len(extents.lengths)) % 2 == 0
    for parts in ([extents], [extents.select(chosen), extents.select(~chosen)]):
        found = [pair for part in parts for pair in zip(*part.pairs(), strict=True)]
        assert sorted(found) == sorted(pairs)


@given(st.lists(st.integers(1, 50), max_size=20), st.integers(1, 60))
def test_descriptors_that_are_split_copy_the_same(sizes: list[int], num_bytes: int) -> None:
    plan = Descriptors(*(np.array(sizes, np.uint64) + np.uint64(i) for i in (1000, 2000, 0)))
    split = plan.split(num_bytes)
    assert max([0, *split.sizes.tolist()]) <= num_bytes
    assert len(split.sizes) == sum(-(-size // num_bytes) for size in sizes)
    assert copied_bytes(split) == copied_bytes(plan)


def copied_bytes(plan: Descriptors) -> list[tuple[int, int]]:
    """Destination address of each byte, and its source."""
    return sorted(
        (destination + offset, source + offset)
        for destination, source, size in rows(plan)
        for offset in range(size)
    )


@given(st.lists(st.integers(1, 50), max_size=60), st.integers(1, 200), st.integers(1, 70))
def test_pieces_are_no_larger_than_need_be(
    sizes: list[int], num_bytes: int, num_descriptors: int
) -> None:
    plan = Descriptors(*(np.array(sizes, np.uint64) + np.uint64(i) for i in (1000, 2000, 0)))
    pieces = list(in_pieces(plan, num_bytes, num_descriptors))
    assert [row for piece in pieces for row in rows(piece)] == rows(plan)
    for piece in pieces:
        assert piece.sizes[:-1].sum() < num_bytes
        assert len(piece.sizes) <= num_descriptors
        assert all(part.flags.c_contiguous for part in piece)
    for piece in pieces[:-1]:
        assert piece.sizes.sum() >= num_bytes or len(piece.sizes) == num_descriptors


# Where regions lie


def test_no_regions() -> None:
    regions = Regions.from_tensors([])
    assert (regions.num_blocks, len(regions.pages)) == (0, 0)
    nothing = np.array([], np.int64)
    assert rows(plan_copies(regions, regions, nothing, nothing)) == []


MEMORY = torch.zeros((3, 32), dtype=torch.int8)


def tensors(num_blocks: int, page: int) -> list[torch.Tensor]:
    return [torch.zeros((num_blocks, page), dtype=torch.int8)]


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        *(
            ([tensors(length, 16) for length in lengths], "only the last may be smaller")
            for lengths in ((3, 2, 3), (2, 3), (3, 3, 4))
        ),
        ([[MEMORY[:, ::2]]], r"strides \(32, 2\), not \(32, 1\)"),
        ([[MEMORY.as_strided((3, 16), (15, 1))]], r"strides \(15, 1\), not \(16, 1\)"),
        ([[MEMORY[:, :16]], tensors(3, 16)], r"strides \(16, 1\), not \(32, 1\)"),
        ([tensors(3, 16), [MEMORY[:, :16]]], r"strides \(32, 1\), not \(16, 1\)"),
    ],
)
def test_refused_chunks(chunks: list[list[torch.Tensor]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        in_chunks(chunks)
