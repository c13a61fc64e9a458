"""The measured numbers."""

from dataclasses import dataclass, field
from typing import Any

from examples.copy_bench.plan import Plan

PEAK = "peak"
AUTO = "auto"
CONTENDERS = (PEAK, "torch", "dma", "kernel", AUTO)


@dataclass(frozen=True)
class Cell:
    """One contender's copies of one job."""

    num_bytes: int
    seconds: float
    """Median."""
    repeats: int
    gb_per_s: float
    """In 10^9 bytes."""
    fault: str | None
    """The wrong bytes that the check found; None where every byte was right."""
    path: str | None = None
    """"dma" or "kernel", by which the backend copied most bytes; "mixed" where that is one for
    loads and the other for stores. None for torch's copies."""
    of_peak: float | None = None
    """Bandwidth over that of the contiguous copy; None where either has brought wrong bytes."""


@dataclass
class Row:
    """All contenders at one block size, one way."""

    way: str
    size: int
    """Bytes of a block."""
    blocks: int
    """Number of blocks copied at once, both directions together."""
    contenders: dict[str, Cell] = field(default_factory=dict)
    """Without those that could not be measured. The peak was measured once, with the largest
    blocks."""


@dataclass(frozen=True)
class SmallCopies:
    """Times of small copies on another stream, one after another, while a contender copied."""

    contender: str
    way: str
    """Of the contender's copies."""
    size: int
    """Bytes of a block of the contender's copies."""
    repeats: int
    """Number of the contender's copies."""
    gb_per_s: float
    """Their median bandwidth, in 10^9 bytes."""
    small_way: str
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
    rows: list[Row] = field(default_factory=list)
    small_copies: list[SmallCopies] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    """Contenders that this machine cannot run, and why."""
    failures: dict[str, str] = field(default_factory=dict)
    """Contenders whose copies ended in an error: the step and the error."""
    faults: list[str] = field(default_factory=list)
    """The wrong bytes of all cells."""
    seconds: float = 0.0
