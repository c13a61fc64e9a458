"""The first run on an Ascend NPU: whether NpuBackend copies the right bytes in the right order, and
its bandwidth. Needs torch, torch_npu and CANN, and vLLM to import from; no engine runs.

    python -m tests.backends.npu_hardware check bench
"""

import argparse
import functools
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch_npu

from simple_offload.backends.base import Direction
from simple_offload.backends.npu.acl import Acl
from simple_offload.backends.npu.backend import NpuBackend
from simple_offload.config import ConfigError
from simple_offload.transfer import Transfer
from tests.backends.sides import Blocks, Sides

show = functools.partial(print, flush=True)


def wrong_blocks(sides: Sides, direction: Direction, device: Blocks, host: Blocks) -> int:
    """Copy, and count the blocks of both sides with wrong bytes."""
    expected = sides.expected(direction, device, host)
    sides.copy(direction, device, host, sides.backend.barrier()).wait()
    pairs = zip(expected, sides.contents(), strict=True)
    return sum(int((wanted[0] != now[0]).any(dim=1).sum()) for wanted, now in pairs)


def passes_compute(sides: Sides, direction: Direction, mib: int) -> bool:
    """Whether a copy overtakes compute that was queued before it. The compute is device-to-device
    copies of the same blocks. It takes far longer than the submission of the copy."""
    (device,) = sides.device
    scratch = torch.empty((2, mib << 20), dtype=torch.int8, device="npu")
    value = torch.full_like(device.cpu(), 5).to("npu")
    read = torch.empty_like(device)
    before = device.cpu()
    blocks = np.arange(len(device))
    torch_npu.npu.synchronize()
    for _ in range(100):
        scratch[0].copy_(scratch[1], non_blocking=True)
    if direction is Direction.STORE:
        device.copy_(value, non_blocking=True)
    else:
        read.copy_(device, non_blocking=True)
    sides.copy(direction, blocks, blocks, sides.backend.barrier()).wait()
    torch_npu.npu.synchronize()
    if direction is Direction.STORE:
        return not bool((sides.host[0] == 5).all())
    return not torch.equal(read.cpu(), before)


@contextmanager
def memory(path: str, page: int, num_blocks: int) -> Iterator[Sides]:
    """One region of memory on both sides, which is freed at the end."""
    backend = NpuBackend(path)
    try:
        yield Sides(backend, [page], num_blocks, device="npu")
    finally:
        torch_npu.npu.synchronize()
        backend.close()


def scattered(count: int, seed: int) -> npt.NDArray[np.int64]:
    """Blocks without neighbours."""
    return 2 * np.random.default_rng(seed).permutation(count)


def check(path: str, mib: int) -> int:
    """Print right and wrong results; return the number of wrong ones."""
    wrong = 0
    for page, most in ((512, 20_000), (4097, 1000), (64 << 10, 4097), (1 << 20, 40)):
        count = min(most, (mib << 20) // page)
        with memory(path, page, 2 * count) as sides:
            for direction in Direction:
                bad = wrong_blocks(sides, direction, scattered(count, 1), scattered(count, 2))
                wrong += bad
                show(f"{path:6} {direction.value:5} {count:6} x {page:7} B: {bad} wrong blocks")
    for direction in Direction:
        with memory(path, 4096, 64) as sides:
            bad = passes_compute(sides, direction, mib)
        wrong += bad
        show(f"{path:6} {direction.value:5} comes after compute: {'NO' if bad else 'yes'}")
    return wrong


def bench(path: str, mib: int, rounds: int) -> None:
    """Print the median GB/s of ``mib`` MiB in scattered descriptors, and the time that the thread
    spends to submit each."""
    for page in (4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20):
        count = (mib << 20) // page
        transfer = Transfer(0, scattered(count, 1), scattered(count, 2))
        with memory(path, page, 2 * count) as sides:
            for direction in Direction:
                seconds, submitting = [], []
                for _ in range(rounds + 1):
                    started = time.perf_counter()
                    pending: Any = sides.backend.copy(direction, transfer, None)
                    submitting.append(time.perf_counter() - started)
                    pending.wait()
                    seconds.append(time.perf_counter() - started)
                rate = count * page / statistics.median(seconds[1:]) / 1e9
                each = statistics.median(submitting[1:]) / count * 1e6
                show(
                    f"{path:6} {direction.value:5} {count:7} x {page:7} B: {rate:6.2f} GB/s, "
                    f"{each:.2f} us to submit each"
                )


def main() -> int:
    """Exit status: 1 when bytes were wrong."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("what", choices=("check", "bench"), nargs="+")
    parser.add_argument("--mib", type=int, default=256, help="size of a copy, at most")
    parser.add_argument("--rounds", type=int, default=10, help="of the benchmark")
    parser.add_argument("--path", choices=("batch", "single"), help="only this one (default: both)")
    options = parser.parse_args()
    torch_npu.npu.set_device(0)
    show(
        f"torch {torch.__version__}, torch_npu {torch_npu.__version__}, "
        f"CANN {Acl.load().version()}, {torch_npu.npu.get_device_name(0)}"
    )
    wrong = 0
    for path in (options.path,) if options.path else ("batch", "single"):
        try:
            NpuBackend(path)
        except ConfigError as error:
            show(f"{path}: {error}")
            continue
        if "check" in options.what:
            wrong += check(path, options.mib)
        if "bench" in options.what:
            bench(path, options.mib, options.rounds)
    if "check" in options.what:
        show(f"{wrong} WRONG" if wrong else "all right")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
