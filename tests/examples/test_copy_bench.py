"""The copy benchmark: its results for right and wrong copies. The CPU takes the GPU's place."""

import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from examples.bench.command import BAD_RESULT, CANNOT_START, INTERRUPTED, RUN_FAILED
from examples.copy_bench import __main__ as copy_bench
from examples.copy_bench import bench
from examples.copy_bench import measure as measure_module
from examples.copy_bench.arena import Arena
from examples.copy_bench.contenders import BackendContender, Contender
from examples.copy_bench.measure import Bystander, measure, measure_small_copies
from examples.copy_bench.plan import KIB, MIB, SIZES, WAYS, Plan, make_job, size_text
from simple_offload.backends.base import Barrier, Direction, Measurement
from simple_offload.backends.host import HostBackend
from simple_offload.transfer import Transfer

PATIENCE_SECONDS = 30.0


@dataclass(frozen=True)
class SmallPlan(Plan):
    """Pools so small that a CPU copies them at once."""

    least_pool: int = 4 * MIB
    least_blocks: int = 100
    both_from: int = 64 * KIB


PLAN = SmallPlan(repeats=2)


class PathBackend(HostBackend):
    """In place of CudaBackend: it has copied at once, and says by which path. Auto loads up to
    64 KiB by kernel."""

    def __init__(self, copy_path: str = "auto") -> None:
        super().__init__()
        self.copy_path = copy_path

    def open(self, device: Sequence[torch.Tensor]) -> None:
        super().open(device)
        (self.blocks,) = device

    def copy(self, direction: Direction, transfer: Transfer, barrier: Barrier | None) -> Any:
        super().copy(direction, transfer, barrier)
        self.spoil()
        by_kernel = direction is Direction.LOAD and self.blocks.shape[1] <= 64 * KIB
        path = self.copy_path
        if path == "auto":
            path = "kernel" if by_kernel else "dma"
        # A few neighbours make one large descriptor, which goes by DMA.
        measured = Measurement(None, {"dma": 1, path: 9})
        return SimpleNamespace(wait=lambda: None, measure=lambda: measured)

    def spoil(self) -> None:
        """Called after each copy; tests replace it."""


def cpu_arena() -> Arena:
    return Arena(
        PLAN.pool_bytes,
        torch.device("cpu"),
        lambda num_bytes: torch.full((num_bytes,), 9, dtype=torch.int8),
    )


# Jobs, and the check of their copies


@pytest.mark.parametrize("way", WAYS)
def test_jobs_copy_scattered_blocks_in_their_directions(way: str) -> None:
    job = make_job(way, 4 * KIB, PLAN)
    assert list(job.transfers) == (list(Direction) if way == "both" else [Direction(way)])
    for transfer in job.transfers.values():
        sides = np.array([transfer.device_blocks, transfer.host_blocks])
        assert [len(set(blocks)) for blocks in sides.tolist()] == [PLAN.most_blocks] * 2
        assert np.count_nonzero(np.diff(sides) == 1) < 20, "neighbours are no neighbours there"
        assert np.count_nonzero(sides[0] == sides[1]) < 10
    touched = [{*each.device_blocks, *each.host_blocks} for each in job.transfers.values()]
    assert len(set().union(*touched)) == sum(map(len, touched)), "loads and stores share no block"
    assert job.num_bytes == 4 * KIB * PLAN.most_blocks * len(job.transfers)


def flip_last_byte(pool: torch.Tensor, blocks: list[int]) -> None:
    pool[blocks[-1], -1] ^= 1


def swap_two(pool: torch.Tensor, blocks: list[int]) -> None:
    pool[blocks[:2]] = pool[[blocks[1], blocks[0]]]


