"""CudaQueues: the streams that copies go to, what is put on them, and how far they have come."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from simple_offload.backends.base import Barrier, Direction, Measurement
from simple_offload.backends.cuda.copy_costs import Division
from simple_offload.backends.cuda.dma import SubmitDma, largest_first, resolve_dma
from simple_offload.backends.descriptors import (
    Descriptors,
    Regions,
    Runs,
    describe,
    in_pieces,
    of_similar_size,
)

if TYPE_CHECKING:
    from simple_offload.backends.cuda.kernel import CopyKernel, KernelRegions

_KERNEL_PROGRAMS = 8
"""SMs that the kernel runs on: more are no faster on an H200 (docs/measurements.md)."""
_PIECE_BYTES = 64 << 20
"""At most so much is queued at a time."""
CALL_DESCRIPTORS = 256
"""At most so many go to the driver in a call: the device begins when it has taken all of them."""
_YIELD_BYTES = 16 << 20
"""After so much of a store it goes on on another stream. Copies from the device share an engine
that stays with a stream as long as that has a copy ready: the tokens that a step has sampled would
reach vLLM when all stores have ended (19 ms for 1 GiB instead of 0.3, docs/measurements.md)."""


@dataclass(frozen=True, eq=False)
class AlikeRegions:
    """Regions of both sides whose pages are of similar size."""

    device: Regions
    host: Regions
    kernel: "dict[Direction, KernelRegions]"
    """Empty where there is no kernel."""

    @cached_property
    def page(self) -> int:
        """Bytes of the largest."""
        return int(self.device.pages.max())

    @cached_property
    def block_bytes(self) -> int:
        """What a block has in all of them."""
        return self.device.block_bytes

    def sides(self, direction: Direction) -> tuple[Regions, Regions]:
        """Source and destination."""
        both = self.device, self.host
        return both if direction is Direction.STORE else both[::-1]


def match_regions(device: Regions, host: Regions, *, kernels: bool) -> list[AlikeRegions]:
    """The regions of both sides, those together whose pages are alike; ``kernels``: with what
    the copy kernel has to know of them."""
    sides = []
    for chosen in of_similar_size(device.pages):
        alike = AlikeRegions(device.take(chosen), host.take(chosen), {})
        if kernels:
            from simple_offload.backends.cuda.kernel import KernelRegions

            alike.kernel.update(
                {direction: KernelRegions(*alike.sides(direction)) for direction in Direction}
            )
        sides.append(alike)
    return sides


class Piece(NamedTuple):
    """What a stream has been given at once."""

    path: Literal["dma", "kernel"]
    stream: torch.cuda.Stream
    num_bytes: int
    kept: object
    """Has to live until the stream has passed it."""


class CudaQueues:
    """Copies of each direction go to streams of their own, for DMA and for the kernel, so loads
    and stores overlap each other and the compute stream."""

    def __init__(self, device: torch.device) -> None:
        self.submit_dma: SubmitDma = resolve_dma()
        self.kernels: dict[Direction, CopyKernel] = {}
        """Empty where nothing is copied by kernel."""
        self._streams = {direction: torch.cuda.Stream(device) for direction in Direction}
        # Loads have a request waiting: their few programs go before compute's.
        self._kernel_streams = {
            Direction.LOAD: torch.cuda.Stream(device, priority=-1),
            Direction.STORE: torch.cuda.Stream(device),
        }
        self._spare_stream = torch.cuda.Stream(device)
        """Stores take turns on two streams."""

    def begin(self, direction: Direction, barrier: Barrier | None) -> torch.cuda.Event:
        """Let the next copy come after ``barrier``. Returns an event that is passed when it
        begins."""
        stream = self._streams[direction]
        if barrier is not None:
            assert isinstance(barrier, torch.cuda.Event)
            stream.wait_event(barrier)
        start = self.mark(stream)
        if self.kernels:
            self._kernel_streams[direction].wait_event(start)
        return start

    def end(self, direction: Direction) -> torch.cuda.Event:
        """An event behind all that has been queued, on either path; what ``begin`` lets begin
        later comes after it."""
        stream = self._streams[direction]
        if self.kernels:
            stream.wait_stream(self._kernel_streams[direction])
        return self.mark(stream)

    def mark(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        """An event behind what ``stream`` has been given."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event

    def drain(self, direction: Direction) -> None:
        """Return when all that has been queued has ended."""
        self._kernel_streams[direction].synchronize()
        self._streams[direction].synchronize()

    def submit(
        self,
        direction: Direction,
        sides: Sequence[AlikeRegions],
        runs: Runs,
        divisions: Sequence[Division],
        *,
        keep_lock: bool = False,
    ) -> Iterator[Piece]:
        """Queue ``runs`` of all regions piece by piece. ``divisions``: which of them go by
        kernel, for each of ``sides``; ``keep_lock``: as for ``SubmitDma``."""
        by_dma: list[Descriptors] = []
        for alike, division in zip(sides, divisions, strict=True):
            chosen = division.by_kernel
            if chosen is not False:
                taken = runs if chosen is True else runs.take(chosen)
                yield from self._submit_to_kernel(direction, alike, taken)
            if chosen is not True:
                rest = runs if chosen is False else runs.take(~chosen)
                by_dma.append(describe(*alike.sides(direction), rest))
        if by_dma:
            plan = Descriptors.joined(by_dma)
            yield from self._submit_by_dma(direction, plan, keep_lock=keep_lock)

    def _submit_to_kernel(
        self, direction: Direction, alike: AlikeRegions, runs: Runs
    ) -> Iterator[Piece]:
        kernel, stream = self.kernels[direction], self._kernel_streams[direction]
        pairs = kernel.write_pairs(*runs.pairs())
        for piece in pairs.in_pieces(max(1, _PIECE_BYTES // alike.block_bytes)):
            kernel.launch(alike.kernel[direction], piece, _KERNEL_PROGRAMS, stream)
            yield Piece("kernel", stream, piece.length * alike.block_bytes, piece)

    def _submit_by_dma(
        self, direction: Direction, plan: Descriptors, *, keep_lock: bool = False
    ) -> Iterator[Piece]:
        takes_turns = direction is Direction.STORE
        num_bytes = _YIELD_BYTES if takes_turns else _PIECE_BYTES
        plan = largest_first(plan.split(num_bytes))
        for piece in in_pieces(plan, num_bytes, CALL_DESCRIPTORS):
            stream = self._streams[direction]
            self.submit_dma(piece, direction, stream, keep_lock=keep_lock)
            yield Piece("dma", stream, int(piece.sizes.sum()), piece)
            if takes_turns:
                self._streams[direction], self._spare_stream = self._spare_stream, stream
                self._streams[direction].wait_stream(stream)


class Part(NamedTuple):
    """A stretch of a copy."""

    event: torch.cuda.Event
    """Behind it on the stream."""
    seconds: float
    """How long it should take."""


@dataclass(slots=True, eq=False)
class CudaPending:
    """A copy under way."""

    parts: deque[Part]
    """Those that had not ended when last looked at. Never empty: the last one stays."""
    kept: list[Any]
    """What the driver and the kernel may read until the copy has ended."""
    start: torch.cuda.Event
    num_bytes: dict[str, int]
    """By path."""

    def done(self) -> bool:
        return bool(self.parts[-1].event.query())

    def wait(self) -> None:
        self.parts[-1].event.synchronize()

    def remaining_seconds(self) -> float:
        while len(self.parts) > 1 and self.parts[0].event.query():
            self.parts.popleft()
        return sum(part.seconds for part in self.parts)

    def hold_compute(self) -> None:
        torch.cuda.current_stream().wait_event(self.parts[-1].event)

    def measure(self) -> Measurement:
        return Measurement(self.start.elapsed_time(self.parts[-1].event) / 1e3, self.num_bytes)
