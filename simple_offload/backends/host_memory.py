"""Host memory for a device to reach: exact size, huge pages, near the device, touched at once."""

import ctypes
import mmap
import platform
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import torch

from simple_offload.logs import get_logger

logger = get_logger(__name__)

_TOUCH_THREADS = 8
_TOUCH_BYTES = 32 << 20
"""What one thread clears at a time; a multiple of every page size."""
_MBIND = {"x86_64": 237, "aarch64": 235}  # number of the system call
_PREFERRED = 1  # MPOL_PREFERRED: another node where this one is full
_NODES = Path("/sys/devices/system/node")


def map_memory(num_bytes: int, numa_node: int | None = None) -> torch.Tensor:
    """Zeroed memory of its own mapping, int8 ``[num_bytes]``, with every page in place.

    A driver that pins untouched pages clears them with one thread, so several threads touch
    them here; huge pages make that and the pinning cheaper still. ``numa_node``: where to put
    the pages. Raises MemoryError when the machine has less than ``num_bytes`` available: pages
    that are not there would end the process, not the allocation.
    """
    available = psutil.virtual_memory().available
    if num_bytes > available:
        raise MemoryError(
            f"{num_bytes / 2**30:.2f} GiB of host memory asked for, "
            f"{available / 2**30:.2f} GiB available"
        )
    mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            mapping.madvise(mmap.MADV_HUGEPAGE)
        except OSError as error:  # a kernel without them: slower, not wrong
            logger.debug("No huge pages: %s", error)
    tensor = torch.frombuffer(mapping, dtype=torch.int8)
    if numa_node is not None:
        _prefer_node(tensor, numa_node)
    with ThreadPoolExecutor(_TOUCH_THREADS, thread_name_prefix="simple-offload-touch") as pool:
        starts = range(0, num_bytes, _TOUCH_BYTES)
        address = tensor.data_ptr()
        for _ in pool.map(
            lambda start: ctypes.memset(address + start, 0, min(_TOUCH_BYTES, num_bytes - start)),
            starts,
        ):
            pass
    return tensor


def node_of_pci_device(address: str) -> int | None:
    """NUMA node of the PCI device at ``address`` (such as "0000:1b:00.0"); None where there is
    one node only, or nothing is known."""
    if len(list(_NODES.glob("node[0-9]*"))) < 2:
        return None
    try:
        node = int(Path(f"/sys/bus/pci/devices/{address.lower()}/numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


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
        logger.info("Host memory is not bound to NUMA node %d: errno %d", node, ctypes.get_errno())
