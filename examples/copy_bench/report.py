"""The results as tables and as a plot."""

from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from examples.bench.tables import MISSING, make_figure, make_table, optional, save_figure
from examples.copy_bench.plan import WAYS, size_text
from examples.copy_bench.results import AUTO, CONTENDERS, PEAK, Cell, Results

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLORS = {"torch": "tab:gray", "dma": "tab:orange", "kernel": "tab:green", AUTO: "tab:blue"}
_TITLES = {
    "load": "load: host to device",
    "store": "store: device to host",
    "both": "both at once",
}
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
                        f"{size_text(one.small_bytes)} {_FROM_TO[one.small_way]}",
                        *(str(one.repeats), f"{one.gb_per_s:.1f}", str(one.made)),
                        *(optional(wait, ",.0f") for wait in waits),
                    )
        table.add_section()
    return table


def save_plot(path: Path, results: Results) -> None:
    """Write a PNG: bandwidth by block size, a panel for each way."""
    ways = [way for way in WAYS if any(row.way == way for row in results.rows)]
    figure = make_figure(5.5 * len(ways), 4.8)
    for axes, way in zip(figure.subplots(1, len(ways), squeeze=False)[0], ways, strict=True):
        _plot_way(axes, results, way)
    figure.suptitle(f"{results.machine.get('device', '')}, {results.machine.get('date', '')[:10]}")
    save_figure(path, figure)


def _plot_way(axes: "Axes", results: Results, way: str) -> None:
    rows = [row for row in results.rows if row.way == way]
    for name, color in _COLORS.items():
        cells = [(row.size, row.contenders[name]) for row in rows if name in row.contenders]
        if points := [(size, cell.gb_per_s) for size, cell in cells if not cell.fault]:
            sizes, bandwidths = zip(*points, strict=True)
            axes.plot(sizes, bandwidths, marker="o", markersize=4, color=color, label=name)
    if peak := rows[0].contenders.get(PEAK):
        axes.axhline(peak.gb_per_s, color="black", linestyle="--", label="contiguous peak")
    sizes_here = [row.size for row in rows]
    by_path = {
        path: [
            row.size for row in rows if AUTO in row.contenders and row.contenders[AUTO].path == path
        ]
        for path in ("kernel", "dma")
    }
    if all(by_path.values()):
        crossing = (max(by_path["kernel"]) * min(by_path["dma"])) ** 0.5
        axes.axvline(crossing, color="tab:blue", linestyle=":", label="auto: from here by DMA")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes_here, [size_text(size) for size in sizes_here], rotation=45)
    axes.minorticks_off()
    axes.set(xlabel="block size", ylabel="GB/s", ylim=(0, None), title=_TITLES[way])
    axes.grid(alpha=0.3)
    if axes.has_data():
        axes.legend(fontsize="small")
