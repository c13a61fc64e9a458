"""What several runs of the same work come to; tables of results."""

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, median

from rich.box import SIMPLE_HEAD
from rich.table import Table

MISSING = "-"

Row = Mapping[str, str | None]
"""Cells by the headings of their columns. None is shown as MISSING, as is a missing one."""


def make_table(
    rows: Iterable[Row | str],
    *,
    left: int = 1,
    title: str | None = None,
    caption: str | None = None,
) -> Table:
    """A table whose first ``left`` columns hold words and the others numbers. Its columns are those
    of all rows. A text among the rows begins a section, and is its first line unless it is empty.
    """
    table = Table(
        box=SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
        title=title,
        title_style="bold",
        caption=caption,
        caption_justify="left",
        caption_style="",
    )
    rows = list(rows)
    headings = dict.fromkeys(name for row in rows if not isinstance(row, str) for name in row)
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="left" if index < left else "right", no_wrap=True)
    for row in rows:
        if isinstance(row, str):
            table.add_section()
            if row:
                table.add_row(row, style="bold")
        else:
            cells = [row.get(name) for name in headings]
            table.add_row(*(MISSING if cell is None else cell for cell in cells))
    return table


def digits(value: float) -> str:
    """``value`` with three significant digits."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def with_ratio(text: str | None, value: float | None, base: float | None) -> str | None:
    """``text``, and the ratio of ``value`` to ``base`` if there is one."""
    if value is None or not base:
        return text
    return f"{text} ({value / base:.2f}x)"


def cells_with_ratios(values: Mapping[str, float | None], scale: float = 1.0) -> Row:
    """Each value times ``scale``, and from the second on its ratio to the first."""
    first, cells = next(iter(values), ""), {}
    for name, value in values.items():
        text = None if value is None else digits(value * scale)
        cells[name] = text if name == first else with_ratio(text, value, values[first])
    return cells


def medians(runs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The median of each number, over the runs that have it."""
    names = dict.fromkeys(name for run in runs for name in run)
    return {name: median(run[name] for run in runs if name in run) for name in names}


def spread(values: Iterable[float], *shares: int) -> dict[str, float]:
    """The mean, the percentiles ``shares``, and the maximum ("worst") of ``values``."""
    ordered = sorted(values)
    places = {f"p{share}": int(share / 100 * len(ordered)) for share in shares}
    below = {name: ordered[place] for name, place in places.items()}
    return {"mean": fmean(ordered), **below, "worst": ordered[-1]}
