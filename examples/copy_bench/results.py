"""The measured numbers."""

import re
from dataclasses import dataclass, field
from typing import Any

from examples.copy_bench.plan import Plan, Way, size_text

PEAK = "peak"
AUTO = "auto"
CONTENDERS = ("torch", "dma", "kernel", AUTO)

_RUNG = re.compile(r"(?P<kib>\d+)K \S+ GB/s(?P<by_kernel> by kernel)?")


@dataclass(frozen=True)
class Cell:
    """One contender's copies of one job."""

    num_bytes: int
    seconds: float
    """Median."""
    repeats: int
    fault: str | None
    """The wrong bytes that the check found; None where every byte was right."""

    @property
    def gb_per_s(self) -> float:
        """In 10^9 bytes."""
        return self.num_bytes / self.seconds / 1e9


@dataclass
class Row:
    """All contenders at one block size, one way."""

    way: Way
    size: int
    """Bytes of a block."""
    blocks: int
    """Number of blocks copied at once, both directions together."""
    contenders: dict[str, Cell] = field(default_factory=dict)
    """Without those that could not be measured."""
    by_kernel: dict[str, bool] = field(default_factory=dict)
    """Per direction, True where auto's calibration has the kernel copy such blocks."""


@dataclass(frozen=True)
class SmallCopies:
    """Times of small copies on another stream, one after another, while a contender copied."""

    contender: str
    way: Way
    """Of the contender's copies."""
    size: int
    """Bytes of a block of the contender's copies."""
    repeats: int
    """Number of the contender's copies."""
    gb_per_s: float
    """Their median bandwidth, in 10^9 bytes."""
    small_way: Way
    small_bytes: int
    made: int
    """Number of small copies that count, beside all of the contender's."""
    median: float | None
    """Seconds from submission to the end of a small copy; None where there are none."""
    longest: float | None


@dataclass
class Results:
    """The measurements of a run so far."""

    plan: Plan
    machine: dict[str, Any]
    """Device, driver, versions, date."""
    peak: dict[Way, Cell] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    small_copies: list[SmallCopies] = field(default_factory=list)
    calibration: dict[int, str] = field(default_factory=dict)
    """By block size, auto's ``describe_paths`` after it was opened for that size."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Contenders that this machine cannot run, and why."""
    failures: dict[str, str] = field(default_factory=dict)
    """Contenders whose copies ended in an error: the step and the error."""
    seconds: float = 0.0

    def of_peak(self, row: Row, contender: str = AUTO) -> float | None:
        """Bandwidth of a contender over the contiguous peak; None where either is missing or
        brought wrong bytes."""
        peak, cell = self.peak.get(row.way), row.contenders.get(contender)
        if peak is None or cell is None or peak.fault or cell.fault:
            return None
        return cell.gb_per_s / peak.gb_per_s

    @property
    def faults(self) -> list[str]:
        """The wrong bytes of all cells."""
        found = [
            f"{PEAK}, {way.value}: {cell.fault}" for way, cell in self.peak.items() if cell.fault
        ]
        return found + [
            f"{name}, {row.way.value}, {size_text(row.size)}: {cell.fault}"
            for row in self.rows
            for name, cell in row.contenders.items()
            if cell.fault
        ]

    def crossing(self, direction: str) -> tuple[int | None, int | None] | None:
        """The largest size that the kernel copies, and the next one, from which on DMA copies all.
        A size that was not measured is None, and so is the pair where auto was not measured."""
        paths = {
            row.size: row.by_kernel[direction]
            for row in self.rows
            if row.way.value == direction and direction in row.by_kernel
        }
        if not paths:
            return None
        by_kernel = max((size for size, path in paths.items() if path), default=None)
        above = [size for size in paths if by_kernel is None or size > by_kernel]
        return by_kernel, min(above, default=None)

    def to_json(self) -> dict[str, Any]:
        """The content of the results file."""

        def numbers(cell: Cell, of_peak: float | None = None) -> dict[str, Any]:
            found = {**vars(cell), "gb_per_s": cell.gb_per_s}
            return found if of_peak is None else {**found, "of_peak": of_peak}

        def contenders(row: Row) -> dict[str, Any]:
            found = row.contenders.items()
            return {name: numbers(cell, self.of_peak(row, name)) for name, cell in found}

        found = {
            **vars(self),
            "peak": {way: numbers(cell) for way, cell in self.peak.items()},
            "rows": [{**vars(row), "contenders": contenders(row)} for row in self.rows],
            "crossing": {way: self.crossing(way.value) for way in (Way.LOAD, Way.STORE)},
            "faults": self.faults,
        }
        return {**found.pop("machine"), **found}


def paths_by_kernel(calibration: str) -> dict[str, dict[int, bool]]:
    """By direction and block size, True where ``CudaBackend.describe_paths`` names the kernel."""
    paths: dict[str, dict[int, bool]] = {}
    for part in filter(None, calibration.split("; ")):
        direction, _, rungs = part.partition(" ")
        paths[direction] = {
            int(rung["kib"]) << 10: rung["by_kernel"] is not None for rung in _RUNG.finditer(rungs)
        }
    return paths
