"""The copy benchmark: its results for right and wrong copies. The CPU takes the GPU's place."""

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("matplotlib")
pytest.importorskip("rich")

from examples.bench.command import BAD_RESULT, INTERRUPTED, RUN_FAILED
from examples.copy_bench import __main__ as copy_bench
from examples.copy_bench import bench as bench_module
from examples.copy_bench import measure as measure_module
from examples.copy_bench.arena import Arena
from examples.copy_bench.contenders import BackendContender, Contender
from examples.copy_bench.measure import Bystander, measure, measure_small_copies
from examples.copy_bench.plan import KIB, MIB, SIZES, Plan, Way, make_job, size_text
from examples.copy_bench.report import crossing_lines
from examples.copy_bench.results import Results, Row, paths_by_kernel
from simple_offload.backends.base import Barrier, Direction
from simple_offload.backends.cuda.backend import CudaBackend
from simple_offload.backends.cuda.copy_costs import CopyCosts
from simple_offload.backends.host import HostBackend
from simple_offload.config import ConfigError
from simple_offload.transfer import Transfer

PATIENCE_SECONDS = 30.0


@dataclass(frozen=True)
class SmallPlan(Plan):
    """Pools so small that a CPU copies them at once."""

    pool_bytes: int = 4 * MIB
    most_blocks: int = 100


PLAN = SmallPlan(repeats=2)


class PathBackend(HostBackend):
    """HostBackend in place of CudaBackend, with CudaBackend's description of its measurements."""

    def __init__(self, copy_path: str = "auto") -> None:
        super().__init__()
        self.copy_path = copy_path

    def describe_paths(self) -> str:
        return (
            "load 4K 40 GB/s by kernel, 64K 47 GB/s by kernel, 512K 54 GB/s; "
            "store 4K 45 GB/s, 64K 48 GB/s, 512K 54 GB/s"
        )


def cpu_arena() -> Arena:
    return Arena(
        PLAN.pool_bytes,
        torch.device("cpu"),
        lambda num_bytes: torch.full((num_bytes,), 9, dtype=torch.int8),
    )


# Jobs


@pytest.mark.parametrize("size", [4 * KIB, 2 * MIB])
@pytest.mark.parametrize("way", list(Way))
def test_jobs_copy_distinct_blocks_in_their_directions(way: Way, size: int) -> None:
    job = make_job(way, size, PLAN)
    wanted = [Direction.LOAD, Direction.STORE] if way is Way.BOTH else [Direction(way.value)]
    assert list(job.transfers) == wanted
    available = PLAN.pool_bytes // size // len(job.transfers)
    for direction, transfer in job.transfers.items():
        for blocks in (transfer.device_blocks, transfer.host_blocks):
            assert len(set(blocks.tolist())) == len(blocks) == min(available, PLAN.most_blocks)
            assert blocks.max() < job.num_blocks
            assert bool(((blocks < job.split) == (direction is Direction.LOAD)).all())
        if size == 4 * KIB:
            neighbours = np.diff([transfer.device_blocks, transfer.host_blocks]) == 1
            assert np.count_nonzero(neighbours) < 20, "scattered on both sides"
            assert np.count_nonzero(transfer.device_blocks == transfer.host_blocks) < 10
    assert job.num_bytes == job.blocks * size


# Contenders, and the check of their copies


def flip_last_byte(pool: torch.Tensor, blocks: list[int]) -> None:
    pool[blocks[-1], -1] ^= 1


def swap_two(pool: torch.Tensor, blocks: list[int]) -> None:
    pool[blocks[:2]] = pool[[blocks[1], blocks[0]]]


def write_another(pool: torch.Tensor, blocks: list[int]) -> None:
    pool[(set(range(len(pool))) - set(blocks)).pop(), 7] ^= 1


@pytest.mark.parametrize("way", list(Way))
@pytest.mark.parametrize("side", ["device", "host"])
@pytest.mark.parametrize(
    ("spoil", "wrong"), [(flip_last_byte, 1), (swap_two, 2), (write_another, 1)]
)
def test_wrong_bytes_are_found(
    spoil: Callable[[torch.Tensor, list[int]], None], wrong: int, side: str, way: Way
) -> None:
    """In destinations, in sources, and in blocks that are neither."""
    arena, job = cpu_arena(), make_job(way, 4 * KIB, PLAN)
    contender = BackendContender("auto", PathBackend)
    arena.prepare(job)
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
    """A contender that copies nothing and advances its clock for each copy."""

    name = "auto"

    def __init__(self, seconds: Iterator[float] | None = None) -> None:
        self.seconds = seconds
        self.now = 0.0
        self.entered: dict[Direction, int] = {}
        self.copied: list[tuple[Direction, int]] = []
        self.meeting: threading.Barrier | None = None

    def enter_thread(self, direction: Direction) -> None:
        self.entered[direction] = threading.get_ident()

    def copy(self, direction: Direction, transfer: Transfer) -> None:
        self.copied.append((direction, threading.get_ident()))
        if self.seconds is not None:
            self.now += next(self.seconds)
        if self.meeting is not None:
            self.meeting.wait(PATIENCE_SECONDS)


