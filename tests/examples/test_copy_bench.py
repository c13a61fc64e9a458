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

from rich.console import Console
from rich.table import Table

from examples.bench.command import BAD_RESULT, INTERRUPTED, RUN_FAILED
from examples.copy_bench import __main__ as copy_bench
from examples.copy_bench import bystander as bystander_module
from examples.copy_bench import measure as measure_module
from examples.copy_bench import rig as rig_module
from examples.copy_bench.arena import Arena
from examples.copy_bench.bystander import Bystander, measure_small_copies
from examples.copy_bench.contenders import (
    BackendContender,
    Contender,
    ContiguousCopy,
    PlainTorch,
)
from examples.copy_bench.job import contiguous, scattered
from examples.copy_bench.measure import measure
from examples.copy_bench.plan import KIB, MIB, SIZES, Plan, Way
from examples.copy_bench.report import (
    bandwidth_table,
    crossing_lines,
    save_plot,
    small_copies_table,
)
from examples.copy_bench.results import Cell, Results, Row, SmallCopies, paths_by_kernel
from simple_offload.backends.base import Barrier, Direction
from simple_offload.backends.cuda.backend import CudaBackend
from simple_offload.backends.cuda.copy_costs import CopyCosts
from simple_offload.backends.host import HostBackend
from simple_offload.config import ConfigError
from simple_offload.metadata import Transfer

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


def cpu_arena(plan: Plan = PLAN) -> Arena:
    return Arena(
        plan.pool_bytes,
        torch.device("cpu"),
        lambda num_bytes: torch.full((num_bytes,), 9, dtype=torch.int8),
    )


def ours() -> BackendContender:
    return BackendContender("auto", PathBackend)


# Jobs


@pytest.mark.parametrize("size", [4 * KIB, 64 * KIB, 2 * MIB])
@pytest.mark.parametrize("way", list(Way))
def test_scattered_jobs(way: Way, size: int) -> None:
    job = scattered(way, size, PLAN)
    wanted = {
        Way.LOAD: {Direction.LOAD},
        Way.STORE: {Direction.STORE},
        Way.BOTH: {Direction.LOAD, Direction.STORE},
    }
    assert set(job.transfers) == wanted[way]
    available = PLAN.pool_bytes // size // len(job.transfers)
    for direction, transfer in job.transfers.items():
        for blocks in (transfer.device_blocks, transfer.host_blocks):
            assert len(set(blocks.tolist())) == len(blocks) == min(available, PLAN.most_blocks)
            assert blocks.max() < job.num_blocks
            assert bool((blocks < job.split).all() if direction is Direction.LOAD else True)
            assert bool((blocks >= job.split).all() if direction is Direction.STORE else True)
    assert job.num_bytes == job.blocks * size


def test_blocks_are_scattered_on_both_sides() -> None:
    (transfer,) = scattered(Way.LOAD, 4 * KIB, PLAN).transfers.values()
    for blocks in (transfer.device_blocks, transfer.host_blocks):
        assert np.count_nonzero(np.diff(blocks) == 1) < 10
    assert np.count_nonzero(transfer.device_blocks == transfer.host_blocks) < 10


def test_default_plan_stays_within_its_limits() -> None:
    plan = Plan()
    for size in plan.sizes:
        for way in plan.ways(size):
            job = scattered(way, size, plan)
            assert job.num_bytes <= 1 << 30
            assert all(len(t.device_blocks) <= 16_384 for t in job.transfers.values())
    assert [size for size in plan.sizes if Way.BOTH in plan.ways(size)] == [
        512 * KIB,
        MIB,
        2 * MIB,
    ]
    assert (plan.sizes[0], plan.sizes[-1]) == (4 * KIB, 2 * MIB)


# Contenders, and the check of their copies


@pytest.mark.parametrize("way", list(Way))
@pytest.mark.parametrize("size", [4 * KIB, 512 * KIB, 2 * MIB])
@pytest.mark.parametrize("make", [ours, PlainTorch])
def test_contenders_bring_the_right_bytes(
    make: Callable[[], Contender], way: Way, size: int
) -> None:
    contender, arena, job = make(), cpu_arena(), scattered(way, size, PLAN)
    contender.open(arena, size)
    cell = measure(contender, arena, job, 2)
    contender.close()
    assert cell.fault is None
    assert (cell.num_bytes, cell.repeats) == (job.num_bytes, 2)


