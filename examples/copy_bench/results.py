"""The measured numbers, and their table."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from rich.table import Table

from examples.bench.race import RaceResults
from examples.bench.tables import Row as Cells
from examples.bench.tables import make_table
from examples.copy_bench.plan import WAYS, Plan, size_text

PEAK = "peak"
AUTO = "auto"
CONTENDERS = (PEAK, "torch", "dma", "kernel", AUTO)


@dataclass(frozen=True)
class Cell:
    """One contender's copies of one job."""

    num_bytes: int
    seconds: float
    """Median."""
    gb_per_s: float
    """In 10^9 bytes."""
    fault: str | None
    """The wrong bytes that the check found; None where every byte was right."""
    path: str | None = None
    """"dma" or "kernel", by which the backend copied most bytes; "mixed" where that is one for
    loads and the other for stores. None for torch's copies."""


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


@dataclass(kw_only=True)
class Results(RaceResults):
    """The measurements of a run so far."""

    plan: Plan
    rows: list[Row] = field(default_factory=list)

    def tables(self) -> Iterator[Table]:
        """Bandwidth in GB/s by way and block size."""
        yield make_table(
            self._bandwidths(),
            caption="GB/s (10^9 bytes), from submission to the end of the copy, median. Scattered\n"
            "blocks; peak: one contiguous copy. Path: the choice of auto.",
        )

    def _bandwidths(self) -> Iterator[Cells | str]:
        for way in WAYS:
            yield ""
            for row in (row for row in self.rows if row.way == way):
                cells = {name: row.contenders.get(name) for name in CONTENDERS}
                peak, auto, of_peak = cells[PEAK], cells[AUTO], None
                if peak and auto and not (peak.fault or auto.fault):
                    of_peak = f"{auto.gb_per_s / peak.gb_per_s:.0%}"
                yield {
                    "way": way,
                    "block": size_text(row.size),
                    "blocks": str(row.blocks),
                    **{name: _bandwidth(cell) for name, cell in cells.items()},
                    "auto of\npeak": of_peak,
                    "auto's\npath": auto.path if auto else None,
                }


def _bandwidth(cell: Cell | None) -> str | None:
    if cell is None:
        return None
    return f"{cell.gb_per_s:.1f}" if cell.fault is None else "[bold red]WRONG[/]"
