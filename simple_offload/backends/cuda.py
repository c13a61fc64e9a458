"""CudaBackend: copies between pinned host memory and a CUDA device."""

import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import numpy as np
import torch

from simple_offload.backends.base import Barrier, Copied, Direction, require_blocks_within
from simple_offload.backends.copy_costs import CopyCosts, Division, measure_costs
from simple_offload.backends.cuda_dma import CudaCopyError, largest_first, resolve_dma
from simple_offload.backends.host_memory import map_memory, node_of_pci_device
from simple_offload.backends.plan import Descriptors, Regions, in_parts, plan_copies
from simple_offload.config import ConfigError
from simple_offload.logs import get_logger
from simple_offload.metadata import BlockIds, Transfer

if TYPE_CHECKING:
    from simple_offload.backends.cuda_kernel import CopyKernel

logger = get_logger(__name__)

CopyPath = Literal["auto", "dma", "kernel"]
COPY_PATHS: tuple[str, ...] = get_args(CopyPath)

_KERNEL_PROGRAMS = 8
"""SMs that the kernel runs on: more are no faster on an H200 (docs/measurements.md)."""
_LADDER = tuple(4096 << step for step in range(8))  # 4 KiB to 512 KiB
_SCRATCH_BYTES = 64 << 20
_MAX_TIMED = 1024  # descriptors
_PART_BYTES = 64 << 20
_PART_DESCRIPTORS = 4096
"""At most so much of a copy is planned and queued at a time: a large one starts long before all of
it is planned, and shows every millisecond or so how far it has come."""


class _Part(NamedTuple):
    """A stretch of a copy."""

    event: torch.cuda.Event
    """Behind it on the stream."""
    seconds: float
    """How long it should take."""


@dataclass(slots=True, eq=False)
class CudaPending:
    """A copy under way."""

    parts: deque[_Part]
    """Those that had not ended when last looked at. Never empty: the last one stays."""
    kept: list[Any]
    """Descriptors: the driver and the kernel may read them until the copy has ended."""
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

    def copied(self) -> Copied:
        return Copied(self.start.elapsed_time(self.parts[-1].event) / 1e3, self.num_bytes)


