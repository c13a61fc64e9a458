"""CudaBackend: copies between pinned host memory and a CUDA device."""

import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

import numpy as np
import torch

from simple_offload.backends.base import Barrier, Direction, require_blocks_within
from simple_offload.backends.copy_costs import CopyCosts, Division, Path, measure_costs
from simple_offload.backends.cuda_dma import CudaCopyError, largest_first, resolve_dma
from simple_offload.backends.cuda_pending import CudaPending, Part
from simple_offload.backends.cuda_regions import AlikeRegions, match_regions
from simple_offload.backends.host_memory import map_memory, node_of_pci_device
from simple_offload.backends.plan import (
    Descriptors,
    Regions,
    Runs,
    describe,
    find_runs,
    in_parts,
    in_pieces,
)
from simple_offload.config import ConfigError
from simple_offload.logs import get_logger
from simple_offload.metadata import Transfer

if TYPE_CHECKING:
    from simple_offload.backends.cuda_kernel import CopyKernel, Pairs

logger = get_logger(__name__)

CopyPath = Literal["auto", "dma", "kernel"]
COPY_PATHS: tuple[str, ...] = get_args(CopyPath)

_KERNEL_PROGRAMS = 8
"""SMs that the kernel runs on: more are no faster on an H200 (docs/measurements.md)."""
_LADDER = tuple(4096 << step for step in range(8))  # 4 KiB to 512 KiB
_SCRATCH_BYTES = 64 << 20
_STRETCH_DESCRIPTORS = 8192
"""At most so much of a copy is planned at a time: a large one starts long before all of it is
planned."""
_PIECE_BYTES = 64 << 20
"""At most so much is queued at a time, so that a large copy shows every millisecond or so how far
it has come."""
_CALL_DESCRIPTORS = 256
"""At most so many go to the driver in a call: the device begins when it has taken all of them."""
_YIELD_BYTES = 16 << 20
"""After so much of a store it goes on on another stream. Copies from the device share an engine
that stays with a stream as long as that has a copy ready: the tokens that a step has sampled would
reach vLLM when all stores have ended (19 ms for 1 GiB instead of 0.3, docs/measurements.md)."""

_QUICK_DESCRIPTORS = 2048
_QUICK_BYTES = 2 << 30
"""A load of so many descriptors for DMA and so many bytes holds up its thread for milliseconds at
most, which the device then has enough to do for."""


class _Piece(NamedTuple):
    """What a stream has been given at once."""

    stream: torch.cuda.Stream
    num_bytes: int
    kept: object
    """Has to live until the stream has passed it."""


