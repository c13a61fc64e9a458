"""What several runs of the same work come to; tables and plots of results."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.table import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MISSING = "-"


def make_table(
    *headings: str, left: int = 1, title: str | None = None, caption: str | None = None
) -> Table:
    """A table whose first ``left`` columns hold words and the others numbers."""
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
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="left" if index < left else "right", no_wrap=True)
    return table


def digits(value: float) -> str:
    """``value`` with three significant digits."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def optional(value: float | None, form: str) -> str:
    """``value`` in a format such as ".2f"; a dash for None."""
    return MISSING if value is None else format(value, form)


def ratio(value: float | None, base: float | None) -> float | None:
    """None where either is missing, or nothing can be divided by ``base``."""
    return value / base if value is not None and base else None


def cells_with_ratios(values: Sequence[float | None], scale: float = 1.0) -> list[str]:
    """Each value times ``scale``, and from the second on its ratio to the first."""
    cells = [MISSING if value is None else digits(value * scale) for value in values]
    for index, value in enumerate(values[1:], start=1):
        if (share := ratio(value, values[0])) is not None:
            cells[index] += f" ({share:.2f}x)"
    return cells


def make_figure(width: float, height: float) -> "Figure":
    """In inches. Loading matplotlib takes a second."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def save_figure(path: Path, figure: "Figure") -> None:
    """Write a PNG."""
    figure.savefig(path, format="png", dpi=120)


def medians(runs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The median of each number, over the runs that have it."""
    names = dict.fromkeys(name for run in runs for name in run)
    return {name: median(run[name] for run in runs if name in run) for name in names}


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value below which ``share`` of an ascending sequence lies."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