@pytest.mark.parametrize(
    ("seconds", "median", "repeats"),
    [
        ([9.0, 0.01, 0.05, 0.01, 0.02, 0.03], 0.02, 5),
        ([9.0, 0.2, 0.1, 0.3], 0.2, 3),
        ([9.0, 0.6, 0.5], 0.55, 2),
        ([9.0, 4.0], 4.0, 1),
    ],
)
def test_the_median_after_a_warm_up_counts(
    monkeypatch: pytest.MonkeyPatch, seconds: list[float], median: float, repeats: int
) -> None:
    contender = Recorder(iter(seconds))
    clock = SimpleNamespace(perf_counter=lambda: contender.now)
    monkeypatch.setattr(measure_module, "time", clock)
    cell = measure(contender, cpu_arena(), make_job(Way.LOAD, MIB, PLAN), 5)
    assert cell.seconds == pytest.approx(median)
    assert cell.repeats == repeats
    assert list(contender.seconds or ()) == []


def test_both_ways_run_at_once_on_threads_that_have_entered() -> None:
    contender = Recorder()
    contender.meeting = threading.Barrier(2)  # which one thread alone never passes
    measure(contender, cpu_arena(), make_job(Way.BOTH, MIB, PLAN), 1)
    assert len(contender.copied) == 4  # the warm-up and one repeat
    for direction, thread in contender.copied:
        assert contender.entered[direction] == thread != threading.get_ident()
    assert len(set(contender.entered.values())) == 2


# Small copies beside large ones


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
    job = make_job(Way.STORE, MIB, PLAN)
    to_device, to_host = measure_small_copies(bus, cpu_arena(), job, repeats=2)
    assert (to_device.small_way, to_host.small_way) == (Way.LOAD, Way.STORE)
    for found in (to_device, to_host):
        assert (found.contender, found.way, found.size) == ("auto", Way.STORE, MIB)
        assert (found.small_bytes, found.repeats, found.made) == (4 * KIB, 2, 2 * 3)
        assert found.gb_per_s == pytest.approx(PLAN.pool_bytes / 0.1 / 1e9)
        assert found.median == pytest.approx(0.03)
        assert found.longest == pytest.approx(0.041)
    first_store = bus.asked.index(Direction.STORE)
    assert first_store >= 2 * 5
    assert set(bus.asked[:first_store]) == {Direction.LOAD}
    assert set(bus.asked[first_store:]) == {Direction.STORE}


# Numbers


def test_paths_are_read_from_the_backend_s_description() -> None:
    backend = CudaBackend.__new__(CudaBackend)  # needs no GPU as long as it is not initialised
    sizes = np.array([4096.0, 65536.0, 524288.0])
    dma = np.array([1e-6, 1.4e-6, 9.7e-6])
    backend._costs = {
        Direction.LOAD: CopyCosts(sizes, dma, dma * np.array([0.5, 0.9, 1.1])),
        Direction.STORE: CopyCosts(sizes[:1], dma[:1], np.array([np.inf])),
    }
    assert paths_by_kernel(backend.describe_paths()) == {
        "load": {4096: True, 65536: True, 524288: False},
        "store": {4096: False},
    }
    assert paths_by_kernel("") == {}


@pytest.mark.parametrize(
    ("paths", "crossing", "line_end"),
    [
        ({4: True, 8: True, 16: False, 32: False}, (8, 16), "up to 8 KiB, by DMA from 16 KiB."),
        ({4: False, 8: True, 16: False}, (8, 16), "up to 8 KiB, by DMA from 16 KiB."),
        ({4: True, 8: True}, (8, None), "by kernel up to 8 KiB."),
        ({4: False, 8: False}, (None, 4), "store: by DMA from 4 KiB."),
    ],
)
def test_crossing(
    paths: dict[int, bool], crossing: tuple[int | None, int | None], line_end: str
) -> None:
    found = Results(Plan(), {})
    found.rows = [
        Row(Way.STORE, size * KIB, 1, {}, {"store": path}) for size, path in paths.items()
    ]
    # A row of both directions at once does not count for either alone.
    found.rows.append(Row(Way.BOTH, 2 * MIB, 1, {}, {"store": True}))
    assert found.crossing("store") == tuple(k and k * KIB for k in crossing)
    assert found.crossing("load") is None
    (line,) = crossing_lines(found)
    assert line.endswith(line_end)


