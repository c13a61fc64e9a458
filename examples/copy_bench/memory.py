"""What host memory that several processes share costs, beside memory of their own."""

import mmap
import multiprocessing
import os
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from contextlib import closing
from functools import partial
from itertools import product
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np
import torch

from examples.bench.tables import medians, optional
from examples.copy_bench.arena import rows
from examples.copy_bench.plan import KIB, MIB, size_text
from simple_offload.backends.base import CopyBackend, Direction
from simple_offload.backends.cuda.backend import CudaBackend
from simple_offload.backends.host import HostBackend
from simple_offload.backends.host_memory import put_in_place
from simple_offload.transfer import Transfer

ANONYMOUS, MEMFD = "anonymous", "memfd"
ADVISED, HUGETLB = "memfd, huge pages advised", "memfd, MFD_HUGETLB"
KINDS = (ANONYMOUS, MEMFD, ADVISED, HUGETLB)
ROUNDS = 3  # medians count: at the first touch of a page, a hypervisor may have to find memory
GIB, PIECES = 1 << 30, (2 * MIB, 64 * KIB)
PLACE, REGISTER, USED, HUGE = "in place, s", "register, s", "used, GiB", "in huge pages, GiB"
COPIES = {
    (way, size): f"{way.value} {size_text(size)}, GB/s" for size in PIECES for way in Direction
}
COLUMNS = (PLACE, REGISTER, *COPIES.values(), USED, HUGE)
PATIENCE_SECONDS, ALL_SECONDS = 90.0, 180.0  # for another process, and for all rounds
Numbers = dict[str, float]  # of one process and round, by column
MakeBackend = Callable[[], HostBackend | CudaBackend]
_barrier: Barrier


def run(
    found: list[dict[str, Any]],
    num_bytes: int,
    counts: Sequence[int],
    device: str,
    on_step: Callable[[str], None],
) -> None:
    """Add to ``found`` the numbers of each kind of memory, with each number of processes, or the
    error. ``on_step`` gets the name of each step before it begins."""
    for kind, count in product(KINDS, counts):
        on_step(f"{kind}, {count} processes")
        row: dict[str, Any] = {"kind": kind, "processes": count, "num_bytes": num_bytes}
        try:
            row["rounds"] = measure(kind, num_bytes, count, device)
            row["medians"] = [medians(rounds) for rounds in row["rounds"]]
        except Exception as error:  # noqa: BLE001 - whatever one fails with, the others can run
            traceback.print_exc()
            row["error"] = " ".join(f"{type(error).__name__}: {error}".split())
        found.append(row)


