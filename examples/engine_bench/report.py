"""The medians as a table: one line a number, one column a contender."""

from collections.abc import Mapping

from rich.table import Table

from examples.bench.tables import MISSING, cells_with_ratios, make_table
from examples.engine_bench.results import METRICS


def bench_table(
    by_contender: Mapping[str, Mapping[str, float]], floor: float | None, title: str
) -> Table:
    """Medians, each with its ratio to the first contender's. ``floor`` in seconds."""
    table = make_table("", *by_contender, title=title)
    for metric in METRICS:
        values = [each.get(f"{metric.part}.{metric.key}") for each in by_contender.values()]
        if any(value is not None for value in values):
            table.add_row(
                f"{metric.title}, {metric.unit}", *cells_with_ratios(values, metric.scale)
            )
        if metric.key == "host_hit" and floor is not None:
            over = [MISSING if value is None else f"{value / floor:.2f}x" for value in values]
            table.add_row(f"  the same over its floor of {floor * 1e3:.1f} ms", *over)
    return table
