"""The benchmark of host memory: all its steps without a GPU, its errors, and a GPU's part of it."""

import ctypes
import json
import multiprocessing
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from examples import host_memory_bench as bench
from examples.bench.command import CANNOT_START, RUN_FAILED
from simple_offload.backends.base import Direction
from simple_offload.backends.cuda import dma
from simple_offload.backends.descriptors import Descriptors
from tests.examples.processes import assert_gone

MIB = 1 << 20
NUM_BYTES = 16 * MIB
SMALL = ("--device", "cpu", "--gib", "0.015625")


@pytest.fixture(autouse=True)
def no_process_left() -> Iterator[None]:
    """Only the process that tracks multiprocessing's semaphores lives as long as this one."""
    before = set(psutil.Process().children(recursive=True))
    yield
    assert multiprocessing.active_children() == []
    started = set(psutil.Process().children(recursive=True)) - before
    assert_gone([each for each in started if "resource_tracker" not in " ".join(each.cmdline())])


def table(printed: str) -> dict[tuple[str, str], list[str]]:
    """The rows by kind and process."""
    rows = [line.strip("|").split("|") for line in printed.splitlines() if line.startswith("|")]
    stripped = [[cell.strip() for cell in row] for row in rows]
    assert stripped[0] == ["kind", "process", *bench.COLUMNS]
    return {(row[0], row[1]): row[2:] for row in stripped[2:]}


# Without a GPU


@pytest.mark.slow
def test_two_processes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "result.json"
    assert bench.main([*SMALL, "--processes", "2", "--output", str(output)]) == 0
    printed = capfd.readouterr().out
    results = json.loads(output.read_text())
    assert results["num_bytes"] == NUM_BYTES
    assert results["kernel"] == os.uname().release
    assert results["numa_nodes"] >= 1
    assert f"kernel: {results['kernel']}\n" in printed
    rows = {row["kind"]: row for row in results["rows"]}
    shown = table(printed)
    measured = (bench.ANONYMOUS, bench.MEMFD, bench.ADVISED)
    assert list(rows) == [*measured, bench.HUGETLB]
    for kind in measured:
        assert [len(rounds) for rounds in rows[kind]["rounds"]] == [3, 3]
        for index, numbers in enumerate(rows[kind]["medians"]):
            touches = index == 0 or kind == bench.ANONYMOUS
            assert set(numbers) == set(bench.COLUMNS) - ({bench.PLACE} if not touches else set())
            assert all(numbers[column] > 0 for column in bench.COPIES)
            cells = [f"{numbers[name]:.2f}" if name in numbers else "-" for name in bench.COLUMNS]
            assert shown[kind, f"{index} of 2"] == cells
    if "error" in rows[bench.HUGETLB]:
        (why,) = shown[bench.HUGETLB, "0 of 2"]
        assert why == rows[bench.HUGETLB]["error"]
        assert "0.02 GiB needed, HugePages_Free" in why


def test_a_kind_that_fails_stops_no_other(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def measure(kind: str, num_bytes: int, count: int, device: str) -> Any:
        if kind == bench.MEMFD:
            raise RuntimeError("cudaHostRegister:\nout of memory")
        return [[{bench.REGISTER: seconds} for seconds in (9.0, 1.0, 2.0)]] * count

    monkeypatch.setattr(bench, "_measure", measure)
    assert bench.main([*SMALL, "--processes", "1"]) == 0
    shown = table(capfd.readouterr().out)
    assert shown[bench.MEMFD, "0 of 1"] == ["RuntimeError: cudaHostRegister: out of memory"]
    for kind in (bench.ANONYMOUS, bench.ADVISED, bench.HUGETLB):
        assert shown[kind, "0 of 1"][:3] == ["-", "2.00", "-"]


def test_a_process_that_hangs_is_killed(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "ALL_SECONDS", 0.0)
    assert bench.main([*SMALL, "--processes", "2"]) == RUN_FAILED
    shown = table(capfd.readouterr().out)
    assert shown[bench.MEMFD, "0 of 2"] == ["TimeoutError:"]


def test_an_error_of_one_process_ends_the_others() -> None:
    """There is no device of this name."""
    with pytest.raises(RuntimeError, match="no_device"):
        bench._measure(bench.MEMFD, NUM_BYTES, 2, "no_device")


def test_more_than_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"MemAvailable": 3 * NUM_BYTES, "HugePages_Free": NUM_BYTES - 2 * MIB}
    monkeypatch.setattr(bench, "_meminfo", lambda: sizes)
    with pytest.raises(MemoryError, match=r"0\.06 GiB needed, MemAvailable is 0\.05 GiB"):
        bench._measure(bench.ANONYMOUS, NUM_BYTES, 4, "cpu")
    with pytest.raises(MemoryError, match=r"0\.02 GiB needed, HugePages_Free is 0\.01"):
        bench._measure(bench.HUGETLB, NUM_BYTES, 4, "cpu")


