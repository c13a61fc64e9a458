"""The results as tables."""

from rich.table import Table

from examples.bench.tables import MISSING, make_table, optional
from examples.copy_bench.measure import SMALL_BYTES
from examples.copy_bench.plan import WAYS, size_text
from examples.copy_bench.results import AUTO, CONTENDERS, Cell, Results

_FROM_TO = {"load": "to device", "store": "to host"}


def bandwidth_table(results: Results) -> Table:
    """One line for each way and block size, in GB/s."""
    table = make_table(
        *("way", "block", "blocks", *CONTENDERS, "auto of\npeak", "auto's\npath"),
        caption="GB/s (10^9 bytes), from submission to the end of the copy, median. Scattered\n"
        "blocks; peak: one contiguous copy. Path: the choice of auto.",
    )
    for way in WAYS:
        for row in (row for row in results.rows if row.way == way):
            auto = row.contenders.get(AUTO)
            table.add_row(
                row.way,
                size_text(row.size),
                str(row.blocks),
                *(_bandwidth(row.contenders.get(name)) for name in CONTENDERS),
                optional(auto.of_peak if auto else None, ".0%"),
                (auto and auto.path) or MISSING,
            )
        table.add_section()
    return table


def _bandwidth(cell: Cell | None) -> str:
    if cell is None:
        return MISSING
    return f"{cell.gb_per_s:.1f}" if cell.fault is None else "[bold red]WRONG[/]"


def small_copies_table(results: Results) -> Table:
    """One line for each contender, way, and way of the small copies."""
    table = make_table(
        *("way", "block", "contender", "small copies", "copies", "GB/s", "made"),
        *("median\nµs", "longest\nµs"),
        left=4,
        caption="Small copies on another stream, one after another while such blocks\n"
        "are copied, which reach that many GB/s: from submission to the end of each.",
    )
    for way in _FROM_TO:
        for small_way in _FROM_TO:
            for one in results.small_copies:
                if (one.way, one.small_way) == (way, small_way):
                    waits = (seconds and seconds * 1e6 for seconds in (one.median, one.longest))
                    table.add_row(
                        *(one.way, size_text(one.size), one.contender),
                        f"{size_text(SMALL_BYTES)} {_FROM_TO[one.small_way]}",
                        *(str(one.repeats), f"{one.gb_per_s:.1f}", str(one.made)),
                        *(optional(wait, ",.0f") for wait in waits),
                    )
        table.add_section()
    return table