# The program


@pytest.fixture
def cpu_rig(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU that the benchmark accepts as a CUDA device."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    monkeypatch.setattr(bench_module, "CudaBackend", PathBackend)
    monkeypatch.setattr(bench_module, "gpu_driver", lambda: "580.159.03")

    def arena(
        pool_bytes: int, _: torch.device, allocate_host: Callable[[int], torch.Tensor]
    ) -> Arena:
        return Arena(pool_bytes, torch.device("cpu"), allocate_host)

    monkeypatch.setattr(bench_module, "Arena", arena)
    monkeypatch.setattr(copy_bench, "Plan", SmallPlan)


def run(output: Path, *arguments: str) -> int:
    return copy_bench.main(["--repeats", "2", "--out", str(output), *arguments])


def table_lines(printed: str) -> list[str]:
    """Lines of tables, with single blanks."""
    assert "…" not in printed
    lines = [" ".join(line.split()) for line in printed.splitlines()]
    return [line for line in lines if line.split(" ")[0] in ("load", "store", "both")]


@pytest.mark.usefixtures("cpu_rig")
def test_a_whole_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path / "out") == 0
    captured = capsys.readouterr()
    assert "\x1b" not in captured.out + captured.err
    assert "NVIDIA H200, driver 580.159.03, torch" in captured.out
    assert "Calibration, load: by kernel up to 64 KiB, by DMA from 512 KiB." in captured.out
    for step in ("peak", "4 KiB", "2 MiB"):
        assert f"s  copy_bench: {step}\n" in captured.err

    numbers = json.loads((tmp_path / "out" / "result.json").read_text())
    assert {"device", "driver", "torch", "cuda", "triton", "date", "plan"} <= set(numbers)
    assert [(row["way"], row["size"]) for row in numbers["rows"]] == [
        (way.value, size) for size in SIZES for way in Plan().ways(size)
    ]
    for peak in numbers["peak"].values():
        assert (peak["fault"], peak["num_bytes"]) == (None, PLAN.pool_bytes)
    shown = table_lines(captured.out)
    names = ("torch", "dma", "kernel", "auto")
    for row in numbers["rows"]:
        cells = [numbers["peak"][row["way"]], *(row["contenders"][name] for name in names)]
        for measured in cells[1:]:
            assert measured["fault"] is None
            assert (measured["num_bytes"], measured["repeats"]) == (row["blocks"] * row["size"], 2)
            ratio = measured["gb_per_s"] / cells[0]["gb_per_s"]
            assert measured["of_peak"] == pytest.approx(ratio)
        bandwidths = " ".join(f"{each['gb_per_s']:.1f}" for each in cells)
        of_peak = f"{cells[-1]['of_peak']:.0%}"
        line = f"{row['way']} {size_text(row['size'])} {row['blocks']} {bandwidths} {of_peak}"
        assert any(each.startswith(line) for each in shown), line
    small = []
    for one in numbers["small_copies"]:
        small.append((one["contender"], one["way"], one["small_way"], one["size"]))
        to = {"load": "device", "store": "host"}[one["small_way"]]
        numbers_shown = f"{one['repeats']} {one['gb_per_s']:.1f} {one['made']}"
        line = f"{one['way']} 2 MiB {one['contender']} 4 KiB to {to} {numbers_shown}"
        assert any(each.startswith(line) for each in shown), line
    assert sorted(small) == [
        (name, way, small_way, 2 * MIB)
        for name in ("auto", "dma", "kernel", "peak")
        for way in ("load", "store")
        for small_way in ("load", "store")
    ]
    assert numbers["faults"] == []
    assert numbers["crossing"]["load"] == [64 * KIB, 512 * KIB]
    assert numbers["calibration"][str(4 * KIB)] == PathBackend().describe_paths()
    assert numbers["seconds"] > 0
    assert (tmp_path / "out" / "bandwidth.png").read_bytes().startswith(b"\x89PNG")


def spoil_path(
    monkeypatch: pytest.MonkeyPatch, path: str, spoil: Callable[[PathBackend], object]
) -> None:
    """Call ``spoil`` after each copy of the contender ``path``."""
    copy = PathBackend.copy

    def spoiled(
        self: PathBackend, direction: Direction, transfer: Transfer, barrier: Barrier | None
    ) -> None:
        copy(self, direction, transfer, barrier)
        if self.copy_path == path:
            spoil(self)

    monkeypatch.setattr(PathBackend, "copy", spoiled)