def test_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench.main([]) == CANNOT_START


# The part of a GPU


class GpuTensor(torch.Tensor):
    """Memory that passes for a GPU's."""

    is_cuda = True


class Driver:
    """Pins nothing, and copies as the GPU would."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pinned: dict[int, int] = {}
        self.descriptors: dict[Direction, list[int]] = {direction: [] for direction in Direction}
        self.lost: Direction | None = None
        cudart = SimpleNamespace(cudaHostRegister=self.pin, cudaHostUnregister=self.unpin)
        monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        monkeypatch.setattr(torch.cuda, "Stream", lambda: SimpleNamespace(synchronize=int))
        monkeypatch.setattr(dma, "resolve_dma", lambda: self.copy)
        monkeypatch.setattr(bench, "_barrier", threading.Barrier(1), raising=False)

    def pin(self, address: int, num_bytes: int, flags: int) -> int:
        assert flags == 0
        self.pinned[address] = num_bytes
        return 0

    def unpin(self, address: int) -> int:
        del self.pinned[address]
        return 0

    def copy(self, plan: Descriptors, direction: Direction, stream: object) -> None:
        assert list(self.pinned.values()) == [NUM_BYTES]
        (address,) = self.pinned
        host = plan.sources if direction is Direction.LOAD else plan.destinations
        assert host.min() >= address
        assert (host + plan.sizes).max() <= address + NUM_BYTES
        self.descriptors[direction] += plan.sizes.tolist()
        if direction is not self.lost:
            for copy in zip(*(part.tolist() for part in plan), strict=True):
                ctypes.memmove(*copy)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    return Driver(monkeypatch)


def one_round() -> bench.Numbers:
    memory = torch.zeros(NUM_BYTES // 8, dtype=torch.int64).as_subclass(GpuTensor)
    return bench._round(0, bench.ANONYMOUS, "", memory)


def test_a_gpu_copies_all_pieces_to_pinned_memory(driver: Driver) -> None:
    assert set(one_round()) == set(bench.COLUMNS)
    assert driver.pinned == {}, "all is unpinned"
    for sizes in driver.descriptors.values():
        # Each size to warm up and once more. Neighbours make one descriptor.
        assert sum(sizes) == 2 * 2 * NUM_BYTES
        assert min(sizes) == 64 << 10


@pytest.mark.parametrize("direction", list(Direction))
def test_lost_bytes_are_found(driver: Driver, direction: Direction) -> None:
    driver.lost = direction
    with pytest.raises(RuntimeError, match="wrong bytes in pieces of 2097152"):
        one_round()


def test_refused_memory(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    cudart = SimpleNamespace(cudaHostRegister=lambda *_: 2, cudaHostUnregister=driver.unpin)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    with pytest.raises(RuntimeError, match="cudaHostRegister: 2"):
        one_round()


@pytest.mark.gpu
def test_on_a_gpu(tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    assert bench.main(["--gib", "0.25", "--output", str(output)]) == 0
    for row in json.loads(output.read_text())["rows"]:
        if row["kind"] != bench.HUGETLB:
            assert "error" not in row
            assert all(numbers[bench.REGISTER] > 0 for numbers in row["medians"])
