"""The copy benchmark: its results for right and wrong copies. The CPU takes the GPU's place."""

import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from examples.bench.command import BAD_RESULT
from examples.copy_bench import __main__ as copy_bench
from examples.copy_bench import bench
from examples.copy_bench.arena import Arena
from examples.copy_bench.bench import measure
from examples.copy_bench.contenders import BackendContender, Contender
from examples.copy_bench.plan import KIB, MIB, SIZES, WAYS, Plan, make_job, size_text
from simple_offload.backends.base import Barrier, Direction, Measurement
from simple_offload.backends.host import HostBackend
from simple_offload.transfer import Transfer

PATIENCE_SECONDS = 30.0


@dataclass(frozen=True)
class SmallPlan(Plan):
    """Pools so small that a CPU copies them at once."""

    pool_bytes: int = 4 * MIB
    most_blocks: int = 100


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


# Copies, and their check


@pytest.mark.parametrize("way", WAYS)
def test_wrong_bytes_are_found(way: str) -> None:
    """In destinations, in sources, and in blocks that are neither. The blocks are scattered."""
    job = make_job(way, 4 * KIB, PLAN)
    for transfer in job.transfers.values():
        sides = np.array([transfer.device_blocks, transfer.host_blocks])
        assert [len(set(blocks)) for blocks in sides.tolist()] == [PLAN.most_blocks] * 2
        assert np.count_nonzero(np.diff(sides) == 1) < 20, "neighbours are no neighbours there"
    touched = [{*each.device_blocks, *each.host_blocks} for each in job.transfers.values()]
    assert len(set().union(*touched)) == sum(map(len, touched)), "loads and stores share no block"
    arena, contender = cpu_arena(), BackendContender("auto", PathBackend)
    arena.prepare()
    with contender.opened(arena, job.size):
        for direction, transfer in job.transfers.items():
            contender.copy(direction, transfer)
    assert arena.find_fault(job) is None
    (transfer, *_) = job.transfers.values()
    for side in ("device", "host"):
        blocks = getattr(transfer, f"{side}_blocks").tolist()
        pool = getattr(arena, side).view(-1, job.size)
        other = (set(range(len(pool))).difference(*touched)).pop()
        for block in (blocks[0], blocks[-1], other):
            pool[block, -1] ^= 1
            fault = f"1 of 1024 {side} blocks are wrong; the first, {block}, "
            assert (arena.find_fault(job) or "").startswith(fault)
            pool[block, -1] ^= 1
        pool[blocks[:2]] = pool[[blocks[1], blocks[0]]]
        assert (arena.find_fault(job) or "").startswith(f"2 of 1024 {side} blocks are wrong")
        pool[blocks[:2]] = pool[[blocks[1], blocks[0]]]


# Time


class Recorder(Contender):
    """Copies nothing and advances its clock for each copy."""

    name = "auto"

    def __init__(self, seconds: Sequence[float] = (), parties: int = 1) -> None:
        self.seconds, self.now = list(seconds), 0.0
        self.copied: list[Direction] = []
        self.meeting = threading.Barrier(parties)

    def copy(self, direction: Direction, transfer: Transfer) -> None:
        self.copied.append(direction)
        self.now += self.seconds.pop(0) if self.seconds else 1.0
        self.meeting.wait(PATIENCE_SECONDS)


def test_the_median_after_a_warm_up_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    contender = Recorder([9.0, 0.01, 0.05, 0.01, 0.02, 0.03])
    clock = SimpleNamespace(perf_counter=lambda: contender.now)
    monkeypatch.setattr(bench, "time", clock)
    cell = measure(contender, cpu_arena(), make_job("load", MIB, PLAN), 5)
    assert cell.seconds == pytest.approx(0.02)
    assert cell.gb_per_s == pytest.approx(cell.num_bytes / 0.02 / 1e9)
    assert len(contender.copied) == 6


def test_both_ways_run_at_once() -> None:
    contender = Recorder(parties=2)  # which one thread alone never passes
    measure(contender, cpu_arena(), make_job("both", MIB, PLAN), 1)
    assert len(contender.copied) == 4  # the warm-up and one repeat


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


def test_a_whole_run(
    tmp_path: Path, cpu_rig: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path) == 0
    shown = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    numbers = numbers_of(tmp_path)
    assert [(row["way"], row["size"]) for row in numbers["rows"]] == [
        (way, size) for size in SIZES for way in WAYS
    ]
    for row in numbers["rows"]:
        cells = row["contenders"]
        peak = cells["peak"]
        assert peak["num_bytes"] == PLAN.pool_bytes
        ours = [cells[name] for name in ("torch", "dma", "kernel", "auto")]
        for cell in (peak, *ours):
            assert cell["fault"] is None
            assert cell["gb_per_s"] == pytest.approx(cell["num_bytes"] / cell["seconds"] / 1e9)
        for cell in ours:
            assert cell["num_bytes"] == row["blocks"] * row["size"]
        by_kernel = row["way"] != "store" and row["size"] <= 64 * KIB
        path = ("mixed" if row["way"] == "both" else "kernel") if by_kernel else "dma"
        assert [cell["path"] for cell in ours] == [None, "dma", "kernel", path]
        bandwidths = " ".join(f"{each['gb_per_s']:.1f}" for each in (peak, *ours))
        line = f"{row['way']} {size_text(row['size'])} {row['blocks']} {bandwidths} "
        of_peak = f"{ours[-1]['gb_per_s'] / peak['gb_per_s']:.0%}"
        assert f"{line}{of_peak} {path}" in shown


def test_wrong_bytes_are_no_result(
    tmp_path: Path, cpu_rig: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def corrupt(backend: PathBackend) -> None:
        if backend.copy_path == "kernel":
            backend.blocks[5] = 0

    cpu_rig.setattr(PathBackend, "spoil", corrupt)
    assert run(tmp_path, "--sizes", "4K") == BAD_RESULT
    assert capsys.readouterr().out.count("WRONG") == 3
    assert [*numbers_of(tmp_path)["problems"]] == [f"kernel, {way}, 4 KiB" for way in WAYS]


@pytest.mark.gpu
def test_on_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, "--sizes", "4K", "64K", "512K") == 0, capsys.readouterr().err
    numbers = numbers_of(tmp_path)
    for row in numbers["rows"]:
        assert set(row["contenders"]) == {"peak", "torch", "dma", "kernel", "auto"}
        assert row["contenders"]["auto"]["path"] in ("dma", "kernel", "mixed")
