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

import numpy as np
import numpy.typing as npt
import torch
import torch_npu

from simple_offload.backends.base import Direction
from simple_offload.backends.npu.acl import Acl
from simple_offload.backends.npu.backend import NpuBackend
from simple_offload.config import ConfigError
from simple_offload.metadata import Transfer

show = functools.partial(print, flush=True)
Blocks = npt.NDArray[np.int64]


class Memory:
    """One region of ``num_blocks`` blocks of ``page`` bytes on each side, of random bytes, and
    the backend that copies between them."""

    def __init__(self, path: str, page: int, num_blocks: int) -> None:
        self.backend = NpuBackend(path)
        host = self.backend.allocate_host(num_blocks * page).view(num_blocks, page)
        self.host = host.random_(-128, 128).numpy()
        self.device = torch.randint(-128, 128, (num_blocks, page), dtype=torch.int8).to("npu")
        self.backend.open([self.device])
        self.backend.add_host_chunk([host])

    def copy(self, direction: Direction, device_blocks: Blocks, host_blocks: Blocks) -> None:
        """Return when the copy, which comes after compute queued so far, has ended."""
        transfer = Transfer(0, device_blocks, host_blocks)
        self.backend.copy(direction, transfer, self.backend.barrier()).wait()

    def wrong_blocks(self, direction: Direction, device_blocks: Blocks, host_blocks: Blocks) -> int:
        """Copy, and count the blocks of both sides with wrong bytes."""
        device, host = self.device.cpu().numpy().copy(), self.host.copy()
        if direction is Direction.LOAD:
            device[device_blocks] = host[host_blocks]
        else:
            host[host_blocks] = device[device_blocks]
        self.copy(direction, device_blocks, host_blocks)
        now = self.device.cpu().numpy()
        return int((now != device).any(axis=1).sum() + (self.host != host).any(axis=1).sum())

    def passes_compute(self, direction: Direction, mib: int) -> bool:
        """Whether a copy overtakes compute that was queued before it. The compute is
        device-to-device copies of the same blocks. It takes far longer than the submission of the
        copy."""
        scratch = torch.empty((2, mib << 20), dtype=torch.int8, device="npu")
        value = torch.full_like(self.device.cpu(), 5).to("npu")
        read = torch.empty_like(self.device)
        before = self.device.cpu()
        blocks = np.arange(len(self.device))
        torch_npu.npu.synchronize()
        for _ in range(100):
            scratch[0].copy_(scratch[1], non_blocking=True)
        if direction is Direction.STORE:
            self.device.copy_(value, non_blocking=True)
        else:
            read.copy_(self.device, non_blocking=True)
        self.copy(direction, blocks, blocks)
        torch_npu.npu.synchronize()
        if direction is Direction.STORE:
            return not bool((self.host == 5).all())
        return not torch.equal(read.cpu(), before)


@contextmanager
def memory(path: str, page: int, num_blocks: int) -> Iterator[Memory]:
    """Memory of both sides, which is freed at the end."""
    made = Memory(path, page, num_blocks)
    try:
        yield made
    finally:
        torch_npu.npu.synchronize()
        made.backend.close()


def scattered(count: int, seed: int) -> Blocks:
    """Blocks without neighbours."""
    return 2 * np.random.default_rng(seed).permutation(count)


def check(path: str, mib: int) -> int:
    """Print right and wrong results; return the number of wrong ones."""
    wrong = 0
    for page, most in ((512, 20_000), (4097, 1000), (64 << 10, 4097), (1 << 20, 40)):
        count = min(most, (mib << 20) // page)
        with memory(path, page, 2 * count) as sides:
            for direction in Direction:
                bad = sides.wrong_blocks(direction, scattered(count, 1), scattered(count, 2))
                wrong += bad
                show(f"{path:6} {direction.value:5} {count:6} x {page:7} B: {bad} wrong blocks")
    for direction in Direction:
        with memory(path, 4096, 64) as sides:
            bad = sides.passes_compute(direction, mib)
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
                    pending = sides.backend.copy(direction, transfer, None)
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
