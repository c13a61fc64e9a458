"""CudaBackend: batched DMA between pinned host memory and a CUDA device."""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from simple_offload.backends.base import Barrier, Direction, require_blocks_within
from simple_offload.backends.plan import Descriptors, Regions, plan_copies
from simple_offload.logs import get_logger
from simple_offload.metadata import Transfer

logger = get_logger(__name__)

# CUmemcpySrcAccessOrder: a store's source may be written until its turn in the stream comes,
# a load's source is host memory that nobody writes to meanwhile.
_IN_STREAM_ORDER, _ANY_ORDER = 1, 3
_BATCH_SINCE = 12080
"""The CUDA version (12.8) whose cuMemcpyBatchAsync is asked for: later ones dropped the index
of the entry that failed from its arguments."""


class CudaCopyError(RuntimeError):
    """A copy that the CUDA driver refused; its message has the error's name."""


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_uint), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    _fields_ = (
        ("source_access_order", ctypes.c_uint),
        ("source_hint", _Location),
        ("destination_hint", _Location),
        ("flags", ctypes.c_uint),
    )


@dataclass(slots=True, eq=False)
class CudaPending:
    """A copy under way on a stream."""

    event: torch.cuda.Event
    descriptors: Descriptors
    """Kept: the driver may read the addresses until the copy has ended."""

    def done(self) -> bool:
        return bool(self.event.query())

    def wait(self) -> None:
        self.event.synchronize()


class CudaBackend:
    """Copies of each direction go to a stream of their own, so loads and stores overlap each
    other and the compute stream."""

    def __init__(self) -> None:
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._streams = {direction: torch.cuda.Stream(self._device) for direction in Direction}
        self._submit = _resolve_batch() or _copy_one_by_one
        self._registered: list[torch.Tensor] = []

    def allocate_host(self, num_blocks: int, page_bytes: int) -> torch.Tensor:
        """Pinned memory of exactly that size. PyTorch's own pinned allocator would round it up
        to a power of two; and pages are touched first, by several threads, because the driver
        would do so with one."""
        tensor = torch.empty((num_blocks, page_bytes), dtype=torch.int8).zero_()
        error = torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0)
        if int(error) != 0:
            raise CudaCopyError(
                f"cudaHostRegister cannot pin {tensor.nbytes} bytes: {error}. "
                "Is the lock limit (ulimit -l) high enough?"
            )
        self._registered.append(tensor)
        return tensor

    def open(self, device: Sequence[torch.Tensor], host: Sequence[torch.Tensor]) -> None:
        """The tensors are only read for their addresses; somebody else keeps them alive."""
        self._device_regions, self._host_regions = Regions.of(device), Regions.of(host)
        self._num_blocks = (len(device[0]), len(host[0])) if device else (0, 0)

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
        device, host = self._device_regions, self._host_regions
        if len(device.bases):
            require_blocks_within(transfer, *self._num_blocks)
        if direction is Direction.LOAD:
            plan = plan_copies(host, device, transfer.host_blocks, transfer.device_blocks)
        else:
            plan = plan_copies(device, host, transfer.device_blocks, transfer.host_blocks)
        stream = self._streams[direction]
        if barrier is not None:
            assert isinstance(barrier, torch.cuda.Event)
            stream.wait_event(barrier)
        if len(plan.sizes):
            plan = largest_first(plan)
            self._submit(plan, direction, stream)
        event = torch.cuda.Event()
        event.record(stream)
        return CudaPending(event, plan)

    def close(self) -> None:
        for tensor in self._registered:
            torch.cuda.cudart().cudaHostUnregister(tensor.data_ptr())
        self._registered.clear()


def largest_first(plan: Descriptors) -> Descriptors:
    """The same copies by descending size.

    cuMemcpyBatchAsync of driver 580.159 (CUDA 13, H200) corrupts data, or crashes, when a host
    to device batch has a larger descriptor after a smaller one (seen from 512 B to 16 KiB); the
    other way round it is right, which test_cuda.py checks. See docs/measurements.md.
    """
    order = np.argsort(plan.sizes, kind="stable")[::-1]
    return Descriptors(*(np.ascontiguousarray(part[order]) for part in plan))


Submit = Callable[[Descriptors, Direction, torch.cuda.Stream], None]


def _resolve_batch() -> Submit | None:
    """cuMemcpyBatchAsync, or None (and a warning) where the driver has none."""
    from cuda.bindings import driver

    error, address, _ = driver.cuGetProcAddress(b"cuMemcpyBatchAsync", _BATCH_SINCE, 0)
    if error != driver.CUresult.CUDA_SUCCESS or not address:
        logger.warning(
            "This CUDA driver has no cuMemcpyBatchAsync (%s): copying one descriptor at a time, "
            "which costs the host more",
            error.name,
        )
        return None
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    function = ctypes.CFUNCTYPE(
        ctypes.c_uint, pointer, pointer, pointer, size, pointer, pointer, size, pointer, pointer
    )(int(address))

    def submit(plan: Descriptors, direction: Direction, stream: torch.cuda.Stream) -> None:
        order = _ANY_ORDER if direction is Direction.LOAD else _IN_STREAM_ORDER
        attributes = _Attributes(source_access_order=order)
        first_index, failed = size(0), size(2**64 - 1)
        code = function(
            plan.destinations.ctypes.data,
            plan.sources.ctypes.data,
            plan.sizes.ctypes.data,
            len(plan.sizes),
            ctypes.addressof(attributes),
            ctypes.addressof(first_index),
            1,
            ctypes.addressof(failed),
            stream.cuda_stream,
        )
        if code:
            raise CudaCopyError(
                f"cuMemcpyBatchAsync: {driver.CUresult(code).name} at descriptor "
                f"{failed.value} of {len(plan.sizes)}"
            )

    return submit


def _copy_one_by_one(plan: Descriptors, _: Direction, stream: torch.cuda.Stream) -> None:
    """cuMemcpyAsync for each descriptor; sources are read in stream order."""
    from cuda.bindings import driver

    for index, (destination, source, size) in enumerate(
        zip(*(part.tolist() for part in plan), strict=True)
    ):
        (error,) = driver.cuMemcpyAsync(destination, source, size, stream.cuda_stream)
        if error != driver.CUresult.CUDA_SUCCESS:
            raise CudaCopyError(
                f"cuMemcpyAsync: {error.name} at descriptor {index} of {len(plan.sizes)}"
            )