@pytest.mark.parametrize("way", list(Way))
def test_the_peak_copies_everything(way: Way) -> None:
    contender, arena, job = ContiguousCopy(), cpu_arena(), contiguous(way, PLAN)
    contender.open(arena, job.size)
    cell = measure(contender, arena, job, 1)
    assert cell.fault is None
    assert cell.num_bytes == PLAN.pool_bytes


class Spoiled(BackendContender):
    """Copies correctly, then spoils one thing."""

    def __init__(self, spoil: Callable[[Arena, int, Direction, Transfer], None]) -> None:
        super().__init__("auto", PathBackend)
        self._spoil = spoil

    def open(self, arena: Arena, size: int) -> None:
        super().open(arena, size)
        self._arena, self._size = arena, size

    def copy(self, direction: Direction, transfer: Transfer) -> None:
        super().copy(direction, transfer)
        self._spoil(self._arena, self._size, direction, transfer)


def sides(
    arena: Arena, size: int, direction: Direction, transfer: Transfer
) -> tuple[torch.Tensor, torch.Tensor, "np.ndarray[tuple[int], np.dtype[np.int64]]"]:
    """Source and destination as bytes ``[blocks, page]``, and the destination's blocks."""
    device, host = arena.device.view(-1, size), arena.host.view(-1, size)
    if direction is Direction.LOAD:
        return host, device, transfer.device_blocks
    return device, host, transfer.host_blocks


def flip_last_byte(arena: Arena, size: int, direction: Direction, transfer: Transfer) -> None:
    _, destination, blocks = sides(arena, size, direction, transfer)
    destination[int(blocks[-1]), -1] ^= 1


def swap_two(arena: Arena, size: int, direction: Direction, transfer: Transfer) -> None:
    _, destination, blocks = sides(arena, size, direction, transfer)
    destination[blocks[:2]] = destination[blocks[:2][::-1].copy()]


def skip_one(arena: Arena, size: int, direction: Direction, transfer: Transfer) -> None:
    _, destination, blocks = sides(arena, size, direction, transfer)
    destination[int(blocks[3])] = 0x5A


def write_another(arena: Arena, size: int, direction: Direction, transfer: Transfer) -> None:
    _, destination, blocks = sides(arena, size, direction, transfer)
    other = (set(range(len(destination))) - set(blocks.tolist())).pop()
    destination[other, 7] = 1


def write_source(arena: Arena, size: int, direction: Direction, transfer: Transfer) -> None:
    source, _, _ = sides(arena, size, direction, transfer)
    source[0, 0] ^= 1 if direction is Direction.LOAD else 0
    source[-1, 0] ^= 1 if direction is Direction.STORE else 0


@pytest.mark.parametrize("way", list(Way))
@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (flip_last_byte, "1 of 1024 {} blocks are wrong"),
        (swap_two, "2 of 1024 {} blocks are wrong"),
        (skip_one, "has not the bytes of block"),
        (write_another, "1 of 1024 {} blocks are wrong"),
        (write_source, "1 of 1024 {} blocks are wrong"),
    ],
)
def test_wrong_bytes_are_found(
    spoil: Callable[[Arena, int, Direction, Transfer], None], complaint: str, way: Way
) -> None:
    contender, arena, job = Spoiled(spoil), cpu_arena(), scattered(way, 4 * KIB, PLAN)
    contender.open(arena, job.size)
    fault = measure(contender, arena, job, 1).fault
    assert fault is not None
    on_device = way is not Way.STORE
    if spoil is write_source and way is not Way.BOTH:
        on_device = not on_device
    assert complaint.format("device" if on_device else "host") in fault


# Time