def write_another(pool: torch.Tensor, blocks: list[int]) -> None:
    pool[(set(range(len(pool))) - set(blocks)).pop(), 7] ^= 1


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("side", ["device", "host"])
@pytest.mark.parametrize(
    ("spoil", "wrong"), [(flip_last_byte, 1), (swap_two, 2), (write_another, 1)]
)
def test_wrong_bytes_are_found(
    spoil: Callable[[torch.Tensor, list[int]], None], wrong: int, side: str, way: str
) -> None:
    """In destinations, in sources, and in blocks that are neither."""
    arena, job = cpu_arena(), make_job(way, 4 * KIB, PLAN)
    contender = BackendContender("auto", PathBackend)
    arena.prepare()
    with contender.opened(arena, job.size):
        for direction, transfer in job.transfers.items():
            contender.copy(direction, transfer)
    assert arena.find_fault(job) is None
    (transfer, *_) = job.transfers.values()
    blocks = transfer.device_blocks if side == "device" else transfer.host_blocks
    spoil(getattr(arena, side).view(-1, job.size), blocks.tolist())
    fault = arena.find_fault(job)
    assert fault is not None
    assert fault.startswith(f"{wrong} of 1024 {side} blocks are wrong; the first")


# Time


class Recorder(Contender):
    """Copies nothing and advances its clock for each copy."""

    name = "auto"

    def __init__(self, seconds: Sequence[float] = (), parties: int = 1) -> None:
        self.seconds, self.now = list(seconds), 0.0
        self.entered: dict[Direction, int] = {}
        self.copied: list[tuple[Direction, int]] = []
        self.meeting = threading.Barrier(parties)

    def enter_thread(self, direction: Direction) -> None:
        self.entered[direction] = threading.get_ident()

    def copy(self, direction: Direction, transfer: Transfer) -> None:
        self.copied.append((direction, threading.get_ident()))
        self.now += self.seconds.pop(0) if self.seconds else 1.0
        self.meeting.wait(PATIENCE_SECONDS)


@pytest.mark.parametrize(
    ("seconds", "median"),
    [
        ([9.0, 0.01, 0.05, 0.01, 0.02, 0.03], 0.02),
        ([9.0, 0.2, 0.1, 0.3], 0.2),
        ([9.0, 0.6, 0.5], 0.55),
        ([9.0, 4.0], 4.0),
    ],
)
def test_the_median_after_a_warm_up_counts(
    monkeypatch: pytest.MonkeyPatch, seconds: list[float], median: float
) -> None:
    contender = Recorder(seconds)
    clock = SimpleNamespace(perf_counter=lambda: contender.now)
    monkeypatch.setattr(measure_module, "time", clock)
    cell = measure(contender, cpu_arena(), make_job("load", MIB, PLAN), 5)
    assert cell.seconds == pytest.approx(median)
    assert cell.gb_per_s == pytest.approx(cell.num_bytes / median / 1e9)
    assert cell.repeats == len(contender.copied) - 1 == len(seconds) - 1


def test_both_ways_run_at_once_on_threads_that_have_entered() -> None:
    contender = Recorder(parties=2)  # which one thread alone never passes
    measure(contender, cpu_arena(), make_job("both", MIB, PLAN), 1)
    assert len(contender.copied) == 4  # the warm-up and one repeat
    for direction, thread in contender.copied:
        assert contender.entered[direction] == thread != threading.get_ident()
    assert len(set(contender.entered.values())) == 2


@pytest.mark.parametrize(("direction", "wanted"), [(Direction.STORE, 1), (Direction.LOAD, 2)])
def test_a_bystander_copies_that_way(direction: Direction, wanted: int) -> None:
    arena = cpu_arena()
    arena.device_staging.fill_(1)
    arena.host_staging.fill_(2)
    Bystander(arena).copy(direction)
    for side in (arena.device_staging, arena.host_staging):
        assert bool((side[: 4 * KIB] == wanted).all())


