"""CopyBackend: the one seam between transfers and devices."""

from collections.abc import Sequence
from enum import Enum
from typing import Protocol

import torch

from simple_offload.metadata import Transfer


class Direction(Enum):
    """Which way the bytes of a transfer go."""

    LOAD = "load"
    """Host to device."""
    STORE = "store"
    """Device to host."""


def require_blocks_within(transfer: Transfer, num_device_blocks: int, num_host_blocks: int) -> None:
    """Raise IndexError, before any byte moves, when ``transfer`` names a block that is not
    there: a copy would run into whatever memory lies beyond (vllm#52921)."""
    for side, blocks, count in (
        ("device", transfer.device_blocks, num_device_blocks),
        ("host", transfer.host_blocks, num_host_blocks),
    ):
        if len(blocks) and not 0 <= blocks.min() <= blocks.max() < count:
            raise IndexError(
                f"transfer {transfer.id} names {side} blocks {blocks.min()} to {blocks.max()}; "
                f"there are {count}"
            )


class Pending(Protocol):
    """A copy that has been handed to the device."""

    def done(self) -> bool:
        """Whether it has ended; never waits. Raises what made it fail."""

    def wait(self) -> None:
        """Return when it has ended. Raises what made it fail."""


class Barrier(Protocol):
    """A point in the device's compute stream that a copy has to come after."""


class CopyBackend(Protocol):
    """Copies blocks between two equally shaped lists of regions.

    A region is an int8 tensor ``[num_blocks, page_bytes]`` whose rows are dense and whose row
    stride is anything; region i of the device and region i of the host have the same
    ``page_bytes``. Row b of every region together is block b.
    """

    def allocate_host(self, num_blocks: int, page_bytes: int) -> torch.Tensor:
        """Host memory for one region, ``[num_blocks, page_bytes]`` int8, of exactly that size."""

    def open(self, device: Sequence[torch.Tensor], host: Sequence[torch.Tensor]) -> None:
        """Take the regions to copy between. Called once, before any copy."""

    def barrier(self) -> Barrier | None:
        """What the compute stream holds now. Called on the engine's thread; None when compute
        has ended already whenever this is called."""

    def enter_thread(self, direction: Direction) -> None:
        """Prepare the calling thread, which will make all copies of ``direction``."""

    def copy(
        self, direction: Direction, transfer: Transfer, barrier: Barrier | None
    ) -> Pending | None:
        """Start to copy the blocks of ``transfer`` once ``barrier`` has been passed, on a thread
        that has entered for ``direction``. Returns None when the copy has already ended.
        Any exception is a failed transfer."""

    def close(self) -> None:
        """Give up streams and host memory. No copy is under way."""