def table_lines(found: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The medians as a table in Markdown: a line for each process."""
    yield f"| kind | process | {' | '.join(COLUMNS)} |"
    yield "|---|---|" + "--:|" * len(COLUMNS)
    for row in found:
        for index, numbers in enumerate(row.get("medians", [{}])):
            cells = [optional(numbers.get(name), ".2f") for name in COLUMNS]
            if "error" in row:
                cells = [row["error"]]
            yield f"| {row['kind']} | {index} of {row['processes']} | {' | '.join(cells)} |"


def measure(
    kind: str, num_bytes: int, count: int, device: str, seconds: float = ALL_SECONDS
) -> list[list[Numbers]]:
    """The rounds of each process, within ``seconds``. Raises the first error. Leaves no process
    behind."""
    name = "HugePages_Free" if kind == HUGETLB else "MemAvailable"
    needed, free = num_bytes * (count if kind == ANONYMOUS else 1), meminfo()[name]
    if free < needed:
        raise MemoryError(f"{needed / GIB:.2f} GiB needed, {name} is {free / GIB:.2f} GiB")
    flags = os.MFD_CLOEXEC | (os.MFD_HUGETLB if kind == HUGETLB else 0)
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(count, timeout=PATIENCE_SECONDS)
    with (
        os.fdopen(os.memfd_create("copy_bench", flags)) as file,
        ProcessPoolExecutor(count, context, enter, (barrier,)) as pool,
    ):
        path = "" if kind == ANONYMOUS else f"/proc/{os.getpid()}/fd/{file.fileno()}"
        processes = [pool.submit(_process, i, kind, path, num_bytes, device) for i in range(count)]
        try:
            for process in wait(processes, seconds, FIRST_EXCEPTION).done:
                process.result()
            return [process.result(0) for process in processes]
        finally:
            if not all(process.done() for process in processes):
                for child in multiprocessing.active_children():
                    child.kill()


def enter(barrier: Barrier) -> None:
    """Begin a process, which meets the others at ``barrier``."""
    global _barrier  # noqa: PLW0603 - only a process that begins can be given a barrier
    _barrier = barrier


def _process(index: int, kind: str, path: str, num_bytes: int, device: str) -> list[Numbers]:
    """Numbers of each round. ``path``: the file of the memory that all share, or empty."""
    make_backend: MakeBackend = HostBackend
    if device == "cuda":
        torch.cuda.set_device(index % torch.cuda.device_count())
        make_backend = partial(CudaBackend, "dma")
    memory = torch.zeros(num_bytes, dtype=torch.int8, device=device)
    return [one_round(index, kind, path, memory, make_backend) for _ in range(ROUNDS)]


def one_round(
    index: int, kind: str, path: str, memory: torch.Tensor, make_backend: MakeBackend
) -> Numbers:
    """Take each step once, at the same time as the other processes. The first alone puts shared
    memory in place, and numbers its pieces. Raises RuntimeError if a copy brings wrong bytes."""
    numbers = {}
    _barrier.wait()  # all have unmapped the last round's memory
    if path and index == 0:
        os.truncate(path, 0)
        os.truncate(path, memory.nbytes)
    _barrier.wait()
    before = _machine_gib()
    _barrier.wait()
    host = _map(kind, path, memory.nbytes)
    if index == 0 or not path:
        numbers[PLACE] = _seconds(lambda: put_in_place(host))
        pieces = rows(host, min(PIECES))
        pieces[:, 0] = torch.arange(len(pieces))
    _barrier.wait()
    random = np.random.default_rng(index)
    with closing(make_backend()) as owner:
        numbers[REGISTER] = _seconds(lambda: owner.use_shared(host, is_first=False))
        _barrier.wait()
        numbers[USED], numbers[HUGE] = np.subtract(_machine_gib(), before).tolist()
        for size in PIECES:
            ours, theirs = (rows(side, size)[:, 0] for side in (memory, host))
            pairs = Transfer(0, random.permutation(len(ours)), random.permutation(len(ours)))
            with closing(make_backend()) as backend:
                backend.open([memory.view(-1, size)])
                backend.add_host_chunk([host.view(-1, size)])
                for direction in Direction:
                    if direction is Direction.STORE:
                        ours += 1  # every piece changes; all processes store the same bytes
                    copy = partial(_copy, backend, direction, pairs)
                    _barrier.wait()
                    copy()
                    _barrier.wait()
                    numbers[COPIES[direction, size]] = host.nbytes / _seconds(copy) / 1e9
                    if not torch.equal(ours.cpu()[pairs.device_blocks], theirs[pairs.host_blocks]):
                        raise RuntimeError(f"{direction.value} of {size_text(size)}: wrong bytes")
    return numbers


def _map(kind: str, path: str, num_bytes: int) -> torch.Tensor:
    """The memory, int8 ``[num_bytes]``. It is unmapped with the last tensor on it."""
    if path:
        with Path(path).open("r+b", buffering=0) as file:
            mapping = mmap.mmap(file.fileno(), num_bytes)
    else:
        mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if kind in (ANONYMOUS, ADVISED):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(mapping, dtype=torch.int8)


def _copy(backend: CopyBackend, direction: Direction, pairs: Transfer) -> None:
    pending = backend.copy(direction, pairs, backend.barrier())
    if pending is not None:
        pending.wait()


def _seconds(do: Callable[[], object]) -> float:
    start = time.perf_counter()
    do()
    return time.perf_counter() - start


def meminfo() -> Counter[str]:
    """In bytes; 0 for what this kernel does not report."""
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    found = Counter({name[:-1]: int(number) << 10 * len(kb) for name, number, *kb in lines})
    found["HugePages_Free"] *= found["Hugepagesize"]
    return found


def _machine_gib() -> tuple[float, float]:
    """GiB that the machine uses, and GiB of them in huge pages."""
    found = meminfo()
    used = found["MemTotal"] - found["MemAvailable"] - found["HugePages_Free"]
    huge = found["Hugetlb"] - found["HugePages_Free"]
    return used / GIB, (huge + found["AnonHugePages"] + found["ShmemHugePages"]) / GIB
