"""The results as a table and as a plot."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.box import SIMPLE_HEAD
from rich.table import Table

from examples.copy_bench.plan import Way, size_text
from examples.copy_bench.results import AUTO, CONTENDERS, Cell, Results, Row, SmallCopies

_COLORS = {"torch": "tab:gray", "dma": "tab:orange", "kernel": "tab:green", AUTO: "tab:blue"}
_TITLES = {
    Way.LOAD: "load: host to device",
    Way.STORE: "store: device to host",
    Way.BOTH: "both at once",
}
_FROM_TO = {Way.LOAD: "to device", Way.STORE: "to host"}
_NOTHING = "-"


def _table(caption: str) -> Table:
    """With a column for the way."""
    table = Table(
        box=SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
        caption=caption,
        caption_justify="left",
        caption_style="",
    )
    table.add_column("way", no_wrap=True)
    return table


def bandwidth_table(results: Results) -> Table:
    """One line for each way and block size, in GB/s."""
    table = _table(
        "GB/s (10^9 bytes), from submission to the end of the copy, median. Scattered\n"
        "blocks; peak: one contiguous copy. Path: what auto chooses."
    )
    headings = ("block", "blocks", "peak", *CONTENDERS, "auto of\npeak", "auto's\npath")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for way in Way:
        for row in results.rows:
            if row.way is way:
                table.add_row(*_line(results, row))
        table.add_section()
    return table


def _line(results: Results, row: Row) -> list[str]:
    of_peak = results.of_peak(row)
    return [
        row.way.value,
        size_text(row.size),
        str(row.blocks),
        _cell(results.peaks.get(row.way)),
        *(_cell(row.cells.get(name)) for name in CONTENDERS),
        _NOTHING if of_peak is None else f"{of_peak:.0%}",
        _path(row),
    ]


def _path(row: Row) -> str:
    paths = {"kernel" if each else "dma" for each in row.by_kernel.values()}
    # Load and store may differ where both are copied at once.
    return "mixed" if len(paths) > 1 else "".join(paths) or _NOTHING


def _cell(cell: Cell | None) -> str:
    if cell is None:
        return _NOTHING
    return f"{cell.gb_per_s:.1f}" if cell.fault is None else "[bold red]WRONG[/]"


def small_copies_table(results: Results) -> Table:
    """One line for each contender and way, and each way of the small copies made meanwhile."""
    table = _table(
        "Small copies that somebody else makes on a stream of its own, one\n"
        "after another while such blocks are copied, at so many GB/s: from\n"
        "submission to the end of each."
    )
    table.add_column("block", justify="right", no_wrap=True)
    for heading in ("contender", "small copies"):
        table.add_column(heading, no_wrap=True)
    for heading in ("copies", "GB/s", "made", "median\nµs", "longest\nµs"):
        table.add_column(heading, justify="right", no_wrap=True)
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
        *(
            _NOTHING if seconds is None else f"{seconds * 1e6:,.0f}"
            for seconds in (one.median, one.longest)
        ),
    ]


def crossing_lines(results: Results) -> list[str]:
    """Where auto changes from the kernel to DMA, a sentence for each direction."""
    lines = []
    for way in (Way.LOAD, Way.STORE):
        crossing = results.crossing(way.value)
        if crossing is None:
            continue
        by_kernel, by_dma = crossing
        told = [
            *([f"by kernel up to {size_text(by_kernel)}"] if by_kernel else []),
            *([f"by DMA from {size_text(by_dma)}"] if by_dma else []),
        ]
        lines.append(f"Calibration, {way.value}: {', '.join(told)}.")
    return lines


def save_plot(path: Path, results: Results) -> None:
    """Write a PNG: bandwidth by block size, a panel for each way."""
    ways = [way for way in Way if any(row.way is way for row in results.rows)]
    figure = Figure(figsize=(5.5 * len(ways), 4.8), layout="constrained")
    for axes, way in zip(figure.subplots(1, len(ways), squeeze=False)[0], ways, strict=True):
        _plot_way(axes, results, way)
    figure.suptitle(f"{results.machine.get('device', '')}, {results.machine.get('date', '')[:10]}")
    figure.savefig(path, format="png", dpi=120)


def _plot_way(axes: Axes, results: Results, way: Way) -> None:
    rows = [row for row in results.rows if row.way is way]
    for name in CONTENDERS:
        measured = [
            (row.size, row.cells[name].gb_per_s)
            for row in rows
            if name in row.cells and not row.cells[name].fault
        ]
        if measured:
            sizes, bandwidths = zip(*measured, strict=True)
            axes.plot(sizes, bandwidths, marker="o", markersize=4, color=_COLORS[name], label=name)
    if way in results.peaks:
        axes.axhline(
            results.peaks[way].gb_per_s, color="black", linestyle="--", label="contiguous peak"
        )
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
    axes.set_xlabel("block size")
    axes.set_ylabel("GB/s")
    axes.set_ylim(bottom=0)
    axes.set_title(_TITLES[way])
    axes.grid(alpha=0.3)
    if axes.has_data():
        axes.legend(fontsize="small")