@pytest.mark.usefixtures("cpu_rig")
def test_wrong_bytes_exit_with_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def corrupt(backend: PathBackend) -> None:
        backend._device[0][5, 100] ^= 1

    spoil_path(monkeypatch, "kernel", corrupt)
    assert run(tmp_path, "--sizes", "4K") == BAD_RESULT
    captured = capsys.readouterr()
    assert captured.out.count("WRONG") == 2 + 2
    assert "WRONG BYTES: kernel, load, 4 KiB: 1 of 1024 device blocks are wrong" in captured.out
    numbers = json.loads((tmp_path / "result.json").read_text())
    faults = [each.split(":")[0] for each in numbers["faults"]]
    assert faults == ["kernel, load, 4 KiB", "kernel, store, 4 KiB"]
    assert all("of_peak" not in row["contenders"]["kernel"] for row in numbers["rows"])


@pytest.mark.usefixtures("cpu_rig")
def test_paths_that_fail_or_are_missing_stop_no_other(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    no_thread_left: None,
) -> None:
    """A failed copy exits with 3. A path that this machine lacks is left out."""
    closed = []
    opened = PathBackend.open

    def fail(_: PathBackend) -> None:
        raise RuntimeError("CUDA_ERROR_LAUNCH_FAILED")

    def refuse(self: PathBackend, device: Sequence[torch.Tensor]) -> None:
        if self.copy_path == "kernel":
            raise ConfigError("copy_path='kernel': Triton cannot be imported")
        opened(self, device)

    monkeypatch.setattr(PathBackend, "open", refuse)
    monkeypatch.setattr(PathBackend, "close", lambda self: closed.append(self.copy_path))
    spoil_path(monkeypatch, "dma", fail)
    assert run(tmp_path, "--sizes", "4K", "64K") == RUN_FAILED
    printed = capsys.readouterr().out
    assert "Left out: kernel: copy_path='kernel': Triton cannot be" in printed
    assert "dma failed: 4 KiB, load: RuntimeError: CUDA_ERROR_LAUNCH_FAILED" in printed
    (line, *_) = table_lines(printed)
    assert line.startswith("load 4 KiB 100 ")
    assert line.split()[6:8] == ["-", "-"], "paths that were not measured have no number"
    # Each is closed, and "dma" once more for the backend that pins the pools.
    assert sorted(closed) == ["auto", "auto", "dma", "dma", "kernel"]
    for row in json.loads((tmp_path / "result.json").read_text())["rows"]:
        assert set(row["contenders"]) == {"torch", "auto"}


@pytest.mark.usefixtures("cpu_rig")
def test_an_interrupted_run_keeps_its_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(backend: PathBackend) -> None:
        if backend._device[0].shape[1] == 64 * KIB:
            raise KeyboardInterrupt

    spoil_path(monkeypatch, "auto", interrupt)
    assert run(tmp_path, "--sizes", "4K", "64K", "2M") == INTERRUPTED
    assert capsys.readouterr().err.endswith("Interrupted.\n")
    numbers = json.loads((tmp_path / "result.json").read_text())
    assert [row["size"] for row in numbers["rows"]] == [4 * KIB, 4 * KIB]


@pytest.mark.usefixtures("cpu_rig")
@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (None, 2, "No CUDA device (torch"),
        (ImportError("No module named 'cuda'"), 2, "No module named 'cuda' (the extra"),
        (MemoryError("2.00 GiB of host memory asked for"), 3, "2.00 GiB of host"),
        (RuntimeError("CUDA out of memory"), 3, "RuntimeError: CUDA out of memory"),
    ],
)
def test_missing_requirements_are_reported(
    error: Exception | None,
    code: int,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def no_rig(_: Plan) -> None:
        assert error is not None
        raise error

    monkeypatch.setattr(torch.cuda, "is_available", lambda: error is not None)
    monkeypatch.setattr(bench_module, "cuda_rig", no_rig)
    assert run(tmp_path) == code
    captured = capsys.readouterr()
    assert captured.err.splitlines()[-1].startswith(message)
    assert captured.out == ""


@pytest.mark.gpu
def test_on_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, "--sizes", "4K", "64K", "512K") == 0, capsys.readouterr().err
    numbers = json.loads((tmp_path / "result.json").read_text())
    for row in numbers["rows"]:
        assert set(row["contenders"]) == {"torch", "dma", "kernel", "auto"}
    assert numbers["crossing"]["load"] is not None
    assert len(numbers["small_copies"]) == 16
    assert all(one["size"] == 512 * KIB and one["made"] for one in numbers["small_copies"])
