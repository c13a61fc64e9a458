"""CopyBackend: the one seam between transfers and devices."""

from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import NamedTuple, Protocol, Self, TypeVar, runtime_checkable

import numpy as np
import torch

from simple_offload.transfer import Transfer

_Side = TypeVar("_Side")


class Direction(Enum):
    """Which way the bytes of a transfer go."""

    LOAD = "load"
    """Host to device."""
    STORE = "store"
    """Device to host."""

    def sides(self, device: _Side, host: _Side) -> tuple[_Side, _Side]:
        """Source and destination."""
        return (host, device) if self is Direction.LOAD else (device, host)


def require_blocks_within(transfer: Transfer, num_device_blocks: int, num_host_blocks: int) -> None:
    """Raise IndexError, before any byte moves, if ``transfer`` names a block that does not exist: a
    copy would run into whatever memory lies beyond (vllm#52921)."""
    for side, blocks, count in (
        ("device", transfer.device_blocks, num_device_blocks),
        ("host", transfer.host_blocks, num_host_blocks),
    ):
        # As unsigned numbers, negative ones are too large: one pass instead of two.
        if len(blocks) and blocks.view(np.uint64).max() >= count:
            raise IndexError(
                f"transfer {transfer.id} names {side} blocks {blocks.min()} to {blocks.max()}; "
                f"there are {count}"
            )


class Measurement(NamedTuple):
    """Duration and size of a copy, as the device measured them."""

    seconds: float | None
    """None where the device measures no time."""
    num_bytes: Mapping[str, int]
    """By copy path ("dma", "kernel", ...)."""


class Pending(Protocol):
    """A copy that the device has accepted."""

    def done(self) -> bool:
        """Whether the copy has ended. Never waits. Raises the error if it failed."""

    def wait(self) -> None:
        """Return when the copy has ended. Raises the error if it failed."""

    def remaining_seconds(self) -> float:
        """Expected time for the rest of the copy, by measured bandwidth, not counting earlier
        copies. Infinite where the compute stream cannot wait for it."""

    def hold_compute(self) -> None:
        """Make the compute stream wait for this copy before anything queued from now on. The
        caller, on the engine's thread, does not wait."""

    def measure(self) -> Measurement:
        """Its duration and size. Called once ``done`` is true."""


class PendingGroup(Pending, Protocol):
    """The copy of a layer group."""

    seconds: float
    """Expected time of the whole group, by measured bandwidth."""


class Barrier(Protocol):
    """A point in the device's compute stream; a copy with this barrier begins after it."""


@runtime_checkable
class QuickToSubmit(Protocol):
    """Optional protocol of a CopyBackend some of whose copies are quick to submit."""

    def is_quick(self, direction: Direction, transfer: Transfer) -> bool:
        """True if a request waits for this copy and submitting it is quicker than waking the copy
        thread. Called on the engine's thread, also for blocks that do not exist."""

    def copy_quickly(
        self, direction: Direction, transfer: Transfer, barrier: Barrier | None
    ) -> Pending | None:
        """``copy`` for a quick transfer, on the engine's thread, while no other copy of
        ``direction`` is under way. As far as possible it keeps Python's interpreter lock, which
        another thread might hold for longer than the copy takes."""


@runtime_checkable
class SharesMemory(Protocol):
    """Optional protocol of a CopyBackend whose device can reach host memory that other processes
    use too."""

    numa_node: int | None
    """The node of the device; None if that is unknown, or there is one node only."""

    def use_shared(self, memory: torch.Tensor, *, is_first: bool) -> None:
        """As ``allocate_host``, for given memory, int8 ``[num_bytes]``. ``is_first``: put its pages
        in place. Otherwise another process has."""


class PagePart(NamedTuple):
    """Bytes ``start`` to ``stop`` of every page of a region."""

    region: int
    start: int
    stop: int


class ComputeMark(Protocol):
    """A point in the device's compute stream."""

    def seconds_since(self, earlier: Self) -> float | None:
        """Time between both points; None until the stream has passed this one. Never waits."""


@runtime_checkable
class CopiesByLayer(Protocol):
    """Optional protocol of a CopyBackend whose compute stream may begin with a load's first layers
    while the others are on their way."""

    least_part_bytes: int
    """Size of the smallest part of a page, which becomes a descriptor, that is worth a copy of its
    own."""

    def divide(self, groups: Sequence[Sequence[PagePart]]) -> None:
        """Note the layer groups, in the order of their copies. All together are all bytes of all
        pages. Called once, before ``open``."""

    def copy_by_layer(
        self, transfer: Transfer, barrier: Barrier | None, *, quickly: bool
    ) -> Iterator[PendingGroup]:
        """As ``copy`` of a load, or as ``copy_quickly``. Yields each layer group's copy when the
        device has accepted it: its compute may begin before the last group is accepted."""

    def mark_compute(self) -> ComputeMark:
        """A mark behind the compute queued so far. Called on the engine's thread."""


class CopyBackend(Protocol):
    """Copies blocks between regions of the device and of the host.

    A region is an int8 tensor ``[num_blocks, page_bytes]``. Row b of every region together is
    block b, and region i has the same ``page_bytes`` on both sides. The bytes of a row are
    contiguous. Rows do not overlap; there may be room between them, which no copy reads or writes.

    The host's blocks come in chunks; each chunk has rows for every region, and a region has the
    same strides in all chunks. All chunks but the last have the same number of blocks.
    """

    chunk_bytes: int
    """Size of a chunk of host memory."""
    pins_memory: bool
    """Whether a driver pins host memory. Launches wait meanwhile."""

    def allocate_host(self, num_bytes: int) -> torch.Tensor:
        """Host memory that the device can reach, int8 ``[num_bytes]``. May take seconds. Called
        on any thread, but one call at a time. Raises MemoryShortageError where there may be enough
        memory later."""

    def open(self, device: Sequence[torch.Tensor]) -> None:
        """Set the device's regions. Called once, on the engine's thread, before any copy."""

    def add_host_chunk(self, regions: Sequence[torch.Tensor]) -> None:
        """Add the regions of the next chunk of host blocks. Called on the thread that allocated
        them, while copies of earlier chunks may be under way."""

    def barrier(self) -> Barrier | None:
        """A barrier behind the compute queued so far; None where that has always ended by now.
        Called on the engine's thread."""

    def enter_thread(self, direction: Direction) -> None:
        """Prepare the calling thread for copies of ``direction``."""

    def copy(
        self, direction: Direction, transfer: Transfer, barrier: Barrier | None
    ) -> Pending | None:
        """Submit the copy of ``transfer``'s blocks, to begin after ``barrier`` if there is one.
        Returns None if the copy has already ended. Any exception is a failed transfer: none of its
        bytes moves any more.

        Called on a thread that has entered for ``direction``, or on the engine's; one call at a
        time per direction. Copies of a direction run one after another."""

    def close(self) -> None:
        """Release streams and host memory, when no copy is under way any more. The caller may not
        know of the last ones: a signal can interrupt it at any line."""
