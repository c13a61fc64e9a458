"""HostBackend: it copies exactly the requested rows."""

import weakref

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from simple_offload.backends.base import Direction
from simple_offload.backends.host import HostBackend
from tests.backends.sides import Sides


@given(
    pages=st.lists(st.integers(1, 40), max_size=3),
    direction=st.sampled_from(Direction),
    device=st.lists(st.integers(0, 6), unique=True),
    host=st.permutations(range(9)),
    gap=st.sampled_from([None, 0, 3]),
)
def test_exactly_the_asked_rows_move(
    pages: list[int], direction: Direction, device: list[int], host: list[int], gap: int | None
) -> None:
    sides = Sides(HostBackend(), pages, 7, num_host_blocks=9, gap=gap)
    sides.copy_and_check(direction, device, host[: len(device)])


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize(
    ("device", "host", "named"),
    [
        ([1, 4], [0, 1], "device blocks 1 to 4; there are 4"),
        ([10**9], [0], "device blocks 1000000000 to 1000000000; there are 4"),
        ([0, -1], [0, 1], "device blocks -1 to 0; there are 4"),
        ([0, 1], [6, 2], "host blocks 2 to 6; there are 6"),
        ([0, 1], [5, -6], "host blocks -6 to 5; there are 6"),
    ],
)
def test_a_block_outside_the_regions(
    direction: Direction, device: list[int], host: list[int], named: str
) -> None:
    """The copy fails before any byte moves. Every backend makes this check."""
    sides = Sides(HostBackend(), [16, 8], 4, num_host_blocks=6)
    before = sides.contents()
    with pytest.raises(IndexError, match=f"transfer 0 names {named}"):
        sides.copy(direction, device, host)
    sides.check(before)


def test_closing_frees_memory() -> None:
    backend = HostBackend()
    memory = [np.zeros((2, 16), dtype=np.int8) for _ in range(2)]
    backend.open([torch.from_numpy(memory[0])])
    backend.add_host_chunk([torch.from_numpy(memory[1])])
    held = [weakref.ref(array) for array in memory]
    memory.clear()
    assert all(ref() is not None for ref in held)
    backend.close()
    assert all(ref() is None for ref in held)