class Bus(Contender):
    """A large copy, small ones beside it, and their clock. During a large copy, the small ones take
    the seconds ``small`` in turn, and the large copy ends with the last of them. Other small copies
    take no time."""

    name = "auto"

    def __init__(self, small: Sequence[float]) -> None:
        self.now, self.small = 0.0, small
        self.asked: list[Direction] = []
        self._left: list[float] = []
        self._large = threading.Condition()

    def copy(self, direction: Direction, transfer: Transfer) -> None:
        with self._large:
            self._left = list(self.small)
            assert self._large.wait_for(lambda: not self._left, PATIENCE_SECONDS)

    def copy_small(self, direction: Direction) -> None:
        with self._large:
            self.asked.append(direction)
            if self._left:
                self.now += self._left.pop(0)
                self._large.notify()


def test_small_copies_beside_a_large_one(
    monkeypatch: pytest.MonkeyPatch, no_thread_left: None
) -> None:
    """Small copies that end in its first tenth do not count: the bus was still idle for them."""
    bus = Bus([0.004, 0.005, 0.03, 0.02, 0.041])
    monkeypatch.setattr(measure_module, "time", SimpleNamespace(perf_counter=lambda: bus.now))
    monkeypatch.setattr(Bystander, "copy", lambda _, direction: bus.copy_small(direction))
    job = make_job("store", MIB, PLAN)
    to_device, to_host = measure_small_copies(bus, cpu_arena(), job, repeats=2)
    assert (to_device.small_way, to_host.small_way) == ("load", "store")
    for found in (to_device, to_host):
        assert (found.contender, found.way, found.size) == ("auto", "store", MIB)
        assert (found.repeats, found.made) == (2, 2 * 3)
        assert found.gb_per_s == pytest.approx(PLAN.pool_bytes / 0.1 / 1e9)
        assert found.median == pytest.approx(0.03)
        assert found.longest == pytest.approx(0.041)
    first_store = bus.asked.index(Direction.STORE)
    assert first_store >= 2 * 5
    assert set(bus.asked[:first_store]) == {Direction.LOAD}
    assert set(bus.asked[first_store:]) == {Direction.STORE}


# The program


@pytest.fixture
def cpu_rig(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A CPU that the benchmark accepts as a CUDA device."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(bench, "CudaBackend", PathBackend)
    cpu = torch.device("cpu")
    monkeypatch.setattr(bench, "Arena", lambda size, _, allocate: Arena(size, cpu, allocate))
    monkeypatch.setattr(copy_bench, "Plan", SmallPlan)
    return monkeypatch


def run(output: Path, *arguments: str) -> int:
    return copy_bench.main(["--repeats", "2", "--output", str(output), *arguments])


def numbers_of(output: Path) -> Any:
    return json.loads((output / "result.json").read_text())


@pytest.mark.usefixtures("cpu_rig")
def test_a_whole_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path) == 0
    captured = capsys.readouterr()
    assert "\x1b" not in captured.out + captured.err
    assert "device: NVIDIA H200\n" in captured.out
    assert "s  copy_bench: 4 KiB\n" in captured.err

    numbers = numbers_of(tmp_path)
    assert {"device", "driver", "torch", "cuda", "triton", "date"} <= set(numbers["machine"])
    assert [(row["way"], row["size"]) for row in numbers["rows"]] == [
        (way, size) for size in SIZES for way in PLAN.ways(size)
    ]
    shown = [" ".join(line.split()) for line in captured.out.splitlines()]
    for row in numbers["rows"]:
        cells = row["contenders"]
        assert {cell["fault"] for cell in cells.values()} == {None}
        peak = cells["peak"]
        assert peak["num_bytes"] == PLAN.pool_bytes
        ours = [cells[name] for name in ("torch", "dma", "kernel", "auto")]
        for cell in ours:
            assert (cell["num_bytes"], cell["repeats"]) == (row["blocks"] * row["size"], 2)
            assert cell["of_peak"] == pytest.approx(cell["gb_per_s"] / peak["gb_per_s"])
        bandwidths = " ".join(f"{each['gb_per_s']:.1f}" for each in (peak, *ours))
        by_kernel = row["way"] != "store" and row["size"] <= 64 * KIB
        path = ("mixed" if row["way"] == "both" else "kernel") if by_kernel else "dma"
        assert [cell["path"] for cell in ours] == [None, "dma", "kernel", path]
        line = f"{row['way']} {size_text(row['size'])} {row['blocks']} {bandwidths} "
        assert f"{line}{ours[-1]['of_peak']:.0%} {path}" in shown
    small = {
        (each["contender"], each["way"], each["small_way"]) for each in numbers["small_copies"]
    }
    ways = ("load", "store")
    assert small == {*product(("auto", "dma", "kernel", "peak"), ways, ways)}
    assert len(small) == len(numbers["small_copies"])
    assert any(line.startswith("load 2 MiB auto 4 KiB to host 2 ") for line in shown)


