"""CudaBackend: copies between pinned host memory and a CUDA device."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Literal, get_args

import torch

from simple_offload.backends.base import Barrier, Direction, PagePart, require_blocks_within
from simple_offload.backends.cuda import copy_costs
from simple_offload.backends.cuda.copy_costs import CopyCosts
from simple_offload.backends.cuda.dma import CudaCopyError
from simple_offload.backends.cuda.queues import (
    CudaMark,
    CudaPending,
    CudaQueues,
    PathChoice,
    RegionClass,
    classify_regions,
)
from simple_offload.backends.descriptors import Extents, Regions, find_extents, in_stretches
from simple_offload.backends.host_memory import map_memory, node_of_pci_device, put_in_place
from simple_offload.config import ConfigError
from simple_offload.logs import get_logger
from simple_offload.memory import using_reserve
from simple_offload.transfer import Transfer

logger = get_logger(__name__)

CopyPath = Literal["auto", "dma", "kernel"]
COPY_PATHS: tuple[str, ...] = get_args(CopyPath)

_STRETCH_DESCRIPTORS = 8192
"""A copy is planned in stretches of at most this many descriptors; the device copies one while the
next is planned."""
_FIRST_BYTES, _FIRST_DESCRIPTORS = 16 << 20, 2048
"""Limits of the first stretch, which is smaller, so that the first byte moves early."""
_MARK_BYTES = 128 << 20
"""Distance of the events in a copy, so that a large load shows every few milliseconds how far it
has come. Not less, since recording an event releases Python's interpreter lock."""

_QUICK_DESCRIPTORS = 2048
_QUICK_BYTES = 2 << 30
"""Limits of a quick load, in descriptors for DMA and in bytes. Its submission takes milliseconds at
most, while the device is busy with it. The caller keeps Python's interpreter lock meanwhile, so the
load must not fill the device's queue, where a call would wait for earlier compute: four times as
many descriptors do not (docs/measurements.md, "Copies queued behind compute")."""


