"""The results as tables and as plots."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.box import SIMPLE_HEAD
from rich.table import Table

from examples.scheduler_bench.plan import Order
from examples.scheduler_bench.results import GOAL, HitRow, Kind, Results, Row, ratio, rival_of
from examples.scheduler_bench.stopwatch import Cost, Hook

_COLORS = {
    "ours": "tab:blue",
    "ours-128": "tab:purple",
    "ours-lazy": "tab:cyan",
    "ours-threshold": "tab:green",
    "builtin": "tab:orange",
    "builtin-lazy": "tab:red",
}
_TITLES = {
    Kind.DECODE: "a step, by requests that decode",
    Kind.SERVING: "a step, by requests that are served",
    Kind.CONVERSATIONS: "the same, longer prompts and answers",
    Kind.STORED: "a prompt that is stored, by tokens",
    Kind.LOADED: "a prompt that is loaded, by tokens",
    Kind.STORED_FULL: "a prompt stored in a full tier, by its blocks",
    Kind.LOADED_FULL: "a prompt loaded from a full tier, by its blocks",
}
WIDTH = 150
"""Columns for the tables of all contenders. A narrower terminal wraps them; nothing is cut off."""

_NOTHING = "-"
HOOKS = tuple(hook for hook in Hook if hook is not Hook.OTHER)


def cost_table(results: Results) -> Table:
    """One line for each kind and size: microseconds, and ratios to rivals."""
    names = _names(results.rows)
    rivals = [name for name in names if rival_of(name) in names]
    table = Table(
        box=SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
        caption="Milliseconds in the connector's hooks: decode, serving and conversations, of a\n"
        "step; else of one prompt. x: over its rival's; slowest: of the slowest step alone.",
        caption_justify="left",
        caption_style="",
    )
    table.add_column("", no_wrap=True)
    table.add_column("size", justify="right", no_wrap=True)
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
        if name in rivals:
            table.add_column("x", justify="right", no_wrap=True)
            table.add_column("slowest", justify="right", no_wrap=True)
    for kind in Kind:
        for row in results.rows:
            if row.kind is kind:
                table.add_row(kind.value, f"{row.size:,}", *_cost_cells(row, names, rivals))
        table.add_section()
    return table


def _cost_cells(row: Row, names: Sequence[str], rivals: Sequence[str]) -> list[str]:
    cells = []
    for name in names:
        cost = row.cells.get(name)
        cells.append(_NOTHING if cost is None else _milliseconds(cost.seconds))
        if name in rivals:
            share = ratio(row, name)
            slowest = _slowest_ratio(row, name)
            cells.append(_NOTHING if share is None else f"{share:.2f}")
            cells.append(_NOTHING if slowest is None else f"{slowest:.2f}")
    return cells


def hook_table(results: Results) -> Table:
    """By hook, at the largest size of each kind."""
    table = Table(
        box=SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
        caption="The largest of each kind by hook, in milliseconds.",
        caption_justify="left",
        caption_style="",
    )
    table.add_column("", no_wrap=True)
    table.add_column("contender", no_wrap=True)
    for hook in HOOKS:
        table.add_column(hook.value, justify="right", no_wrap=True)
    for kind in Kind:
        rows = [row for row in results.rows if row.kind is kind]
        if rows:
            largest = max(rows, key=lambda row: row.size)
            for name, cost in largest.cells.items():
                table.add_row(kind.value, name, *_hook_cells(cost))
            table.add_section()
    return table


def _hook_cells(cost: Cost) -> list[str]:
    return [_milliseconds(cost.by_hook.get(hook, 0.0)) for hook in HOOKS]


def footprint_table(results: Results) -> Table:
    """One line for each contender."""
    table = Table(
        box=SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
        caption="Scheduler side only, a process each. Start: processor time, median. Bytes of\n"
        "a device block's worth of the tier. x: over its rival's.",
        caption_justify="left",
        caption_style="",
    )
    table.add_column("tier", no_wrap=True)
    for heading in ("blocks", "start, s", "x", "bytes/\nblock", "x", "more if\nfilled", "x"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, found in results.footprints.items():
        rival = results.footprints.get(rival_of(name.split(",")[0]) or "")
        cells = []
        for key, digits in (
            ("seconds_to_start", 2),
            ("bytes_per_block", 0),
            ("bytes_per_filled_block", 0),
        ):
            value = getattr(found, key)
            base = getattr(rival, key, None)
            cells.append(_NOTHING if value is None else f"{value:.{digits}f}")
            cells.append(f"{value / base:.2f}" if value is not None and base else _NOTHING)
        table.add_row(name, f"{found.tier_blocks:,}", *cells)
    return table


def hit_table(results: Results) -> Table:
    """One line for each order and tier, in percent."""
    names = _hit_names(results.hit_rows)
    table = Table(
        box=SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
        caption="Tokens loaded from the host tier, of those that were computed before and had\n"
        "left the device. In brackets: from device or host, of all that were computed before.",
        caption_justify="left",
        caption_style="",
    )
    table.add_column("turns", no_wrap=True)
    table.add_column("tier", justify="right", no_wrap=True)
    for name in names:
        table.add_column(name.replace("-", "\n"), justify="right", no_wrap=True)
    for one_offs in (False, True):
        for order in Order:
            for row in results.hit_rows:
                if row.order is order and row.one_offs is one_offs:
                    told = f"{order.value}{', one-offs' if one_offs else ''}"
                    cells = [_hit_cell(row, name) for name in names]
                    table.add_row(told, f"{row.host_part:.0%}", *cells)
            table.add_section()
    return table


def _hit_cell(row: HitRow, name: str) -> str:
    count = row.counts.get(name)
    if count is None:
        return _NOTHING
    return f"{count.rate:.1%} ({count.overall_rate:.0%})"


def save_cost_plot(path: Path, results: Results) -> None:
    """Write a PNG: a panel for each kind, a line for each contender."""
    kinds = [kind for kind in Kind if any(row.kind is kind for row in results.rows)]
    figure = Figure(figsize=(13, 4.2 * ((len(kinds) + 1) // 2)), layout="constrained")
    panels = figure.subplots((len(kinds) + 1) // 2, 2, squeeze=False).flat
    for kind, axes in zip(kinds, panels, strict=False):
        _plot_kind(axes, results, kind)
    for axes in list(panels):
        axes.set_axis_off()
    figure.suptitle(f"Time in the connector's hooks, {results.machine.get('date', '')[:10]}")
    figure.savefig(path, format="png", dpi=120)


def _plot_kind(axes: Axes, results: Results, kind: Kind) -> None:
    rows = [row for row in results.rows if row.kind is kind]
    for name in _names(rows):
        points = [(row.size, row.cells[name].seconds * 1e3) for row in rows if name in row.cells]
        sizes, milliseconds = zip(*points, strict=True)
        axes.plot(sizes, milliseconds, marker="o", color=_COLORS.get(name), label=name)
    if "builtin" in _names(rows):
        goal = [row for row in rows if "builtin" in row.cells]
        axes.plot(
            [row.size for row in goal],
            [row.cells["builtin"].seconds * 1e3 * GOAL for row in goal],
            color="black",
            linestyle=":",
            label=f"{GOAL:.2f} of builtin",
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    sizes_here = sorted({row.size for row in rows})
    axes.set_xticks(sizes_here, [f"{size:,}" for size in sizes_here])
    axes.minorticks_off()
    axes.set_ylabel("ms")
    axes.set_title(_TITLES[kind])
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")


def save_hit_plot(path: Path, results: Results) -> None:
    """Write a PNG: hit rate by size of the tier, a panel for each order and mix."""
    panels = sorted({(row.one_offs, row.order.value) for row in results.hit_rows})
    figure = Figure(figsize=(5.2 * len(panels), 4.4), layout="constrained")
    grid = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for axes, (one_offs, order) in zip(grid, panels, strict=True):
        rows = [r for r in results.hit_rows if r.one_offs is one_offs and r.order.value == order]
        for name in _hit_names(rows):
            points = [(r.host_part, r.counts[name].rate) for r in rows if name in r.counts]
            parts, rates = zip(*points, strict=True)
            axes.plot(
                [part * 100 for part in parts],
                [rate * 100 for rate in rates],
                marker="o",
                color=_COLORS.get(name),
                label=name,
            )
        axes.set_xticks(sorted({row.host_part * 100 for row in rows}))
        axes.set_xlabel("host tier, % of the working set")
        axes.set_title(f"{order}{', one-offs between' if one_offs else ''}")
        axes.set_ylim(0, 102)
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    grid[0].set_ylabel("hit rate of the host tier, %")
    figure.savefig(path, format="png", dpi=120)


def _names(rows: Sequence[Row]) -> list[str]:
    found = {name for row in rows for name in row.cells}
    return [name for name in _COLORS if name in found] + sorted(found - _COLORS.keys())


def _hit_names(rows: Sequence[HitRow]) -> list[str]:
    found = {name for row in rows for name in row.counts}
    return [name for name in _COLORS if name in found] + sorted(found - _COLORS.keys())


def _slowest_ratio(row: Row, name: str) -> float | None:
    rival, cell = row.cells.get(rival_of(name) or ""), row.cells.get(name)
    if rival is None or cell is None or rival.slowest_step == 0:
        return None
    return cell.slowest_step / rival.slowest_step


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3f}" if seconds < 0.01 else f"{seconds * 1e3:.1f}"
