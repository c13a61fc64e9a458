"""What host memory that several processes share costs, beside memory of their own."""

import argparse
import ctypes
import json
import mmap
import multiprocessing
import os
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, ThreadPoolExecutor, wait
from itertools import product
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import numpy as np
import torch

from examples.bench.arguments import BenchParser
from examples.bench.command import RUN_FAILED, CannotStart, exit_code_of, run_program
from examples.bench.results_file import gpu_driver, machine
from examples.bench.tables import medians, optional

ANONYMOUS, MEMFD = "anonymous", "memfd"
ADVISED, HUGETLB = "memfd, huge pages advised", "memfd, MFD_HUGETLB"
ROUNDS = 3  # medians count: at the first touch of a page, a hypervisor may have to find memory
GIB, PIECES = 1 << 30, {"2 MiB": 2 << 20, "64 KiB": 64 << 10}
PLACE, REGISTER, USED, HUGE = "in place, s", "register, s", "used, GiB", "in huge pages, GiB"
COPIES = [f"{way} {piece}, GB/s" for piece in PIECES for way in ("load", "store")]
COLUMNS = (PLACE, REGISTER, *COPIES, USED, HUGE)
PATIENCE_SECONDS, ALL_SECONDS = 90.0, 180.0  # for another process, and for all rounds
_TOUCH_THREADS, _TOUCH_BYTES = 8, 32 << 20  # as in simple_offload/backends/host_memory.py
_CALL_BYTES = 64 << 20  # as in simple_offload/backends/cuda/queues.py
Numbers = dict[str, float]  # of one process and round, by column
Side = tuple[torch.Tensor, Any]  # memory, and the order in which its pieces are copied
_barrier: Barrier


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit code."""
    parser = BenchParser(
        "host_memory_bench",
        "Measures host memory that processes have or share: seconds to put it in place and to "
        "register it with a GPU; GB/s of loads (host to device) and stores (back), in pieces at "
        "random places, of each process while all copy. Process i has GPU i modulo their number.",
        "exit codes: 0 measured; 2 wrong usage, or no GPU; 3 nothing measured; 130 interrupted",
    )
    parser.add_argument("--gib", type=float, default=8, help="size of the memory (default: 8)")
    parser.add_names("--processes", "numbers of processes", list("12345678"), default="1,2")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to test")
    parser.add_argument("--output", type=Path, metavar="FILE.json", help="for all numbers")
    return exit_code_of(lambda: _run(parser.parse_args(argv)))


def _run(arguments: argparse.Namespace) -> int:
    num_bytes = max(1, round(arguments.gib * 512)) * PIECES["2 MiB"]
    counts = [int(count) for count in arguments.processes or ("1", "2")]
    facts, rows = {**_facts(arguments.device), "num_bytes": num_bytes}, list[dict[str, Any]]()
    print(*(f"{name}: {value}" for name, value in facts.items()), "", sep="\n")
    print("| kind | process |", " | ".join(COLUMNS), "|\n|---|---|" + "--:|" * len(COLUMNS))
    for kind, count in product((ANONYMOUS, MEMFD, ADVISED, HUGETLB), counts):
        row: dict[str, Any] = {"kind": kind, "processes": count}
        try:
            row["rounds"] = _measure(kind, num_bytes, count, arguments.device)
            row["medians"] = [medians(rounds) for rounds in row["rounds"]]
            lines = [[optional(m.get(name), ".2f") for name in COLUMNS] for m in row["medians"]]
        except Exception as error:  # noqa: BLE001 - whatever one fails with, the others can run
            traceback.print_exc()
            row["error"] = " ".join(f"{type(error).__name__}: {error}".split())
            lines = [[row["error"]]]
        rows.append(row)
        for index, cells in enumerate(lines):
            print("|", " | ".join((kind, f"{index} of {count}", *cells)), "|", flush=True)
        if arguments.output:
            arguments.output.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n")
    return 0 if any("medians" in row for row in rows) else RUN_FAILED


def _facts(device: str) -> dict[str, Any]:
    facts = {**machine(), "driver": gpu_driver(), "kernel": os.uname().release}
    if device == "cuda" and not torch.cuda.is_available():
        raise CannotStart(f"No CUDA device (torch {torch.__version__} sees none).")
    facts["gpus"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    for file in Path("/sys/kernel/mm/transparent_hugepage").glob("*enabled"):
        facts[f"transparent_hugepage/{file.name}"] = file.read_text().strip()
    return facts | {"numa_nodes": len([*Path("/sys/devices/system/node").glob("node[0-9]*")])}


def _measure(kind: str, num_bytes: int, count: int, device: str) -> list[list[Numbers]]:
    """The rounds of each process. Raises the first error. Leaves no process behind."""
    name = "HugePages_Free" if kind == HUGETLB else "MemAvailable"
    needed, free = num_bytes * (count if kind == ANONYMOUS else 1), _meminfo()[name]
    if free < needed:
        raise MemoryError(f"{needed / GIB:.2f} GiB needed, {name} is {free / GIB:.2f} GiB")
    flags = os.MFD_CLOEXEC | (os.MFD_HUGETLB if kind == HUGETLB else 0)
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(count, timeout=PATIENCE_SECONDS)
    with (
        os.fdopen(os.memfd_create("host_memory_bench", flags)) as file,
        ProcessPoolExecutor(count, context, _enter, (barrier,)) as pool,
    ):
        path = "" if kind == ANONYMOUS else f"/proc/{os.getpid()}/fd/{file.fileno()}"
        processes = [pool.submit(_process, i, kind, path, num_bytes, device) for i in range(count)]
        try:
            for process in wait(processes, ALL_SECONDS, FIRST_EXCEPTION).done:
                process.result()
            return [process.result(0) for process in processes]
        finally:
            if not all(process.done() for process in processes):
                for child in multiprocessing.active_children():
                    child.kill()


def _enter(barrier: Barrier) -> None:
    """Begin a process, which meets the others at ``barrier``."""
    global _barrier  # noqa: PLW0603 - only a process that begins can be given a barrier
    _barrier = barrier


def _process(index: int, kind: str, path: str, num_bytes: int, device: str) -> list[Numbers]:
    """Numbers of each round. ``path``: the file of the memory that all share, or empty."""
    if device == "cuda":
        torch.cuda.set_device(index % torch.cuda.device_count())
    memory = torch.zeros(num_bytes // 8, dtype=torch.int64, device=device)
    return [_round(index, kind, path, memory) for _ in range(ROUNDS)]


def _round(index: int, kind: str, path: str, memory: torch.Tensor) -> Numbers:
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
        numbers[PLACE] = _seconds(lambda: _touch(host))
        host[:: PIECES["64 KiB"] // 8] = torch.arange(host.nbytes // PIECES["64 KiB"])
    _barrier.wait()
    numbers[REGISTER] = _seconds(lambda: _register(host, memory))
    _barrier.wait()
    numbers[USED], numbers[HUGE] = np.subtract(_machine_gib(), before).tolist()
    random, columns = np.random.default_rng(index), iter(COPIES)
    for piece in PIECES.values():
        theirs, ours = (side[:: piece // 8] for side in (host, memory))
        on_host, on_device = (random.permutation(len(theirs)) for _ in range(2))
        sides = (host, on_host), (memory, on_device)
        for load in (True, False):
            if not load:
                ours += 1  # every piece changes; all processes store the same bytes
            copy = _copier(piece, *(sides if load else sides[::-1]))
            _barrier.wait()
            copy()
            _barrier.wait()
            numbers[next(columns)] = host.nbytes / _seconds(copy) / 1e9
            if not torch.equal(ours.cpu()[on_device], theirs[on_host]):
                raise RuntimeError(f"wrong bytes in pieces of {piece}, {load=}")
    _register(host, memory, undo=True)
    return numbers


def _map(kind: str, path: str, num_bytes: int) -> torch.Tensor:
    """The memory, as words. It is unmapped with the last tensor on it."""
    if path:
        with Path(path).open("r+b", buffering=0) as file:
            mapping = mmap.mmap(file.fileno(), num_bytes)
    else:
        mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if kind in (ANONYMOUS, ADVISED):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(mapping, dtype=torch.int64)


def _touch(host: torch.Tensor) -> None:
    """Clear every byte, in several threads."""
    address, size = host.data_ptr(), host.nbytes
    with ThreadPoolExecutor(_TOUCH_THREADS) as pool:
        for start in range(0, size, _TOUCH_BYTES):
            pool.submit(ctypes.memset, address + start, 0, min(_TOUCH_BYTES, size - start))


def _register(host: torch.Tensor, memory: torch.Tensor, *, undo: bool = False) -> None:
    """Pin ``host`` for the GPU of ``memory``, or unpin it."""
    if memory.is_cuda:
        pin, unpin = torch.cuda.cudart().cudaHostRegister, torch.cuda.cudart().cudaHostUnregister
        error = unpin(host.data_ptr()) if undo else pin(host.data_ptr(), host.nbytes, 0)
        if int(error) != 0:
            raise RuntimeError(f"cudaHost{'Unr' if undo else 'R'}egister: {error}")


def _copier(piece: int, source: Side, destination: Side) -> Callable[[], None]:
    """A function that copies all pieces of ``piece`` bytes, as the connector does but on one
    stream, and returns when the copies have ended."""
    (origin, read), (target, written) = source, destination
    if not (origin.is_cuda or target.is_cuda):
        rows = [side.view(-1, piece // 8) for side in (origin, target)]
        return lambda: rows[1].__setitem__(written, rows[0][read])
    from simple_offload.backends.base import Direction  # brings vLLM, which takes seconds
    from simple_offload.backends.cuda import dma, queues
    from simple_offload.backends.descriptors import Regions, in_pieces, plan_copies

    start, end = (Regions.in_buffer(side.view(torch.int8), piece) for side in (origin, target))
    plan = dma.largest_first(plan_copies(start, end, read, written))
    # ``copy`` keeps the calls, since the driver may read them until the copies have ended.
    calls = list(in_pieces(plan, _CALL_BYTES, queues.CALL_DESCRIPTORS))
    direction = Direction.LOAD if target.is_cuda else Direction.STORE
    submit, stream = dma.resolve_dma(), torch.cuda.Stream()
    torch.cuda.synchronize()  # another stream has changed the device's memory

    def copy() -> None:
        for call in calls:
            submit(call, direction, stream)
        stream.synchronize()

    return copy


def _seconds(do: Callable[[], object]) -> float:
    start = time.perf_counter()
    do()
    return time.perf_counter() - start


def _meminfo() -> Counter[str]:
    """In bytes; 0 for what this kernel does not report."""
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    found = Counter({name[:-1]: int(number) << 10 * len(kb) for name, number, *kb in lines})
    found["HugePages_Free"] *= found["Hugepagesize"]
    return found


def _machine_gib() -> tuple[float, float]:
    """GiB that the machine uses, and GiB of them in huge pages."""
    found = _meminfo()
    used = found["MemTotal"] - found["MemAvailable"] - found["HugePages_Free"]
    huge = found["Hugetlb"] - found["HugePages_Free"]
    return used / GIB, (huge + found["AnonHugePages"] + found["ShmemHugePages"]) / GIB


if __name__ == "__main__":
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # not into the table
    run_program(main)
