"""CudaQueues: the streams that copies go to, what is put on them, and how far they have come."""

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from simple_offload.backends.base import Barrier, Direction, Measurement
from simple_offload.backends.cuda.dma import SubmitDma, largest_first, resolve_dma
from simple_offload.backends.descriptors import (
    Descriptors,
    Extents,
    Regions,
    describe,
    group_by_size,
    in_pieces,
)

if TYPE_CHECKING:
    from simple_offload.backends.cuda.kernel import KernelRegions

_KERNEL_PROGRAMS = 8
"""SMs that the kernel runs on: more are no faster on an H200 (docs/measurements.md)."""
_PIECE_BYTES = 64 << 20
"""A piece, queued by one call, has at most about this size."""
CALL_DESCRIPTORS = 256
"""Descriptors in one call to the driver, at most: the device begins once it has taken them all."""
_YIELD_BYTES = {Direction.LOAD: _PIECE_BYTES, Direction.STORE: 16 << 20}
"""After this many bytes a copy continues on the other stream of its direction. Copies of one
direction may share an engine, which stays with a stream as long as that has a copy ready. Without
the change of streams, a step's sampled tokens reach vLLM only after all stores (19 ms for 1 GiB
instead of 0.3), and on an H100 a step's inputs came behind a whole load (docs/measurements.md)."""


@dataclass(frozen=True, eq=False)
class RegionClass:
    """Regions whose pages are of similar size, on both sides."""

    device: Regions
    host: Regions
    kernel: "dict[Direction, KernelRegions]"
    """Empty where there is no kernel."""

    @cached_property
    def page(self) -> int:
        """Bytes of the largest page."""
        return int(self.device.pages.max())

    def sides(self, direction: Direction) -> tuple[Regions, Regions]:
        """Source and destination."""
        return direction.sides(self.device, self.host)


def classify_regions(
    device: Regions, host: Regions, kernel_on: torch.device | None
) -> list[RegionClass]:
    """The regions by page size; with the kernel's tables for ``kernel_on``."""
    classes = []
    for chosen in group_by_size(device.pages):
        regions = RegionClass(device.select(chosen), host.select(chosen), {})
        if kernel_on is not None:
            from simple_offload.backends.cuda.kernel import KernelRegions

            for direction in Direction:
                regions.kernel[direction] = KernelRegions(*regions.sides(direction), kernel_on)
        classes.append(regions)
    return classes


class PathChoice(NamedTuple):
    """The path of each descriptor of a batch, and the batch's cost."""

    by_kernel: npt.NDArray[np.bool_] | bool
    """Per descriptor, True where the kernel copies; one bool if all go the same way. DMA copies
    the others."""
    seconds: float
    """Expected time of the whole batch."""


class Piece(NamedTuple):
    """The part of a copy that one call has queued."""

    path: Literal["dma", "kernel"]
    stream: torch.cuda.Stream
    num_bytes: int
    arguments: object
    """The driver or the kernel may read them until the stream has passed the piece."""


class Mark(NamedTuple):
    """A point in a copy."""

    event: torch.cuda.Event
    seconds: float
    """Expected copy time since the mark before."""


@dataclass(slots=True, eq=False)
class CudaPending:
    """A copy under way."""

    start: torch.cuda.Event
    kept_alive: list[Any]
    """Arguments that the driver and the kernel may read until the copy has ended."""
    marks: deque[Mark] = field(default_factory=deque)
    """Those not yet seen as passed. Never empty once all is queued: the last one stays."""
    seconds: float = 0.0
    """Expected time of the whole copy."""
    num_bytes: Counter[str] = field(default_factory=Counter)
    """By path."""

    def done(self) -> bool:
        return bool(self.marks[-1].event.query())

    def wait(self) -> None:
        self.marks[-1].event.synchronize()

    def add_mark(self, event: torch.cuda.Event, seconds: float) -> None:
        """``seconds``: expected copy time since the mark before."""
        self.marks.append(Mark(event, seconds))
        self.seconds += seconds

    def remaining_seconds(self) -> float:
        while len(self.marks) > 1 and self.marks[0].event.query():
            self.marks.popleft()
        return sum(mark.seconds for mark in self.marks)

    def hold_compute(self) -> None:
        torch.cuda.current_stream().wait_event(self.marks[-1].event)

    def measure(self) -> Measurement:
        return Measurement(self.start.elapsed_time(self.marks[-1].event) / 1e3, self.num_bytes)


