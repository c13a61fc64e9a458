"""Host memory for a device: of exact size, in huge pages, near the device, every page in place."""

import ctypes
import mmap
import platform
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch

from simple_offload import memory
from simple_offload.logs import get_logger

logger = get_logger(__name__)

_TOUCH_THREADS = 8
_TOUCH_BYTES = 8 << 20
"""Bytes that one thread clears at a time; a multiple of every page size."""
_MBIND = {"x86_64": 237, "aarch64": 235}  # number of the system call
_PREFERRED = 1  # MPOL_PREFERRED: another node if this one is full


def map_memory(num_bytes: int, numa_node: int | None = None) -> torch.Tensor:
    """Zeroed memory of its own mapping, int8 ``[num_bytes]``, with every page in place.

    Several threads touch the pages, since a driver that pins untouched pages clears them with one
    thread. Huge pages make touching and pinning cheaper still. ``numa_node``: the node to put the
    pages on. Raises MemoryShortageError if there is too little: otherwise the kernel would kill the
    process when a page is touched.
    """
    try:
        mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:  # a kernel that promises no more than it has (vm.overcommit_memory=2)
        size = f"{num_bytes / memory.GIB:.2f} GiB"
        raise memory.MemoryShortageError(f"{size} of host memory: {error}") from error
    # A fork would copy each pinned page at once (Linux 5.10 and later, copy_present_page in
    # mm/memory.c), and the child has no use for any.
    for advice in (mmap.MADV_DONTFORK, mmap.MADV_HUGEPAGE):
        with suppress(OSError):  # a kernel without it: slower, not wrong
            mapping.madvise(advice)
    tensor = torch.frombuffer(mapping, dtype=torch.int8)
    put_in_place(tensor, numa_node)
    return tensor


def put_in_place(tensor: torch.Tensor, numa_node: int | None = None) -> None:
    """Put every page of untouched memory in place, as ``map_memory`` does."""
    with memory.claim(tensor.nbytes):
        if numa_node is not None:
            _prefer_node(tensor, numa_node)
        _touch(tensor)


def node_of_pci_device(address: str) -> int | None:
    """NUMA node of the PCI device at ``address`` (such as "0000:1b:00.0"); None on a machine with
    one node, or if the node is unknown."""
    if len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) < 2:
        return None
    try:
        node = int(Path(f"/sys/bus/pci/devices/{address.lower()}/numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def _touch(tensor: torch.Tensor) -> None:
    """Clear every byte, in several threads."""
    num_bytes, address = tensor.nbytes, tensor.data_ptr()
    with ThreadPoolExecutor(_TOUCH_THREADS, thread_name_prefix="simple-offload-touch") as pool:
        for _ in pool.map(
            lambda start: ctypes.memset(address + start, 0, min(_TOUCH_BYTES, num_bytes - start)),
            range(0, num_bytes, _TOUCH_BYTES),
        ):
            pass


def _prefer_node(tensor: torch.Tensor, node: int) -> None:
    number = _MBIND.get(platform.machine())
    if number is None:
        return
    mask = (ctypes.c_ulong * 16)()
    mask[node // 64] = 1 << node % 64
    libc = ctypes.CDLL(None, use_errno=True)
    failed = libc.syscall(
        number,
        ctypes.c_void_p(tensor.data_ptr()),
        ctypes.c_ulong(tensor.nbytes),
        ctypes.c_int(_PREFERRED),
        ctypes.byref(mask),
        ctypes.c_ulong(len(mask) * 64),
        ctypes.c_uint(0),
    )
    if failed:
        _on_unbound(node, ctypes.get_errno())


@cache
def _on_unbound(node: int, errno: int) -> None:
    """Log it once: a tier has thousands of chunks."""
    logger.info("Host memory is not bound to NUMA node %d: errno %d", node, errno)
