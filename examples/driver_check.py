"""``python -m examples.driver_check``: does cuMemcpyBatchAsync of this CUDA driver copy right?

Needs an NVIDIA GPU and torch, nothing else: the file can be copied and run by itself. Driver
580.159 corrupts data, or crashes, when a batch from pinned host memory to the device has a larger
descriptor behind a smaller one. Each case runs in a process of its own.
"""

import argparse
import ctypes
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

KIB = 1 << 10
CASES = {
    "4 KiB, then 8 KiB": (4 * KIB, 8 * KIB),
    "4 KiB, then 12 KiB": (4 * KIB, 12 * KIB),
    "512 B, 1 KiB, then 16 KiB": (512, KIB, 16 * KIB),
}
"""Sizes of pages, in bytes, in the order of their descriptors."""
ORDERS = ("as given", "largest first", "by a call a size")
NUM_PAGES = 4000
"""Of each size."""
SEEDS = range(4)
RIGHT, WRONG = 0, 1
_SECONDS = 60
"""After which a case hangs: it takes a few, and most of them to import torch."""
_SINCE = 12080
"""The CUDA version whose function takes nine arguments."""
_ANY_ORDER = 3
"""CU_MEMCPY_SRC_ACCESS_ORDER_ANY. The other orders show the fault too."""


class _Attributes(ctypes.Structure):
    _fields_ = (
        ("source_access_order", ctypes.c_uint),
        ("hints", ctypes.c_uint * 4),
        ("flags", ctypes.c_uint),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line a case and order; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="driver_check",
        description="Copies pages of several sizes to the GPU by cuMemcpyBatchAsync, and compares.",
        epilog="exit codes: 0 every order copies right; 1 some order does not; 2 wrong usage",
    )
    parser.add_argument("--one", nargs=2, metavar=("CASE", "ORDER"), help="in this process")
    arguments = parser.parse_args(argv)
    if arguments.one:
        case, order = arguments.one
        return WRONG if sum(num_wrong(CASES[case], order, seed) for seed in SEEDS) else RIGHT
    print(f"{torch.cuda.get_device_name()}, {_driver()}")
    worst = RIGHT
    for case in CASES:
        for order in ORDERS:
            command = [sys.executable, __file__, "--one", case, order]
            result = _result(command)
            worst = max(worst, RIGHT if result == "right" else WRONG)
            print(f"{case}, {order}: {result}", flush=True)
    return worst


def _result(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, stderr=subprocess.DEVNULL, check=False, timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        return f"no end after {_SECONDS} s"
    return {RIGHT: "right", WRONG: "wrong bytes"}.get(done.returncode, f"crash {done.returncode}")


def num_wrong(sizes: Sequence[int], order: str, seed: int) -> int:
    """Pages whose bytes are wrong after one load of NUM_PAGES pages of each size."""
    rng = random.Random(seed)
    regions = []
    for size in sizes:
        host = torch.empty((2 * NUM_PAGES, size), dtype=torch.uint8, pin_memory=True).random_()
        device = torch.zeros_like(host, device="cuda")
        sources, targets = (rng.sample(range(2 * NUM_PAGES), NUM_PAGES) for _ in range(2))
        regions.append((size, host, device, sources, targets))
    descriptors = [
        (device[target].data_ptr(), host[source].data_ptr(), size)
        for place in range(NUM_PAGES)
        for size, host, device, sources, targets in regions
        for source, target in [(sources[place], targets[place])]
    ]
    if order != "as given":
        descriptors.sort(key=lambda each: -each[2])
    torch.cuda.synchronize()
    batches = [descriptors]
    if order == "by a call a size":
        batches = [[each for each in descriptors if each[2] == size] for size in sizes]
    for batch in batches:
        _copy(batch)
    torch.cuda.synchronize()
    return sum(
        int((device[targets].cpu() != host[sources]).any(dim=1).sum())
        for _, host, device, sources, targets in regions
    )


def _copy(descriptors: Sequence[tuple[int, int, int]]) -> None:
    driver = ctypes.CDLL("libcuda.so.1")
    address, status = ctypes.c_void_p(), ctypes.c_int()
    driver.cuGetProcAddress_v2(
        b"cuMemcpyBatchAsync",
        ctypes.byref(address),
        _SINCE,
        ctypes.c_uint64(0),
        ctypes.byref(status),
    )
    if not address.value:
        raise SystemExit("this driver has no cuMemcpyBatchAsync: it is older than CUDA 12.8")
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    function = ctypes.CFUNCTYPE(
        *(ctypes.c_uint, pointer, pointer, pointer, size, pointer, pointer, size, pointer, pointer)
    )(address.value)
    count = len(descriptors)
    targets, sources, sizes = ((size * count)(*values) for values in zip(*descriptors, strict=True))
    attributes, first, failed = _Attributes(_ANY_ORDER), size(0), size(0)
    stream = torch.cuda.Stream()
    code = function(
        ctypes.addressof(targets),
        ctypes.addressof(sources),
        ctypes.addressof(sizes),
        count,
        ctypes.addressof(attributes),
        ctypes.addressof(first),
        1,
        ctypes.addressof(failed),
        stream.cuda_stream,
    )
    if code:
        raise SystemExit(f"cuMemcpyBatchAsync: error {code} at descriptor {failed.value}")
    stream.synchronize()


def _driver() -> str:
    file = Path("/proc/driver/nvidia/version")
    line = file.read_text().splitlines()[0] if file.exists() else "driver unknown"
    return f"{' '.join(line.split())}, torch {torch.__version__}"


if __name__ == "__main__":
    sys.exit(main())