class Recorder:
    """A contender that copies nothing and advances ``clock`` by ``seconds`` for each copy."""

    name = "auto"

    def __init__(self, seconds: Iterator[float] | None = None) -> None:
        self.seconds = seconds
        self.now = 0.0
        self.entered: dict[Direction, int] = {}
        self.copied: list[tuple[Direction, int]] = []
        self.meeting: threading.Barrier | None = None

    def open(self, arena: Arena, size: int) -> None: ...

    def enter_thread(self, direction: Direction) -> None:
        self.entered[direction] = threading.get_ident()

    def copy(self, direction: Direction, transfer: Transfer) -> None:
        self.copied.append((direction, threading.get_ident()))
        if self.seconds is not None:
            self.now += next(self.seconds)
        if self.meeting is not None:
            self.meeting.wait(PATIENCE_SECONDS)

    def calibration(self) -> str:
        return ""

    def close(self) -> None: ...


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
    cell = measure(contender, cpu_arena(), scattered(Way.LOAD, MIB, PLAN), 5)
    assert cell.seconds == pytest.approx(median)
    assert cell.repeats == repeats
    assert list(contender.seconds or ()) == []


def test_both_ways_run_at_once_on_threads_that_have_entered() -> None:
    contender = Recorder()
    contender.meeting = threading.Barrier(2)  # which one thread alone never passes
    measure(contender, cpu_arena(), scattered(Way.BOTH, MIB, PLAN), 1)
    assert len(contender.copied) == 4  # the warm-up and one repeat
    for direction, thread in contender.copied:
        assert contender.entered[direction] == thread != threading.get_ident()
    assert len(set(contender.entered.values())) == 2


@pytest.mark.parametrize("way", list(Way))
@pytest.mark.parametrize("where", ["enter_thread", "copy"])
def test_an_error_in_a_copy_thread_is_raised(
    monkeypatch: pytest.MonkeyPatch, where: str, way: Way, no_thread_left: None
) -> None:
    def fail(direction: Direction, *_: object) -> None:
        if way is not Way.BOTH or direction is Direction.STORE:
            raise RuntimeError("the bus is gone")

    contender = Recorder()
    monkeypatch.setattr(contender, where, fail)
    with pytest.raises(RuntimeError, match="the bus is gone"):
        measure(contender, cpu_arena(), scattered(way, MIB, PLAN), 1)


# Small copies beside large ones


@pytest.mark.parametrize("direction", list(Direction))
def test_a_bystander_copies_that_way(direction: Direction) -> None:
    arena = cpu_arena()
    device, host = arena.device_staging[: 4 * KIB], arena.host_staging[: 4 * KIB]
    device.fill_(1)
    host.fill_(2)
    Bystander(arena).copy(direction)
    wanted = 1 if direction is Direction.STORE else 2
    assert bool((device == wanted).all())
    assert bool((host == wanted).all())


class Bus:
    """A large copy, small ones beside it, and their clock. During a large copy, the small ones take
    the seconds ``small`` in turn, and the large copy ends with the last of them. Other small copies
    take no time."""

    name = "auto"

    def __init__(self, small: Sequence[float]) -> None:
        self.now, self.small = 0.0, small
        self.asked: list[Direction] = []
        self._left: list[float] = []
        self._large = threading.Condition()

    def open(self, arena: Arena, size: int) -> None: ...

    def enter_thread(self, direction: Direction) -> None: ...

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

    def calibration(self) -> str:
        return ""

    def close(self) -> None: ...


def beside(bus: Bus, monkeypatch: pytest.MonkeyPatch, repeats: int = 1) -> list[SmallCopies]:
    """The measurement of a store of the whole pool; ``bus`` replaces the device and the clock."""
    monkeypatch.setattr(bystander_module, "time", SimpleNamespace(perf_counter=lambda: bus.now))
    monkeypatch.setattr(Bystander, "copy", lambda _, direction: bus.copy_small(direction))
    job = scattered(Way.STORE, MIB, PLAN)
    return list(measure_small_copies(bus, cpu_arena(), job, repeats))


def test_small_copies_beside_a_large_one(
    monkeypatch: pytest.MonkeyPatch, no_thread_left: None
) -> None:
    """Small copies that end in its first tenth do not count: the bus was still idle for them."""
    bus = Bus([0.004, 0.005, 0.03, 0.02, 0.041])
    to_device, to_host = beside(bus, monkeypatch, repeats=2)
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


