"""CudaBackend: copies between pinned host memory and a CUDA device."""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, get_args

import numpy as np
import torch

from simple_offload.backends.base import Barrier, Direction, require_blocks_within
from simple_offload.backends.cuda import calibration
from simple_offload.backends.cuda.copy_costs import CopyCosts, Division
from simple_offload.backends.cuda.dma import CudaCopyError
from simple_offload.backends.cuda.queues import (
    AlikeRegions,
    CudaPending,
    CudaQueues,
    Part,
    Piece,
    match_regions,
)
from simple_offload.backends.descriptors import Regions, Runs, find_runs, in_parts
from simple_offload.backends.host_memory import map_memory, node_of_pci_device
from simple_offload.config import ConfigError
from simple_offload.logs import get_logger
from simple_offload.metadata import Transfer

logger = get_logger(__name__)

CopyPath = Literal["auto", "dma", "kernel"]
COPY_PATHS: tuple[str, ...] = get_args(CopyPath)

_STRETCH_DESCRIPTORS = 8192
"""At most so much of a copy is planned at a time, while the device copies what came before."""
_FIRST_BYTES, _FIRST_DESCRIPTORS = 16 << 20, 2048
"""At most so much before the first byte moves: what keeps the device busy meanwhile."""
_MARK_BYTES = 128 << 20
"""After so much of a copy comes an event, so that a large load shows every few milliseconds how far
it has come. To record one gives up Python's interpreter lock."""

_QUICK_DESCRIPTORS = 2048
_QUICK_BYTES = 2 << 30
"""A load of so many descriptors for DMA and so many bytes holds up its thread for milliseconds at
most, which the device then has enough to do for. It keeps Python's lock meanwhile, so it must not
fill the device's queue, where a call waits for the compute before it: four times as many do not
(docs/measurements.md, "Copies queued behind compute")."""


