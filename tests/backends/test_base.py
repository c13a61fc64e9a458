"""The check that every backend makes before it copies."""

import pytest

from simple_offload.backends.base import require_blocks_within
from simple_offload.metadata import Transfer


@pytest.mark.parametrize(
    ("device", "host"),
    [([], []), ([0], [0]), ([3, 0, 1], [0, 5, 2])],
)
def test_blocks_within(device: list[int], host: list[int]) -> None:
    require_blocks_within(Transfer.pairing(1, device, host), 4, 6)


@pytest.mark.parametrize(
    ("device", "host", "named"),
    [
        ([1, 4], [0, 1], "device blocks 1 to 4; there are 4"),
        ([0, -1], [0, 1], "device blocks -1 to 0; there are 4"),
        ([0, 1], [6, 2], "host blocks 2 to 6; there are 6"),
        ([0, 1], [5, -6], "host blocks -6 to 5; there are 6"),
    ],
)
def test_blocks_beyond(device: list[int], host: list[int], named: str) -> None:
    with pytest.raises(IndexError, match=f"transfer 7 names {named}"):
        require_blocks_within(Transfer.pairing(7, device, host), 4, 6)