def test_a_small_copy_that_waits_for_all_of_the_large_one_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for found in beside(Bus([0.02, 0.98]), monkeypatch):
        assert found.made == 1
        assert found.median == found.longest == pytest.approx(0.98)


@pytest.mark.parametrize("where", ["large", "small"])
def test_an_error_beside_a_large_copy_is_raised(
    monkeypatch: pytest.MonkeyPatch, where: str, no_thread_left: None
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("the bus is gone")

    bus = Bus([0.1])
    monkeypatch.setattr(bus, "copy" if where == "large" else "copy_small", fail)
    with pytest.raises(RuntimeError, match="the bus is gone"):
        beside(bus, monkeypatch)


# Numbers


def cell(gb_per_s: float, fault: str | None = None, num_bytes: int = 10**9) -> Cell:
    return Cell(num_bytes, num_bytes / gb_per_s / 1e9, 7, fault)


def results() -> Results:
    found = Results(
        Plan(sizes=(4 * KIB, 512 * KIB)), {"device": "NVIDIA H200", "date": "2026-11-21"}
    )
    found.peaks = {Way.LOAD: cell(50), Way.STORE: cell(40), Way.BOTH: cell(100)}
    names = ("torch", "dma", "kernel", "auto")

    def row(way: Way, size: int, bandwidths: tuple[float, ...], paths: dict[str, bool]) -> Row:
        cells = {name: cell(b) for name, b in zip(names, bandwidths, strict=True)}
        return Row(way, size, 16_384, cells, paths)

    found.rows = [
        row(Way.LOAD, 4 * KIB, (2, 3, 44, 45), {"load": True}),
        row(Way.STORE, 4 * KIB, (2.5, 8.25, 39, 38), {"store": True}),
        row(Way.LOAD, 512 * KIB, (5, 49, 47, 48.5), {"load": False}),
        row(Way.STORE, 512 * KIB, (5, 39, 38, 39), {"store": False}),
        row(Way.BOTH, 512 * KIB, (6, 96, 80, 95), {"load": False, "store": True}),
    ]
    found.small_copies = [
        SmallCopies("dma", way, 2 * MIB, 7, 52.04, small, 4096, 420, 279e-6, 18.797e-3)
        for way in (Way.STORE, Way.LOAD)
        for small in (Way.LOAD, Way.STORE)
    ]
    found.small_copies.append(
        SmallCopies("auto", Way.STORE, 64 * KIB, 3, 8.0, Way.STORE, 4096, 0, None, None)
    )
    return found


def printed(found: Results, table: Callable[[Results], Table] = bandwidth_table) -> list[str]:
    """A table as a pipe gets it, with an assumed width of 80."""
    console = Console(width=80, color_system=None)
    with console.capture() as capture:
        console.print(table(found))
    return [" ".join(line.split()) for line in capture.get().splitlines()]


def test_table() -> None:
    lines = printed(results())
    assert "way block blocks peak torch dma kernel auto peak path" in lines
    shown = [line for line in lines if line.split(" ")[0] in ("load", "store", "both")]
    assert shown == [
        "load 4 KiB 16384 50.0 2.0 3.0 44.0 45.0 90% kernel",
        "load 512 KiB 16384 50.0 5.0 49.0 47.0 48.5 97% dma",
        "store 4 KiB 16384 40.0 2.5 8.2 39.0 38.0 95% kernel",
        "store 512 KiB 16384 40.0 5.0 39.0 38.0 39.0 98% dma",
        "both 512 KiB 16384 100.0 6.0 96.0 80.0 95.0 95% mixed",
    ]


def test_table_of_small_copies() -> None:
    lines = printed(results(), small_copies_table)
    assert "way block contender small copies copies GB/s made µs µs" in lines
    assert [line for line in lines if line.split(" ")[0] in ("load", "store")] == [
        "load 2 MiB dma 4 KiB to device 7 52.0 420 279 18,797",
        "load 2 MiB dma 4 KiB to host 7 52.0 420 279 18,797",
        "store 2 MiB dma 4 KiB to device 7 52.0 420 279 18,797",
        "store 2 MiB dma 4 KiB to host 7 52.0 420 279 18,797",
        "store 64 KiB auto 4 KiB to host 3 8.0 0 - -",
    ]
    assert not [line for line in lines if "…" in line]


def test_missing_or_wrong_results_have_no_number(tmp_path: Path) -> None:
    found = results()
    del found.rows[0].cells["kernel"]
    found.rows[0].cells["auto"] = cell(45, "one byte")
    found.rows[0].by_kernel = {}
    assert "load 4 KiB 16384 50.0 2.0 3.0 - WRONG - -" in printed(found)
    del found.peaks[Way.STORE]
    assert "store 4 KiB 16384 - 2.5 8.2 39.0 38.0 - kernel" in printed(found)
    found.peaks[Way.BOTH] = cell(100, "one byte")
    assert found.of_peak(found.rows[-1]) is None
    found.rows[0].cells = {}
    save_plot(tmp_path / "plot.png", found)


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
    monkeypatch.setattr(rig_module, "CudaBackend", PathBackend)
    monkeypatch.setattr(rig_module, "gpu_driver", lambda: "580.159.03")

    def arena(
        pool_bytes: int, _: torch.device, allocate_host: Callable[[int], torch.Tensor]
    ) -> Arena:
        return Arena(pool_bytes, torch.device("cpu"), allocate_host)

    monkeypatch.setattr(rig_module, "Arena", arena)
    monkeypatch.setattr(copy_bench, "Plan", SmallPlan)


def run(output: Path, *arguments: str) -> int:
    return copy_bench.main(["--repeats", "2", "--out", str(output), *arguments])


@pytest.mark.usefixtures("cpu_rig")
def test_a_whole_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path / "out") == 0
    captured = capsys.readouterr()
    assert "\x1b" not in captured.out + captured.err
    assert "…" not in captured.out
    assert "NVIDIA H200, driver 580.159.03, torch" in captured.out
    assert "Calibration, load: by kernel up to 64 KiB, by DMA from 512 KiB." in (captured.out)
    for step in ("peak", "4 KiB", "2 MiB"):
        assert f"s  copy_bench: {step}\n" in captured.err

    numbers = json.loads((tmp_path / "out" / "result.json").read_text())
    assert {"device", "driver", "torch", "cuda", "triton", "date"} <= set(numbers)
    assert [(row["way"], row["size"]) for row in numbers["rows"]] == [
        (way.value, size) for size in SIZES for way in Plan().ways(size)
    ]
    for row in numbers["rows"]:
        assert set(row["contenders"]) == {"torch", "dma", "kernel", "auto"}
        peak = numbers["peak"][row["way"]]["gb_per_s"]
        for measured in row["contenders"].values():
            assert measured["fault"] is None
            assert measured["of_peak"] == pytest.approx(measured["gb_per_s"] / peak)
    by_size = {(row["way"], row["size"]): row["by_kernel"] for row in numbers["rows"]}
    assert by_size["load", 64 * KIB] == {"load": True}
    assert by_size["store", 64 * KIB] == {"store": False}
    assert by_size["both", 512 * KIB] == {"load": False, "store": False}
    assert {
        (one["contender"], one["way"], one["small_way"], one["size"])
        for one in numbers["small_copies"]
    } == {
        (name, way, small, 2 * MIB)
        for name in ("peak", "dma", "kernel", "auto")
        for way in ("load", "store")
        for small in ("load", "store")
    }
    assert captured.out.count("2 MiB  auto       4 KiB to host") == 2
    assert numbers["faults"] == []
    assert numbers["crossing"]["load"] == [64 * KIB, 512 * KIB]
    assert numbers["calibration"][str(4 * KIB)] == PathBackend().describe_paths()
    assert numbers["seconds"] > 0
    assert (tmp_path / "out" / "bandwidth.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("cpu_rig")
def test_chosen_sizes_and_scale(tmp_path: Path) -> None:
    assert run(tmp_path, "--sizes", "512K", "4KiB", "4096", "--scale", "2") == 0
    numbers = json.loads((tmp_path / "result.json").read_text())
    assert numbers["plan"]["sizes"] == [4 * KIB, 512 * KIB]
    blocks = {(row["way"], row["size"]): row["blocks"] for row in numbers["rows"]}
    assert blocks["load", 4 * KIB] == 2 * PLAN.most_blocks
    assert blocks["both", 512 * KIB] == 2 * PLAN.pool_bytes // (512 * KIB)


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
    assert [fault.split(":")[0] for fault in numbers["faults"]] == [
        "kernel, load, 4 KiB",
        "kernel, store, 4 KiB",
    ]


@pytest.mark.usefixtures("cpu_rig")
def test_a_failed_copy_exits_with_3_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: PathBackend) -> None:
        raise RuntimeError("CUDA_ERROR_LAUNCH_FAILED")

    spoil_path(monkeypatch, "dma", fail)
    assert run(tmp_path, "--sizes", "4K", "64K") == RUN_FAILED
    message = "dma failed: 4 KiB, load: RuntimeError: CUDA_ERROR_LAUNCH_FAILED"
    assert message in capsys.readouterr().out
    numbers = json.loads((tmp_path / "result.json").read_text())
    for row in numbers["rows"]:
        assert set(row["contenders"]) == {"torch", "kernel", "auto"}