class CudaBackend:
    """Pinned host memory, copied to and from by DMA or by kernel, whichever is quicker on this
    GPU for pages of that size."""

    chunk_bytes = 1 << 30

    def __init__(self, copy_path: CopyPath = "auto") -> None:
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._copy_path = copy_path
        self._queues = CudaQueues(self._device)
        self._costs: dict[Direction, CopyCosts] = {}
        self._pinned: dict[int, torch.Tensor] = {}  # by address
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
        self._pinned[tensor.data_ptr()] = tensor
        return tensor

    def _release_host(self, address: int) -> None:
        torch.cuda.cudart().cudaHostUnregister(address)
        del self._pinned[address]

    def open(self, device: Sequence[torch.Tensor]) -> None:
        """The tensors are only read for their addresses; somebody else keeps them alive.
        Measures what copies of pages like theirs cost."""
        self._device_regions = Regions.of(device)
        self._block_bytes = self._device_regions.block_bytes
        pages = self._device_regions.pages
        if len(pages):
            self._measure(int(pages.min()), aligned=not (pages % np.uint64(16)).any())

    def add_host_chunk(self, regions: Sequence[torch.Tensor]) -> None:
        """Publishes a new list of addresses; copies under way keep the one they have."""
        self._chunks.append(regions)
        self._sides = match_regions(
            self._device_regions,
            Regions.of_chunks(self._chunks),
            kernels=bool(self._queues.kernels),
        )

    def barrier(self) -> Barrier | None:
        """An event on the engine's compute stream."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def enter_thread(self, direction: Direction) -> None:
        torch.cuda.set_device(self._device)

    def copy(
        self,
        direction: Direction,
        transfer: Transfer,
        barrier: Barrier | None,
        *,
        keep_lock: bool = False,
    ) -> CudaPending:
        """``keep_lock``: as for ``SubmitDma``."""
        sides, blocks = self._sides, (transfer.device_blocks, transfer.host_blocks)
        if direction is Direction.LOAD:
            blocks = blocks[::-1]
        queues = self._queues
        start = queues.begin(direction, barrier)
        kept: list[object] = [sides]
        parts: deque[Part] = deque()
        num_bytes = {"kernel": 0, "dma": 0}
        unmarked = 0.0
        last: Piece | None = None
        try:
            for first, stop in self._stretches(sides, transfer):
                source_blocks, destination_blocks = (side[first:stop] for side in blocks)
                runs = find_runs(*sides[0].sides(direction), source_blocks, destination_blocks)
                divisions = [self._divide(direction, alike, runs) for alike in sides]
                seconds = sum(division.seconds for division in divisions)
                pace = seconds / ((stop - first) * self._block_bytes)
                for piece in queues.submit(direction, sides, runs, divisions, keep_lock=keep_lock):
                    kept.append(piece.kept)
                    num_bytes[piece.path] += piece.num_bytes
                    last, unmarked = piece, unmarked + piece.num_bytes * pace
                    if sum(num_bytes.values()) >= _MARK_BYTES * (len(parts) + 1):
                        parts.append(Part(queues.mark(piece.stream), unmarked))
                        unmarked = 0.0
            if num_bytes["kernel"] or last is None:
                parts.append(Part(queues.end(direction), unmarked))
            elif unmarked:
                parts.append(Part(queues.mark(last.stream), unmarked))
        except BaseException:
            # Some of it may be queued. It must not write to blocks that somebody else has got
            # because this transfer has failed, or to memory that is given back at shutdown.
            queues.drain(direction)
            raise
        return CudaPending(parts, kept, start, num_bytes)

    def copy_quickly(
        self, direction: Direction, transfer: Transfer, barrier: Barrier | None
    ) -> CudaPending:
        """What gives up the lock may get it back milliseconds later only, from the thread that
        takes in requests: with each call to the driver, queueing took longer than copying
        (docs/measurements.md, "Engines")."""
        return self.copy(direction, transfer, barrier, keep_lock=True)

    def is_quick(self, direction: Direction, transfer: Transfer) -> bool:
        """Loads of few descriptors, or of those that the kernel copies. A store has nobody
        waiting for it."""
        num_pairs = len(transfer.device_blocks)
        num_bytes = num_pairs * self._block_bytes
        if direction is Direction.STORE or num_bytes > _QUICK_BYTES:
            return False
        by_dma = sum(
            len(alike.device.pages)
            for alike in self._sides
            if self._copy_path != "kernel" and not self._costs[direction].by_kernel_at(alike.page)
        )
        return num_pairs * by_dma <= _QUICK_DESCRIPTORS  # as if no two were neighbours

    def close(self) -> None:
        for address in list(self._pinned):
            self._release_host(address)
        self._chunks.clear()

    # One copy

    def _stretches(
        self, sides: Sequence[AlikeRegions], transfer: Transfer
    ) -> Iterator[tuple[int, int]]:
        """Where each stretch of the copy begins and ends, in pairs of blocks."""
        device = self._device_regions
        if not len(device.pages):
            return iter(())
        require_blocks_within(transfer, device.num_blocks, sides[0].host.num_blocks)
        num_regions = len(device.pages)
        first = min(_FIRST_DESCRIPTORS // num_regions, _FIRST_BYTES // self._block_bytes)
        at_once = _STRETCH_DESCRIPTORS // num_regions
        return in_parts(len(transfer.device_blocks), max(1, first), max(1, at_once))

    def _divide(self, direction: Direction, alike: AlikeRegions, runs: Runs) -> Division:
        """How each run is to be copied, and how long that takes in all regions."""
        sizes, num_regions = runs.lengths * alike.page, len(alike.device.pages)
        division = self._costs[direction].divide(sizes, num_regions)
        if self._copy_path == "kernel":
            return division._replace(by_kernel=True)
        return division

    # Measuring, at start

    def _measure(self, smallest_page: int, aligned: bool) -> None:
        """Time copies of descriptors from ``smallest_page`` bytes up, both ways."""
        if self._copy_path == "kernel" or (
            self._copy_path == "auto" and aligned and smallest_page < 2 * calibration.LARGEST_SIZE
        ):
            self._make_kernels()
        started = time.monotonic()
        sizes = calibration.sizes_from(smallest_page)
        num_bytes = calibration.SCRATCH_BYTES
        device = torch.empty(num_bytes, dtype=torch.int8, device=self._device)
        host = self.allocate_host(num_bytes)
        for direction in Direction:
            self._costs[direction] = calibration.measure_direction(
                self._queues, direction, sizes, device, host
            )
        self._release_host(host.data_ptr())
        logger.info(
            "Copies measured in %.2f s: %s", time.monotonic() - started, self.describe_paths()
        )

    def describe_paths(self) -> str:
        """What was measured, in a line: by direction and descriptor size GB/s, and whether that
        is by kernel. DMA's of small ones are what to expect of a large tier."""
        return "; ".join(f"{way.value} {costs.describe()}" for way, costs in self._costs.items())

    def _make_kernels(self) -> None:
        try:
            from simple_offload.backends.cuda.kernel import CopyKernel
        except ImportError as error:
            if self._copy_path == "kernel":
                raise ConfigError(
                    f"copy_path='kernel': Triton cannot be imported ({error}). "
                    "Allowed without it: 'auto' or 'dma'"
                ) from error
            logger.info("No copy kernel, Triton cannot be imported (%s): all by DMA", error)
            return
        self._queues.kernels = {direction: CopyKernel(self._device) for direction in Direction}


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
