"""Copy descriptors."""

import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from simple_offload.backends.plan import Regions, plan_copies

_PAGES = (8, 24)
_NUM_BLOCKS = 40


def regions_at(*bases: int) -> Regions:
    return Regions(np.array(bases, np.uint64), np.array(_PAGES, np.uint64))


@given(
    st.lists(st.integers(0, _NUM_BLOCKS - 1), unique=True, max_size=_NUM_BLOCKS),
    st.randoms(use_true_random=False),
)
def test_every_byte_of_every_pair_and_no_other(sources: list[int], rng: random.Random) -> None:
    destinations = list(range(_NUM_BLOCKS))
    rng.shuffle(destinations)
    pairs = dict(zip(destinations, sources, strict=False))
    plan = plan_copies(
        regions_at(1_000, 50_000),
        regions_at(100_000, 200_000),
        np.array(list(pairs.values()), np.int64),
        np.array(list(pairs), np.int64),
    )
    copied = {}
    for destination, source, size in zip(*(part.tolist() for part in plan), strict=True):
        for offset in range(size):
            assert destination + offset not in copied
            copied[destination + offset] = source + offset
    expected = {}
    for (source_base, destination_base), page in zip(
        ((1_000, 100_000), (50_000, 200_000)), _PAGES, strict=True
    ):
        for destination, source in pairs.items():
            for offset in range(page):
                expected[destination_base + destination * page + offset] = (
                    source_base + source * page + offset
                )
    assert copied == expected


def test_neighbours_on_both_sides_become_one() -> None:
    plan = plan_copies(
        regions_at(0, 1_000),
        regions_at(0, 1_000),
        np.array([5, 6, 7, 9, 10, 3]),
        np.array([1, 2, 3, 4, 9, 20]),
    )
    assert plan.sizes.tolist() == [8, 24, 8, 8, 24, 72, 24, 24]


def test_nothing_to_copy() -> None:
    nothing = np.array([], np.int64)
    assert len(plan_copies(regions_at(0, 1), regions_at(0, 1), nothing, nothing).sizes) == 0


def test_regions_know_addresses_and_pages() -> None:
    tensor = torch.zeros((3, 16), dtype=torch.int8)
    regions = Regions.of([tensor])
    assert regions.bases.tolist() == [tensor.data_ptr()]
    assert regions.pages.tolist() == [16]


def test_a_region_with_gaps_is_refused() -> None:
    with pytest.raises(ValueError, match="not dense"):
        Regions.of([torch.zeros((3, 16), dtype=torch.int8)[:, :8]])
