"""The results as tables and as a plot."""

from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from examples.bench.tables import MISSING, make_figure, make_table, optional, save_figure
from examples.copy_bench.plan import Way, size_text
from examples.copy_bench.results import AUTO, CONTENDERS, Cell, Results, Row, SmallCopies

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLORS = {"torch": "tab:gray", "dma": "tab:orange", "kernel": "tab:green", AUTO: "tab:blue"}
_TITLES = {
    Way.LOAD: "load: host to device",
    Way.STORE: "store: device to host",
    Way.BOTH: "both at once",
}
_FROM_TO = {Way.LOAD: "to device", Way.STORE: "to host"}


def bandwidth_table(results: Results) -> Table:
    """One line for each way and block size, in GB/s."""
    table = make_table(
        *("way", "block", "blocks", "peak", *CONTENDERS, "auto of\npeak", "auto's\npath"),
        caption="GB/s (10^9 bytes), from submission to the end of the copy, median. Scattered\n"
        "blocks; peak: one contiguous copy. Path: the choice of auto.",
    )
    for way in Way:
        for row in (row for row in results.rows if row.way is way):
            table.add_row(
                row.way.value,
                size_text(row.size),
                str(row.blocks),
                _bandwidth(results.peak.get(row.way)),
                *(_bandwidth(row.contenders.get(name)) for name in CONTENDERS),
                optional(results.of_peak(row), ".0%"),
                _path(row),
            )
        table.add_section()
    return table


def _path(row: Row) -> str:
    paths = {"kernel" if each else "dma" for each in row.by_kernel.values()}
    # Load and store may differ where both are copied at once.
    return "mixed" if len(paths) > 1 else "".join(paths) or MISSING


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
                    table.add_row(*_small_line(one))
        table.add_section()
    return table


def _small_line(one: SmallCopies) -> list[str]:
    return [
        one.way.value,
        size_text(one.size),
        one.contender,
        f"{size_text(one.small_bytes)} {_FROM_TO[one.small_way]}",
        str(one.repeats),
        f"{one.gb_per_s:.1f}",
        str(one.made),
        *(optional(seconds and seconds * 1e6, ",.0f") for seconds in (one.median, one.longest)),
    ]


def crossing_lines(results: Results) -> list[str]:
    """Where auto changes from the kernel to DMA, a sentence for each direction."""
    lines = []
    for way in (Way.LOAD, Way.STORE):
        crossing = results.crossing(way.value)
        if crossing is None:
            continue
        by_kernel, by_dma = crossing
        parts = [
            *([f"by kernel up to {size_text(by_kernel)}"] if by_kernel else []),
            *([f"by DMA from {size_text(by_dma)}"] if by_dma else []),
        ]
        lines.append(f"Calibration, {way.value}: {', '.join(parts)}.")
    return lines


def save_plot(path: Path, results: Results) -> None:
    """Write a PNG: bandwidth by block size, a panel for each way."""
    ways = [way for way in Way if any(row.way is way for row in results.rows)]
    figure = make_figure(5.5 * len(ways), 4.8)
    for axes, way in zip(figure.subplots(1, len(ways), squeeze=False)[0], ways, strict=True):
        _plot_way(axes, results, way)
    figure.suptitle(f"{results.machine.get('device', '')}, {results.machine.get('date', '')[:10]}")
    save_figure(path, figure)


def _plot_way(axes: "Axes", results: Results, way: Way) -> None:
    rows = [row for row in results.rows if row.way is way]
    for name in CONTENDERS:
        cells = [(row.size, row.contenders[name]) for row in rows if name in row.contenders]
        if points := [(size, cell.gb_per_s) for size, cell in cells if not cell.fault]:
            sizes, bandwidths = zip(*points, strict=True)
            axes.plot(sizes, bandwidths, marker="o", markersize=4, color=_COLORS[name], label=name)
    if way in results.peak:
        peak = results.peak[way].gb_per_s
        axes.axhline(peak, color="black", linestyle="--", label="contiguous peak")
    crossing = results.crossing(way.value)
    if crossing is not None and None not in crossing:
        low, high = (float(size or 0) for size in crossing)
        axes.axvline(
            (low * high) ** 0.5, color="tab:blue", linestyle=":", label="auto: from here by DMA"
        )
    axes.set_xscale("log", base=2)
    sizes_here = sorted({row.size for row in rows})
    axes.set_xticks(sizes_here, [size_text(size) for size in sizes_here], rotation=45)
    axes.minorticks_off()
    axes.set(xlabel="block size", ylabel="GB/s", ylim=(0, None), title=_TITLES[way])
    axes.grid(alpha=0.3)
    if axes.has_data():
        axes.legend(fontsize="small")