@dataclass(frozen=True, eq=False)
class CudaMark:
    """A ``ComputeMark``."""

    event: torch.cuda.Event

    def seconds_since(self, earlier: "CudaMark") -> float | None:
        if not self.event.query():
            return None
        return float(earlier.event.elapsed_time(self.event)) / 1e3


class CudaQueues:
    """Each direction has a stream for DMA and one for the kernel, so loads and stores overlap
    each other and the compute stream."""

    def __init__(self, device: torch.device) -> None:
        self.submit_dma: SubmitDma = resolve_dma()
        self.kernel_on: torch.device | None = None
        """The device, unless DMA makes all copies."""
        self._streams = {direction: torch.cuda.Stream(device) for direction in Direction}
        # A request waits for a load: its few programs go before those of compute.
        self._kernel_streams = {
            Direction.LOAD: torch.cuda.Stream(device, priority=-1),
            Direction.STORE: torch.cuda.Stream(device),
        }
        self._spare_streams = {direction: torch.cuda.Stream(device) for direction in Direction}
        """Copies alternate between both streams of their direction."""

    def begin(self, direction: Direction, barrier: Barrier | None) -> torch.cuda.Event:
        """Order the next copy behind ``barrier``. Returns an event at the copy's start."""
        stream = self._streams[direction]
        if barrier is not None:
            assert isinstance(barrier, torch.cuda.Event)
            stream.wait_event(barrier)
        start = self.mark(stream)
        if self.kernel_on is not None:
            self._kernel_streams[direction].wait_event(start)
        return start

    def join(self, direction: Direction) -> torch.cuda.Event:
        """Order later copies behind all that is queued, on both paths. Returns an event there."""
        stream = self._streams[direction]
        if self.kernel_on is not None:
            stream.wait_stream(self._kernel_streams[direction])
        return self.mark(stream)

    def mark(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        """An event behind everything queued on ``stream``."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event

    def drain(self, direction: Direction) -> None:
        """Wait until everything queued has ended. A refused call may have left any stream last."""
        for streams in (self._kernel_streams, self._streams, self._spare_streams):
            streams[direction].synchronize()

    def submit(
        self,
        direction: Direction,
        classes: Sequence[RegionClass],
        extents: Extents,
        choices: Sequence[PathChoice],
        *,
        keep_lock: bool = False,
    ) -> Iterator[Piece]:
        """Queue ``extents`` in all regions, piece by piece. ``choices``: each extent's path, by
        class of regions; ``keep_lock``: as for ``SubmitDma``."""
        by_dma: list[Descriptors] = []
        for regions, choice in zip(classes, choices, strict=True):
            chosen = choice.by_kernel
            if chosen is not False:
                by_kernel = extents if chosen is True else extents.select(chosen)
                yield from self._submit_to_kernel(direction, regions, by_kernel)
            if chosen is not True:
                rest = extents if chosen is False else extents.select(~chosen)
                by_dma.append(describe(*regions.sides(direction), rest))
        if by_dma:
            yield from self._submit_by_dma(direction, Descriptors.concatenate(by_dma), keep_lock)

    def _submit_to_kernel(
        self, direction: Direction, regions: RegionClass, extents: Extents
    ) -> Iterator[Piece]:
        kernel, stream = regions.kernel[direction], self._kernel_streams[direction]
        pairs = kernel.write_pairs(*extents.pairs())
        for piece in pairs.in_pieces(max(1, _PIECE_BYTES // regions.device.block_bytes)):
            kernel.launch(piece, _KERNEL_PROGRAMS, stream)
            yield Piece("kernel", stream, piece.length * regions.device.block_bytes, piece)

    def _submit_by_dma(
        self, direction: Direction, plan: Descriptors, keep_lock: bool
    ) -> Iterator[Piece]:
        num_bytes = _YIELD_BYTES[direction]
        plan = largest_first(plan.split(num_bytes))
        streams, spare = self._streams, self._spare_streams
        for piece in in_pieces(plan, num_bytes, CALL_DESCRIPTORS):
            stream = streams[direction]
            self.submit_dma(piece, direction, stream, keep_lock)
            yield Piece("dma", stream, int(piece.sizes.sum()), piece)
            streams[direction], spare[direction] = spare[direction], stream
            streams[direction].wait_stream(stream)
