"""CopyBackend: the one seam between transfers and devices."""

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
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
        # Read as unsigned, a negative one is too large: one pass instead of two.
        if len(blocks) and blocks.view(np.uint64).max() >= count:
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

    def remaining_seconds(self) -> float:
        """How long what is left of it should take once the device gets to it, going by measured
        bandwidth. Infinite where the compute stream cannot be made to wait for it."""

    def hold_compute(self) -> None:
        """Let whatever is queued on the compute stream from now on wait for this copy. The
        caller, on the engine's thread, does not wait."""


class Measurement(NamedTuple):
    """Duration and size of a copy, as the device measured them."""

    seconds: float | None
    """None where the device measures no time."""
    num_bytes: Mapping[str, int]
    """By copy path ("dma", "kernel", ...)."""


@runtime_checkable
class Measured(Protocol):
    """Optional protocol of a Pending whose device measures copies."""

    def measure(self) -> Measurement:
        """The measurement. Called once ``done`` is true."""


class Barrier(Protocol):
    """A point in the device's compute stream that a copy has to come after."""


@runtime_checkable
class QuickToSubmit(Protocol):
    """What a CopyBackend may be as well."""

    def is_quick(self, direction: Direction, transfer: Transfer) -> bool:
        """Whether somebody waits for such a copy, and to submit it takes its thread so little
        time that the engine's had better do it itself than hand it over. Called on the engine's
        thread, for blocks of any number."""

    def copy_quickly(
        self, direction: Direction, transfer: Transfer, barrier: Barrier | None
    ) -> Pending | None:
        """``copy``, on the engine's thread, of what is quick, while no other copy of
        ``direction`` is under way: as far as possible without giving up Python's interpreter
        lock, which another thread may then keep for longer than the copy takes."""


class CopyBackend(Protocol):
    """Copies blocks between regions of the device and of the host.

    A region is an int8 tensor ``[num_blocks, page_bytes]`` with dense rows; row b of every
    region together is block b, and region i has the same ``page_bytes`` on both sides. The
    host's blocks come in chunks, each with rows of its own for every region: all chunks but
    the last have the same number of blocks.
    """

    chunk_bytes: int
    """How much host memory to provide at a time."""

    def allocate_host(self, num_bytes: int) -> torch.Tensor:
        """Host memory of exactly that size, int8 ``[num_bytes]``, which the device can reach.
        May take seconds; called on any thread, one at a time. Raises MemoryShortageError where
        there may be enough later."""

    def open(self, device: Sequence[torch.Tensor]) -> None:
        """Take the device's regions. Called once, on the engine's thread, before any copy."""

    def add_host_chunk(self, regions: Sequence[torch.Tensor]) -> None:
        """Take the regions of the next chunk of host blocks. Called by the thread that
        allocated them, while copies of earlier chunks may be under way."""

    def barrier(self) -> Barrier | None:
        """What the compute stream holds now. Called on the engine's thread; None when compute
        has always ended by then."""

    def enter_thread(self, direction: Direction) -> None:
        """Prepare the calling thread, which will make copies of ``direction``."""

    def copy(
        self, direction: Direction, transfer: Transfer, barrier: Barrier | None
    ) -> Pending | None:
        """Start to copy the blocks of ``transfer`` once ``barrier`` (None: nothing) has been
        passed, on a thread that has entered for ``direction``, or on the engine's. Copies of a
        direction are submitted by one thread at a time and run one after another. Returns None
        when the copy has already ended. Any exception is a failed transfer."""

    def close(self) -> None:
        """Give up streams and host memory. No copy is under way."""
