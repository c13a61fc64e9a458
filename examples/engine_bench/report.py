"""The medians as a table: one line a number, one column a contender."""

from collections.abc import Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table

from examples.engine_bench.results import METRICS, Metric


def bench_table(
    by_contender: Mapping[str, Mapping[str, float]], floor: float | None, title: str
) -> Table:
    """Medians, each with its ratio to the first contender's. ``floor`` in seconds."""
    table = Table(title=title, title_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("", no_wrap=True)
    for contender in by_contender:
        table.add_column(contender, justify="right", no_wrap=True)
    for metric in METRICS:
        values = [each.get(f"{metric.part}.{metric.key}") for each in by_contender.values()]
        if any(value is not None for value in values):
            table.add_row(f"{metric.title}, {metric.unit}", *_cells(metric, values))
        if metric.key == "host_hit" and floor is not None:
            over = ["-" if value is None else f"{value / floor:.2f}x" for value in values]
            table.add_row(f"  the same over its floor of {floor * 1e3:.1f} ms", *over)
    return table


def _cells(metric: Metric, values: Sequence[float | None]) -> list[str]:
    base = values[0]
    cells = []
    for value in values:
        if value is None:
            cells.append("-")
        elif base is None or base == 0 or value is base:
            cells.append(_number(value * metric.scale))
        else:
            cells.append(f"{_number(value * metric.scale)} ({value / base:.2f}x)")
    return cells


def _number(value: float) -> str:
    """Three digits that count, and no more."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"