class CudaBackend:
    """Copies of each direction go to streams of their own, one for DMA and one for the kernel,
    so loads and stores overlap each other and the compute stream."""

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
        self._kernels: dict[Direction, CopyKernel] = {}
        self._costs: dict[Direction, CopyCosts] = {}
        self._registered: list[torch.Tensor] = []
        self._chunks: list[Sequence[torch.Tensor]] = []
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
        self._host_regions = Regions.of_chunks(self._chunks)

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
        source, destination, pairs = self._parts(direction, transfer)
        stream, kernel_stream = self._streams[direction], self._kernel_streams[direction]
        if barrier is not None:
            assert isinstance(barrier, torch.cuda.Event)
            stream.wait_event(barrier)
        start = torch.cuda.Event(enable_timing=True)
        start.record(stream)
        if self._kernels:
            kernel_stream.wait_stream(stream)
        kept: list[Any] = []
        parts: deque[_Part] = deque()
        num_bytes = {"kernel": 0, "dma": 0}
        try:
            for source_blocks, destination_blocks in pairs:
                plan = plan_copies(source, destination, source_blocks, destination_blocks)
                plan = largest_first(plan)
                division = self._divide(direction, plan)
                kept.append(self._submit(direction, plan, division))
                by_kernel = int(plan.sizes[division.by_kernel].sum())
                num_bytes["kernel"] += by_kernel
                num_bytes["dma"] += int(plan.sizes.sum()) - by_kernel
                parts.append(self._mark(kernel_stream if by_kernel else stream, division.seconds))
            if num_bytes["kernel"]:
                stream.wait_stream(kernel_stream)
            if num_bytes["kernel"] or not parts:
                parts.append(self._mark(stream, 0.0))
        except Exception:
            # Some of it may be queued. It must not write to blocks that somebody else has got
            # because this transfer has failed.
            kernel_stream.synchronize()
            stream.synchronize()
            raise
        return CudaPending(parts, kept, start, num_bytes)

    def close(self) -> None:
        for tensor in self._registered:
            torch.cuda.cudart().cudaHostUnregister(tensor.data_ptr())
        self._registered.clear()
        self._chunks.clear()

    # One copy

    def _parts(
        self, direction: Direction, transfer: Transfer
    ) -> tuple[Regions, Regions, Iterator[tuple[BlockIds, BlockIds]]]:
        """Source, destination, and pairs of their blocks, a part of the copy at a time."""
        device = self._device_regions
        if not len(device.pages):
            return device, device, iter(())
        host = self._host_regions
        require_blocks_within(transfer, device.num_blocks, host.num_blocks)
        by_bytes = _PART_BYTES // int(device.pages.sum())
        num_pairs = max(1, min(by_bytes, _PART_DESCRIPTORS // len(device.pages)))
        if direction is Direction.LOAD:
            pairs = in_parts(transfer.host_blocks, transfer.device_blocks, num_pairs)
            return host, device, pairs
        return device, host, in_parts(transfer.device_blocks, transfer.host_blocks, num_pairs)

    def _divide(self, direction: Direction, plan: Descriptors) -> Division:
        if not len(plan.sizes):
            return Division(np.zeros(0, np.bool_), 0.0)
        division = self._costs[direction].divide(plan.sizes)
        if self._copy_path == "kernel":
            return division._replace(by_kernel=np.ones(len(plan.sizes), np.bool_))
        return division

    def _submit(self, direction: Direction, plan: Descriptors, division: Division) -> list[Any]:
        """Queue ``plan``, on the direction's two streams. Returns what has to live until both
        have passed it."""
        stream, kernel_stream = self._streams[direction], self._kernel_streams[direction]
        if not division.by_kernel.any():
            if len(plan.sizes):
                self._submit_dma(plan, direction, stream)
            return [plan]
        whole = bool(division.by_kernel.all())
        by_kernel = plan if whole else plan.take(division.by_kernel)
        kept: list[Any] = [
            self._kernels[direction].launch(by_kernel, _KERNEL_PROGRAMS, kernel_stream)
        ]
        if not whole:
            rest = plan.take(~division.by_kernel)
            kept.append(rest)
            self._submit_dma(rest, direction, stream)
        return kept

    def _mark(self, stream: torch.cuda.Stream, seconds: float) -> _Part:
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return _Part(event, seconds)

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
        """What was measured, in a line: by direction and descriptor size GB/s, and the share
        that the kernel takes in it."""
        parts = []
        for direction, costs in self._costs.items():
            rungs = (
                f"{int(size) >> 10}K {size / seconds / 1e9:.0f} GB/s"
                + (f" ({share:.0%} by kernel)" if share else "")
                for size, seconds, share in zip(
                    costs.sizes, costs.divided, costs.shares, strict=True
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
        def timed(size: int, count: int, share: float) -> float:
            plan = _scattered(direction, device, host, size, count)
            chosen = np.arange(count) < round(count * share)
            division = Division(np.random.default_rng(1).permutation(chosen), 0.0)
            best = math.inf
            for _ in range(2):
                torch.cuda.synchronize(self._device)
                start = time.perf_counter()
                kept = self._submit(direction, plan, division)
                torch.cuda.synchronize(self._device)
                best = min(best, time.perf_counter() - start)
                del kept
            return best

        if self._kernels:
            for size in sizes:
                timed(size, 8, 1.0)  # compiles the kernel
        return measure_costs(
            sizes,
            lambda size: min(_MAX_TIMED, _SCRATCH_BYTES // size),
            lambda size, count: timed(size, count, 0.0),
            timed if self._kernels else None,
        )


def _scattered(
    direction: Direction, device: torch.Tensor, host: torch.Tensor, size: int, count: int
) -> Descriptors:
    """``count`` descriptors of ``size`` bytes between random places of two buffers."""
    random = np.random.default_rng(0)
    sides = []
    for buffer in (device, host):
        places = random.permutation(buffer.nbytes // size)[:count].astype(np.uint64)
        sides.append(np.uint64(buffer.data_ptr()) + places * np.uint64(size))
    source, destination = sides if direction is Direction.STORE else sides[::-1]
    return Descriptors(destination, source, np.full(count, size, np.uint64))


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