def test_wrong_bytes_are_no_result(
    tmp_path: Path, cpu_rig: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def corrupt(backend: PathBackend) -> None:
        if backend.copy_path == "kernel":
            backend.blocks[5, 100] ^= 1

    cpu_rig.setattr(PathBackend, "spoil", corrupt)
    assert run(tmp_path, "--sizes", "4K") == BAD_RESULT
    captured = capsys.readouterr()
    assert captured.out.count("WRONG") == 2
    assert "Proves nothing: kernel, load, 4 KiB: 1 of 1024 device blocks are wrong" in captured.out
    numbers = numbers_of(tmp_path)
    assert [*numbers["problems"]] == ["kernel, load, 4 KiB", "kernel, store, 4 KiB"]
    assert [row["contenders"]["kernel"]["of_peak"] for row in numbers["rows"]] == [None, None]


@pytest.mark.parametrize(
    ("error", "code", "message", "rows"),
    [
        (RuntimeError("LOST"), RUN_FAILED, "dma failed: 64 KiB, load: RuntimeError: LOST", 5),
        (KeyboardInterrupt(), INTERRUPTED, "Interrupted.\n", 2),
    ],
)
def test_a_path_that_fails_stops_no_other_and_measurements_are_kept(
    error: BaseException,
    code: int,
    message: str,
    rows: int,
    tmp_path: Path,
    cpu_rig: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(backend: PathBackend) -> None:
        if backend.copy_path == "dma" and backend.blocks.shape[1] == 64 * KIB:
            raise error

    cpu_rig.setattr(PathBackend, "spoil", fail)
    assert run(tmp_path, "--sizes", "4K", "64K") == code
    assert message in "".join(capsys.readouterr())
    found = numbers_of(tmp_path)["rows"]
    assert len(found) == rows
    for row in found:
        failed = {"dma"} if row["size"] == 64 * KIB else set()
        assert set(row["contenders"]) == {"peak", "torch", "dma", "kernel", "auto"} - failed


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (ImportError("No module named 'cuda'"), CANNOT_START, "No module named 'cuda' (the extra"),
        (MemoryError("2.00 GiB of host memory asked for"), RUN_FAILED, "2.00 GiB of host"),
        (RuntimeError("CUDA out of memory"), RUN_FAILED, "RuntimeError: CUDA out of memory"),
        (None, CANNOT_START, "No CUDA device (torch"),
    ],
)
def test_missing_requirements_are_reported(
    error: Exception | None,
    code: int,
    message: str,
    tmp_path: Path,
    cpu_rig: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    cpu_rig.setattr(torch.cuda, "is_available", lambda: error is not None)
    cpu_rig.setattr(bench, "run", Mock(side_effect=error))
    assert run(tmp_path) == code
    captured = capsys.readouterr()
    assert captured.err.splitlines()[-1].startswith(message)
    assert captured.out == ""


@pytest.mark.gpu
def test_on_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, "--sizes", "4K", "64K", "512K") == 0, capsys.readouterr().err
    numbers = numbers_of(tmp_path)
    for row in numbers["rows"]:
        assert set(row["contenders"]) == {"peak", "torch", "dma", "kernel", "auto"}
        assert row["contenders"]["auto"]["path"] in ("dma", "kernel", "mixed")
    assert len(numbers["small_copies"]) == 16
    assert all(one["size"] == 512 * KIB and one["made"] for one in numbers["small_copies"])