class CudaBackend:
    """Copies of each direction go to streams of their own, for DMA and for the kernel, so loads
    and stores overlap each other and the compute stream."""

    chunk_bytes = 1 << 30

    def __init__(self, copy_path: CopyPath = "auto") -> None:
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._copy_path = copy_path
        self._submit_dma = resolve_dma()
        self._streams = {direction: torch.cuda.Stream(self._device) for direction in Direction}
        # Loads have a request waiting: their few programs go before compute's.
        self._kernel_streams = {
            Direction.LOAD: torch.cuda.Stream(self._device, priority=-1),
            Direction.STORE: torch.cuda.Stream(self._device),
        }
        self._spare_stream = torch.cuda.Stream(self._device)
        """Stores take turns on two streams."""
        self._kernels: dict[Direction, CopyKernel] = {}
        self._costs: dict[Direction, CopyCosts] = {}
        self._registered: list[torch.Tensor] = []
        self._chunks: list[Sequence[torch.Tensor]] = []
        self._sides: list[AlikeRegions] = []
        self._numa_node = node_of_pci_device(_pci_address(self._device))

    def allocate_host(self, num_bytes: int) -> torch.Tensor:
        """Pinned memory. PyTorch's own pinned allocator would round the size up to a power of
        two."""
        torch.cuda.set_device(self._device)
        tensor = map_memory(num_bytes, self._numa_node)
        with _outside_graph_capture():
            error = torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), num_bytes, 0)
        if int(error) != 0:
            raise CudaCopyError(
                f"cudaHostRegister cannot pin {num_bytes / 2**30:.2f} GiB more: {error}. "
                "Is the lock limit (ulimit -l) high enough?"
            )
        self._registered.append(tensor)
        return tensor

    def open(self, device: Sequence[torch.Tensor]) -> None:
        """The tensors are only read for their addresses; somebody else keeps them alive.
        Measures what copies of pages like theirs cost."""
        self._device_regions = Regions.of(device)
        pages = self._device_regions.pages
        if len(pages):
            self._measure(int(pages.min()), aligned=not (pages % np.uint64(16)).any())

    def add_host_chunk(self, regions: Sequence[torch.Tensor]) -> None:
        """Publishes a new list of addresses; copies under way keep the one they have."""
        self._chunks.append(regions)
        self._sides = self._match(self._device_regions, Regions.of_chunks(self._chunks))

    def barrier(self) -> Barrier | None:
        """An event on the engine's compute stream."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def enter_thread(self, direction: Direction) -> None:
        torch.cuda.set_device(self._device)

    def copy(
        self, direction: Direction, transfer: Transfer, barrier: Barrier | None
    ) -> CudaPending:
        sides, blocks = self._sides, (transfer.device_blocks, transfer.host_blocks)
        if direction is Direction.LOAD:
            blocks = blocks[::-1]
        kernel_stream = self._kernel_streams[direction]
        stream = self._streams[direction]
        if barrier is not None:
            assert isinstance(barrier, torch.cuda.Event)
            stream.wait_event(barrier)
        start = torch.cuda.Event(enable_timing=True)
        start.record(stream)
        if self._kernels:
            kernel_stream.wait_stream(stream)
        kept: list[object] = [sides]
        parts: deque[Part] = deque()
        num_bytes = {"kernel": 0, "dma": 0}
        pairs: Pairs | None = None
        try:
            for first, stop in self._stretches(sides, transfer):
                source_blocks, destination_blocks = (side[first:stop] for side in blocks)
                runs = find_runs(*sides[0].sides(direction), source_blocks, destination_blocks)
                divisions = [self._divide(direction, alike, runs) for alike in sides]
                if pairs is None and any(division.by_kernel.all() for division in divisions):
                    pairs = self._kernels[direction].upload(*blocks, kernel_stream)
                part = pairs.part(first, stop) if pairs is not None else None
                seconds = sum(
                    division.seconds * len(alike.device.pages)
                    for alike, division in zip(sides, divisions, strict=True)
                )
                pace = seconds / ((stop - first) * int(self._device_regions.pages.sum()))
                for piece in self._submit(direction, sides, runs, divisions, part):
                    kept.append(piece.kept)
                    path = "kernel" if piece.stream is kernel_stream else "dma"
                    num_bytes[path] += piece.num_bytes
                    parts.append(self._mark(piece.stream, piece.num_bytes * pace))
            if num_bytes["kernel"]:
                self._streams[direction].wait_stream(kernel_stream)
            if num_bytes["kernel"] or not parts:
                parts.append(self._mark(self._streams[direction], 0.0))
        except BaseException:
            # Some of it may be queued. It must not write to blocks that somebody else has got
            # because this transfer has failed, or to memory that is given back at shutdown.
            kernel_stream.synchronize()
            self._streams[direction].synchronize()
            raise
        return CudaPending(parts, kept, start, num_bytes)

    def is_quick(self, direction: Direction, transfer: Transfer) -> bool:
        """Loads of few descriptors, or of those that the kernel copies. A store has nobody
        waiting for it."""
        num_pairs = len(transfer.device_blocks)
        num_bytes = num_pairs * int(self._device_regions.pages.sum())
        if direction is Direction.STORE or num_bytes > _QUICK_BYTES:
            return False
        by_dma = sum(
            len(alike.device.pages)
            for alike in self._sides
            if self._copy_path != "kernel" and not self._costs[direction].by_kernel_at(alike.page)
        )
        return num_pairs * by_dma <= _QUICK_DESCRIPTORS  # as if no two were neighbours

    def close(self) -> None:
        for tensor in self._registered:
            torch.cuda.cudart().cudaHostUnregister(tensor.data_ptr())
        self._registered.clear()
        self._chunks.clear()

    # One copy

    def _match(self, device: Regions, host: Regions) -> list[AlikeRegions]:
        return match_regions(device, host, kernels=bool(self._kernels))

    def _stretches(
        self, sides: Sequence[AlikeRegions], transfer: Transfer
    ) -> Iterator[tuple[int, int]]:
        """Where each stretch of the copy begins and ends, in pairs of blocks."""
        device = self._device_regions
        if not len(device.pages):
            return iter(())
        require_blocks_within(transfer, device.num_blocks, sides[0].host.num_blocks)
        num_pairs = max(1, _STRETCH_DESCRIPTORS // len(device.pages))
        return in_parts(len(transfer.device_blocks), num_pairs)

    def _divide(self, direction: Direction, alike: AlikeRegions, runs: Runs) -> Division:
        """How each run is to be copied, and how long that takes in one region."""
        division = self._costs[direction].divide(runs.lengths * alike.page)
        if self._copy_path == "kernel":
            return division._replace(by_kernel=np.ones(len(runs.lengths), np.bool_))
        return division

    def _submit(
        self,
        direction: Direction,
        sides: Sequence[AlikeRegions],
        runs: Runs,
        divisions: Sequence[Division],
        pairs: "Pairs | None" = None,
    ) -> Iterator[_Piece]:
        """Queue ``runs`` of all regions piece by piece, on the direction's streams. ``pairs``:
        the same ones where the kernel finds them, if they are there already."""
        by_dma: list[Descriptors] = []
        for alike, division in zip(sides, divisions, strict=True):
            chosen = division.by_kernel
            if chosen.any():
                taken = pairs if chosen.all() else None
                if taken is None:
                    kernel, stream = self._kernels[direction], self._kernel_streams[direction]
                    taken = kernel.upload(*runs.take(chosen).pairs(), stream)
                yield from self._submit_to_kernel(direction, alike, taken)
            if not chosen.all():
                rest = runs.take(~chosen) if chosen.any() else runs
                by_dma.append(describe(*alike.sides(direction), rest))
        if by_dma:
            yield from self._submit_by_dma(direction, Descriptors.joined(by_dma))

    def _submit_to_kernel(
        self, direction: Direction, alike: AlikeRegions, pairs: "Pairs"
    ) -> Iterator[_Piece]:
        kernel, stream = self._kernels[direction], self._kernel_streams[direction]
        block_bytes = int(alike.device.pages.sum())
        for piece in pairs.in_pieces(max(1, _PIECE_BYTES // block_bytes)):
            kernel.launch(alike.kernel[direction], piece, _KERNEL_PROGRAMS, stream)
            yield _Piece(stream, piece.length * block_bytes, piece)

    def _submit_by_dma(self, direction: Direction, plan: Descriptors) -> Iterator[_Piece]:
        takes_turns = direction is Direction.STORE
        num_bytes = _YIELD_BYTES if takes_turns else _PIECE_BYTES
        plan = largest_first(plan.split(num_bytes))
        for piece in in_pieces(plan, num_bytes, _CALL_DESCRIPTORS):
            stream = self._streams[direction]
            self._submit_dma(piece, direction, stream)
            yield _Piece(stream, int(piece.sizes.sum()), piece)
            if takes_turns:
                self._streams[direction], self._spare_stream = self._spare_stream, stream
                self._streams[direction].wait_stream(stream)

    def _mark(self, stream: torch.cuda.Stream, seconds: float) -> Part:
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return Part(event, seconds)

    # Measuring, at start

    def _measure(self, smallest_page: int, aligned: bool) -> None:
        """Time copies of descriptors from ``smallest_page`` bytes up, both ways."""
        if self._copy_path == "kernel" or (
            self._copy_path == "auto" and aligned and smallest_page < 2 * _LADDER[-1]
        ):
            self._make_kernels()
        # Smaller descriptors than the smallest page do not occur, larger ones do: runs of pages.
        sizes = [size for size in _LADDER if 2 * size > smallest_page]
        sizes = sizes or [min(smallest_page, _SCRATCH_BYTES // 8)]
        started = time.monotonic()
        device = torch.empty(_SCRATCH_BYTES, dtype=torch.int8, device=self._device)
        host = self.allocate_host(_SCRATCH_BYTES)
        for direction in Direction:
            self._costs[direction] = self._measure_direction(direction, sizes, device, host)
        self._registered.remove(host)
        torch.cuda.cudart().cudaHostUnregister(host.data_ptr())
        logger.info(
            "Copies measured in %.2f s: %s", time.monotonic() - started, self.describe_paths()
        )

    def describe_paths(self) -> str:
        """What was measured, in a line: by direction and descriptor size GB/s, and whether that
        is by kernel."""
        parts = []
        for direction, costs in self._costs.items():
            rungs = (
                f"{int(size) >> 10}K {size / (kernel if better else dma) / 1e9:.0f} GB/s"
                + (" by kernel" if better else "")
                for size, dma, kernel, better in zip(
                    costs.sizes, costs.dma, costs.kernel, costs.by_kernel, strict=True
                )
            )
            parts.append(f"{direction.value} {', '.join(rungs)}")
        return "; ".join(parts)

    def _make_kernels(self) -> None:
        try:
            from simple_offload.backends.cuda_kernel import CopyKernel
        except ImportError as error:
            if self._copy_path == "kernel":
                raise ConfigError(
                    f"copy_path='kernel': Triton cannot be imported ({error}). "
                    "Allowed without it: 'auto' or 'dma'"
                ) from error
            logger.info("No copy kernel, Triton cannot be imported (%s): all by DMA", error)
            return
        self._kernels = {direction: CopyKernel(self._device) for direction in Direction}

    def _measure_direction(
        self, direction: Direction, sizes: list[int], device: torch.Tensor, host: torch.Tensor
    ) -> CopyCosts:
        def timed(size: int, count: int, batches: int, *, by_kernel: bool) -> float:
            sides = self._match(*(Regions.within(side, size) for side in (device, host)))
            runs = _scattered(len(device) // size, count)
            division = Division(np.full(count, by_kernel), 0.0)
            best = math.inf
            for _ in range(2):
                torch.cuda.synchronize(self._device)
                start = time.perf_counter()
                kept = [
                    list(self._submit(direction, sides, runs, [division])) for _ in range(batches)
                ]
                torch.cuda.synchronize(self._device)
                best = min(best, time.perf_counter() - start)
                del kept
            return best

        if self._kernels:
            for size in sizes:
                timed(size, 8, 1, by_kernel=True)  # compiles it
        # Many batches: with thousands of descriptors queued the driver takes longer for each.
        dma = Path(
            lambda size: min(_CALL_DESCRIPTORS, (8 << 20) // size),
            16,
            partial(timed, by_kernel=False),
        )
        # Larger ones: the host is to take less time to launch one than the device to copy it.
        kernel = Path(lambda size: min(4096, (32 << 20) // size), 2, partial(timed, by_kernel=True))
        return measure_costs(sizes, dma, kernel if self._kernels else None)


def _scattered(num_blocks: int, count: int) -> Runs:
    """``count`` random pairs of ``num_blocks`` blocks."""
    random = np.random.default_rng(0)
    source, destination = (random.permutation(num_blocks)[:count] for _ in range(2))
    return Runs(source, destination, np.ones_like(source))


@contextmanager
def _outside_graph_capture() -> Iterator[None]:
    """Let this thread call what would break a CUDA graph that another thread is capturing:
    memory is pinned while vLLM captures its graphs."""
    from cuda.bindings import driver

    relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    _, before = driver.cuThreadExchangeStreamCaptureMode(relaxed)
    try:
        yield
    finally:
        driver.cuThreadExchangeStreamCaptureMode(before)


def _pci_address(device: torch.device) -> str:
    """Such as "0000:1b:00.0"."""
    from cuda.bindings import driver

    _, handle = driver.cuDeviceGet(device.index)
    _, address = driver.cuDeviceGetPCIBusId(32, handle)
    return str(address.decode().strip("\0"))