@pytest.mark.usefixtures("cpu_rig")
def test_a_path_that_this_machine_lacks_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    closed = []
    opened = PathBackend.open

    def refuse(self: PathBackend, device: Sequence[torch.Tensor]) -> None:
        if self.copy_path == "kernel":
            raise ConfigError("copy_path='kernel': Triton cannot be imported")
        opened(self, device)

    monkeypatch.setattr(PathBackend, "open", refuse)
    monkeypatch.setattr(PathBackend, "close", lambda self: closed.append(self.copy_path))
    assert run(tmp_path, "--sizes", "4K", "64K") == 0
    assert "Left out: kernel: copy_path='kernel': Triton cannot be" in capsys.readouterr().out
    # Each is closed, and "dma" once more for the backend that pins the pools.
    assert sorted(closed) == ["auto", "auto", "dma", "dma", "dma", "kernel"]
    numbers = json.loads((tmp_path / "result.json").read_text())
    assert set(numbers["rows"][1]["contenders"]) == {"torch", "dma", "auto"}


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
        (ImportError("No module named 'cuda'"), 2, "No module named 'cuda' (the extra"),
        (MemoryError("2.00 GiB of host memory asked for"), 3, "2.00 GiB of host"),
        (RuntimeError("CUDA out of memory"), 3, "RuntimeError: CUDA out of memory"),
    ],
)
def test_missing_requirements_are_reported(
    error: Exception,
    code: int,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def no_rig(_: Plan) -> None:
        raise error

    monkeypatch.setattr(rig_module, "cuda_rig", no_rig)
    assert run(tmp_path) == code
    captured = capsys.readouterr()
    assert captured.err.splitlines()[-1].startswith(message)
    assert captured.out == ""


def test_no_cuda_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run(tmp_path / "out") == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("No CUDA device (torch")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--sizes", "3K"], "--sizes: '3K' is not a power of two from 4 KiB to 2 MiB"),
        (["--sizes", "64K", "big"], "--sizes: 'big' is not a power of two from 4 KiB to 2 MiB"),
        (["--repeats", "0"], "--repeats: 0 is not within 1 and 100"),
        (["--scale", "9"], "--scale: 9 is not within 1 and 8"),
    ],
)
def test_bad_arguments_are_refused(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        copy_bench.main(arguments)
    assert exit_.value.code == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.gpu
def test_on_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, "--sizes", "4K", "64K", "512K") == 0, capsys.readouterr().err
    numbers = json.loads((tmp_path / "result.json").read_text())
    for row in numbers["rows"]:
        assert set(row["contenders"]) == {"torch", "dma", "kernel", "auto"}
    assert numbers["crossing"]["load"] is not None
    assert len(numbers["small_copies"]) == 16
    assert all(one["size"] == 512 * KIB and one["made"] for one in numbers["small_copies"])
