"""Copies by DMA: one driver call for all descriptors, or one per descriptor on old drivers."""

import ctypes
from collections.abc import Callable

import numpy as np
import torch

from simple_offload.backends.base import Direction
from simple_offload.backends.descriptors import Descriptors
from simple_offload.logs import get_logger

logger = get_logger(__name__)

# CUmemcpySrcAccessOrder. Compute may write a store's source until the store's turn in the stream;
# a load's source is host memory that does not change meanwhile.
_IN_STREAM_ORDER, _ANY_ORDER = 1, 3
_BATCH_SINCE = 12080
"""The CUDA version (12.8) whose cuMemcpyBatchAsync is used: later versions dropped the argument for
the index of the failed entry."""


SubmitDma = Callable[[Descriptors, Direction, torch.cuda.Stream, bool], None]
"""A function that queues descriptors, given by descending size, on a stream. With ``keep_lock`` it
does not release Python's interpreter lock, where that is possible; for few descriptors only. Raises
CudaCopyError."""


class CudaCopyError(RuntimeError):
    """The CUDA driver refused a copy, or memory; the message has the error's name."""


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_uint), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    _fields_ = (
        ("source_access_order", ctypes.c_uint),
        ("source_hint", _Location),
        ("destination_hint", _Location),
        ("flags", ctypes.c_uint),
    )


def largest_first(plan: Descriptors) -> Descriptors:
    """The same copies by descending size.

    cuMemcpyBatchAsync of driver 580.159 (CUDA 13, H200) corrupts data or crashes when a batch from
    host to device has a larger descriptor after a smaller one (seen from 512 B to 16 KiB). Sorted
    by descending size it copies correctly, which test_cuda.py checks. ``examples/driver_check.py``
    shows it without this connector. See docs/measurements.md.
    """
    if not len(plan.sizes) or bool((plan.sizes[1:] <= plan.sizes[:-1]).all()):
        return plan
    return plan.select(np.argsort(plan.sizes, kind="stable")[::-1])


def resolve_dma() -> SubmitDma:
    """A function that calls cuMemcpyBatchAsync once for all descriptors. Where the driver lacks
    it, log a warning and return ``copy_one_by_one``."""
    from cuda.bindings import driver

    # By address: bindings need not have this version's signature.
    error, address, _ = driver.cuGetProcAddress(b"cuMemcpyBatchAsync", _BATCH_SINCE, 0)
    if error != driver.CUresult.CUDA_SUCCESS or not address:
        logger.warning(
            "This CUDA driver has no cuMemcpyBatchAsync (%s): copying one descriptor at a time, "
            "which costs the host more",
            error.name,
        )
        return copy_one_by_one
    # Twice, since ctypes decides by the type whether a call releases the interpreter lock.
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    types = ctypes.c_uint, pointer, pointer, pointer, size, pointer, pointer, size, pointer, pointer
    without_lock = ctypes.CFUNCTYPE(*types)(int(address))
    with_lock = ctypes.PYFUNCTYPE(*types)(int(address))

    def copy_batch(
        plan: Descriptors, direction: Direction, stream: torch.cuda.Stream, keep_lock: bool
    ) -> None:
        function = with_lock if keep_lock else without_lock
        order = _ANY_ORDER if direction is Direction.LOAD else _IN_STREAM_ORDER
        attributes = _Attributes(source_access_order=order)
        # One entry: attributes hold from their index on (CUDA's reference; vllm#53860 reads it as
        # one entry a descriptor).
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

    return copy_batch


def copy_one_by_one(
    plan: Descriptors,
    direction: Direction,  # noqa: ARG001 - sources are always read in stream order
    stream: torch.cuda.Stream,
    keep_lock: bool,  # noqa: ARG001 - cuda-bindings releases it
) -> None:
    """Call cuMemcpyAsync for each descriptor. Raises CudaCopyError."""
    from cuda.bindings import driver

    for index, (destination, source, size) in enumerate(
        zip(*(part.tolist() for part in plan), strict=True)
    ):
        (error,) = driver.cuMemcpyAsync(destination, source, size, stream.cuda_stream)
        if error != driver.CUresult.CUDA_SUCCESS:
            raise CudaCopyError(
                f"cuMemcpyAsync: {error.name} at descriptor {index} of {len(plan.sizes)}"
            )