class CudaBackend:
    """Copies by DMA or by kernel, whichever is quicker on this GPU for the size of page."""

    chunk_bytes = 64 << 20
    """Pinned by one call. Launches wait meanwhile, as the driver takes a lock: up to 90 ms beside
    calls of 1 GiB (docs/measurements.md, "Memory that opens beside requests")."""
    pins_memory = True
    least_part_bytes = 256 << 10  # smaller descriptors take longer

    def __init__(self, copy_path: CopyPath = "auto") -> None:
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._copy_path = copy_path
        self._queues = CudaQueues(self._device)
        self._costs: dict[Direction, CopyCosts] = {}
        self._pinned: dict[int, torch.Tensor] = {}  # by address
        self._device_regions: list[Regions] = []
        """All, then by layer group."""
        self._host_regions: list[Regions] = []
        self._classes: list[RegionClass] = []
        self._parts: Sequence[Sequence[PagePart]] = ()
        """By layer group."""
        self._divided: list[list[RegionClass]] = []
        """By layer group. Empty until loads are divided."""
        self.numa_node = node_of_pci_device(pci_address(self._device.index))

    def allocate_host(self, num_bytes: int) -> torch.Tensor:
        """Pinned memory of exactly this size: PyTorch's pinned allocator rounds up to a power of
        two. Raises MemoryShortageError, or CudaCopyError where the driver cannot pin it."""
        tensor = map_memory(num_bytes, self.numa_node)
        self._pin(tensor)
        return tensor

    def use_shared(self, memory: torch.Tensor, *, is_first: bool) -> None:
        """Each process pins the memory for its device. Raises as ``allocate_host``."""
        if is_first:
            put_in_place(memory, self.numa_node)
        self._pin(memory)

    def _pin(self, memory: torch.Tensor) -> None:
        torch.cuda.set_device(self._device)
        address, num_bytes = memory.data_ptr(), memory.nbytes
        with _outside_graph_capture():
            error = torch.cuda.cudart().cudaHostRegister(address, num_bytes, 0)
        if int(error) != 0:
            raise CudaCopyError(
                f"cudaHostRegister cannot pin {num_bytes / 2**30:.2f} GiB more: {error}. "
                "Is the lock limit (ulimit -l) high enough?"
            )
        self._pinned[address] = memory

    def _release_host(self, address: int) -> None:
        torch.cuda.cudart().cudaHostUnregister(address)
        del self._pinned[address]

    def open(self, device: Sequence[torch.Tensor]) -> None:
        """Note the tensors' addresses, and measure the costs of copies of their page sizes. The
        caller keeps the tensors alive."""
        self._device_regions = [Regions.from_tensors(each) for each in self._divide(device)]
        self._block_bytes = self._device_regions[0].block_bytes
        sizes = [page for regions in self._device_regions for page in regions.pages.tolist()]
        if sizes:
            self._measure(min(sizes), aligned=not any(size % 16 for size in sizes))

    def divide(self, groups: Sequence[Sequence[PagePart]]) -> None:
        """Note the groups."""
        self._parts = groups

    def add_host_chunk(self, regions: Sequence[torch.Tensor]) -> None:
        """Replace the lists of addresses; copies under way keep theirs."""
        chunk = self._divide(regions)
        if self._host_regions:
            pairs = zip(self._host_regions, chunk, strict=True)
            self._host_regions = [before.with_chunk(each) for before, each in pairs]
        else:
            self._host_regions = [Regions.from_tensors(each) for each in chunk]
        both = zip(self._device_regions, self._host_regions, strict=True)
        self._classes, *self._divided = (
            classify_regions(device, host, self._queues.kernel_on) for device, host in both
        )

    def _divide(self, regions: Sequence[torch.Tensor]) -> list[Sequence[torch.Tensor]]:
        """All, then by layer group."""
        return [
            regions,
            *(
                [regions[part.region][:, part.start : part.stop] for part in parts]
                for parts in self._parts
            ),
        ]

    def mark_compute(self) -> CudaMark:
        """An event on the compute stream."""
        return CudaMark(self._queues.mark(torch.cuda.current_stream(self._device)))

    def barrier(self) -> Barrier | None:
        """An event on the compute stream."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def enter_thread(self, direction: Direction) -> None:
        torch.cuda.set_device(self._device)

    def copy(
        self, direction: Direction, transfer: Transfer, barrier: Barrier | None
    ) -> CudaPending:
        return self._copy(direction, transfer, barrier, self._classes, keep_lock=False)

    def copy_by_layer(
        self, transfer: Transfer, barrier: Barrier | None, *, quickly: bool
    ) -> Iterator[CudaPending]:
        """``quickly``: keep Python's interpreter lock."""
        for classes in self._divided:
            yield self._copy(Direction.LOAD, transfer, barrier, classes, keep_lock=quickly)

    def copy_quickly(
        self, direction: Direction, transfer: Transfer, barrier: Barrier | None
    ) -> CudaPending:
        """Keep Python's interpreter lock. The thread that takes in requests may hold it for
        milliseconds: with a release at each driver call, queueing took longer than copying
        (docs/measurements.md, "Engines")."""
        return self._copy(direction, transfer, barrier, self._classes, keep_lock=True)

    def is_quick(self, direction: Direction, transfer: Transfer) -> bool:
        """True for loads of few descriptors, not counting those that the kernel copies. No request
        waits for a store."""
        num_pairs = len(transfer.device_blocks)
        num_bytes = num_pairs * self._block_bytes
        if direction is Direction.STORE or num_bytes > _QUICK_BYTES:
            return False
        groups = self._divided if transfer.overlaps and self._divided else [self._classes]
        by_dma = sum(
            len(regions.device.pages)
            for classes in groups
            for regions in classes
            if self._copy_path != "kernel" and regions.page >= self._costs[direction].crossing
        )
        return num_pairs * by_dma <= _QUICK_DESCRIPTORS  # at most: neighbours merge

    def close(self) -> None:
        for direction in Direction:
            with suppress(RuntimeError):  # a broken device copies nothing more
                self._queues.drain(direction)
        for address in list(self._pinned):
            self._release_host(address)

    # One copy

    def _copy(
        self,
        direction: Direction,
        transfer: Transfer,
        barrier: Barrier | None,
        classes: Sequence[RegionClass],
        *,
        keep_lock: bool,
    ) -> CudaPending:
        """Queue the copy of the blocks' bytes in ``classes``. ``keep_lock``: as for
        ``SubmitDma``."""
        pending = CudaPending(self._queues.begin(direction, barrier), [classes])
        try:
            self._queue(pending, direction, transfer, classes, keep_lock=keep_lock)
        except BaseException:
            # Some pieces may be queued. The failed transfer's blocks are given to others, and host
            # memory is given back at shutdown: no piece may write there after that.
            self._queues.drain(direction)
            raise
        return pending

    def _queue(
        self,
        pending: CudaPending,
        direction: Direction,
        transfer: Transfer,
        classes: Sequence[RegionClass],
        *,
        keep_lock: bool,
    ) -> None:
        queues = self._queues
        blocks = direction.sides(transfer.device_blocks, transfer.host_blocks)
        block_bytes = sum(regions.device.block_bytes for regions in classes)
        unmarked_bytes, unmarked_seconds = 0, 0.0
        by_kernel, last = False, None
        for first, stop in self._stretches(classes, transfer):
            # Plan one stretch, while the device copies the one before.
            source_blocks, destination_blocks = (side[first:stop] for side in blocks)
            extents = find_extents(*classes[0].sides(direction), source_blocks, destination_blocks)
            choices = [
                self._choose(direction, regions, extents, stop - first) for regions in classes
            ]
            seconds = sum(choice.seconds for choice in choices)
            pace = seconds / ((stop - first) * block_bytes)
            # Queue it, with an event after every few pieces, so that progress can be seen.
            for piece in queues.submit(direction, classes, extents, choices, keep_lock=keep_lock):
                pending.kept_alive.append(piece.arguments)
                by_kernel, last = by_kernel or piece.path == "kernel", piece
                pending.num_bytes[piece.path] += piece.num_bytes
                unmarked_bytes += piece.num_bytes
                unmarked_seconds += piece.num_bytes * pace
                if unmarked_bytes >= _MARK_BYTES:
                    pending.add_mark(queues.mark(piece.stream), unmarked_seconds)
                    unmarked_bytes, unmarked_seconds = 0, 0.0
        # The last event ends the copy. Where the kernel took part, it must be behind both streams.
        if by_kernel or last is None:
            pending.add_mark(queues.join(direction), unmarked_seconds)
        elif unmarked_bytes:
            pending.add_mark(queues.mark(last.stream), unmarked_seconds)

    def _stretches(
        self, classes: Sequence[RegionClass], transfer: Transfer
    ) -> Iterator[tuple[int, int]]:
        """First pair of blocks of each stretch, and the one behind its last."""
        num_regions = sum(len(regions.device.pages) for regions in classes)
        if not num_regions:
            return iter(())
        first_class = classes[0]
        require_blocks_within(transfer, first_class.device.num_blocks, first_class.host.num_blocks)
        block_bytes = sum(regions.device.block_bytes for regions in classes)
        first = min(_FIRST_DESCRIPTORS // num_regions, _FIRST_BYTES // block_bytes)
        at_once = _STRETCH_DESCRIPTORS // num_regions
        return in_stretches(len(transfer.device_blocks), max(1, first), max(1, at_once))

    def _choose(
        self, direction: Direction, regions: RegionClass, extents: Extents, num_pairs: int
    ) -> PathChoice:
        """The path of each extent, and how long all of them take in all regions."""
        costs, num_regions = self._costs[direction], len(regions.device.pages)
        choice = costs.choose(extents, num_pairs, regions.page, num_regions)
        return choice._replace(by_kernel=True) if self._copy_path == "kernel" else choice

    # Measuring, at start

    def _measure(self, smallest_page: int, aligned: bool) -> None:
        """Time copies of descriptors of ``smallest_page`` bytes and more, in both directions."""
        if self._copy_path == "kernel" or (
            self._copy_path == "auto" and aligned and smallest_page < 2 * copy_costs.LARGEST_SIZE
        ):
            self._use_kernel()
        started = time.monotonic()
        sizes = copy_costs.sizes_from(smallest_page)
        num_bytes = copy_costs.SCRATCH_BYTES
        device = torch.empty(num_bytes, dtype=torch.int8, device=self._device)
        with using_reserve():  # soon given back
            host = self.allocate_host(num_bytes)
        for direction in Direction:
            self._costs[direction] = copy_costs.measure_direction(
                self._queues, direction, sizes, device, host
            )
        self._release_host(host.data_ptr())
        logger.info(
            "Copies measured in %.2f s: %s", time.monotonic() - started, self.describe_paths()
        )

    def describe_paths(self) -> str:
        """The measurements in one line: by direction, the size below which the kernel copies, and
        GB/s."""
        return "; ".join(f"{way.value}: {costs.describe()}" for way, costs in self._costs.items())

    def _use_kernel(self) -> None:
        try:
            from simple_offload.backends.cuda import kernel  # noqa: F401 - imports Triton
        except ImportError as error:
            if self._copy_path == "kernel":
                raise ConfigError(
                    f"copy_path='kernel': Triton cannot be imported ({error}). "
                    "Allowed without it: 'auto' or 'dma'"
                ) from error
            logger.info("No copy kernel, Triton cannot be imported (%s): all by DMA", error)
            return
        self._queues.kernel_on = self._device


@contextmanager
def _outside_graph_capture() -> Iterator[None]:
    """Allow this thread calls that would break a CUDA graph which another thread is capturing:
    host memory is pinned while vLLM captures its graphs."""
    from cuda.bindings import driver

    relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    _, before = driver.cuThreadExchangeStreamCaptureMode(relaxed)
    try:
        yield
    finally:
        driver.cuThreadExchangeStreamCaptureMode(before)


def pci_address(index: int) -> str:
    """PCI address of the device with this number, such as "0000:1b:00.0"."""
    from cuda.bindings import driver

    _, handle = driver.cuDeviceGet(index)
    _, address = driver.cuDeviceGetPCIBusId(32, handle)
    return str(address.decode().strip("\0"))
