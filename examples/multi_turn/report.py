"""The results as tables and as plots."""

from collections.abc import Mapping
from dataclasses import astuple
from pathlib import Path

from rich.table import Table

from examples.bench.tables import (
    MISSING,
    cells_with_ratios,
    digits,
    make_figure,
    make_table,
    save_figure,
)
from examples.multi_turn.results import Summary

ROWS = (
    ("requests", "requests done", 1),
    ("ttft_mean", "TTFT, mean, ms", 1e3),
    ("ttft_p50", "TTFT, p50, ms", 1e3),
    ("ttft_p90", "TTFT, p90, ms", 1e3),
    ("ttft_p99", "TTFT, p99, ms", 1e3),
    ("later_ttft_mean", "TTFT from the second turn on, mean, ms", 1e3),
    ("tpot_mean", "TPOT, mean, ms", 1e3),
    ("tpot_p99", "TPOT, p99, ms", 1e3),
    ("requests_per_second", "requests/s", 1),
    ("answer_tokens_per_second", "answer tokens/s", 1),
    ("tokens_per_second", "all tokens/s", 1),
    ("device_hit_tokens", "prompt tokens from the device", 1),
    ("external_hit_tokens", "prompt tokens from the connector", 1),
    ("computed_tokens", "prompt tokens computed", 1),
    ("loaded_bytes", "loaded, GB", 1e-9),
    ("stored_bytes", "stored, GB", 1e-9),
)
"""A number's name in a summary, its title with the unit, and the factor to that unit."""
COUNTS = frozenset({"requests", "device_hit_tokens", "external_hit_tokens", "computed_tokens"})
"""Whole numbers, shown without ratios."""

PLOTS = ("ttft_by_turn.png", "throughput.png")
_COLORS = {
    "none": "tab:gray",
    "ours": "tab:blue",
    "builtin": "tab:orange",
    "builtin-BLHNC": "tab:red",
    "offloading": "tab:green",
}
"""A contender has the same color in every run."""


def summary_table(by_contender: Mapping[str, Summary], title: str) -> Table:
    """One line a number, one column a contender; times with their ratio to the first's."""
    table = make_table("", *by_contender, title=title)
    for name, heading, scale in ROWS:
        values = [each.numbers.get(name) for each in by_contender.values()]
        if name in COUNTS:
            cells = [MISSING if value is None else f"{value:,.0f}" for value in values]
        else:
            cells = cells_with_ratios(values, scale)
        table.add_row(heading, *cells)
    return table


def turn_table(by_contender: Mapping[str, Summary]) -> Table:
    """TTFT of each turn, one line a contender."""
    table = make_table("turn", "", "mean", "p50", "p90", "p99", left=2, title="TTFT by turn, ms")
    turns = sorted({turn for each in by_contender.values() for turn in each.by_turn})
    for turn in turns:
        label = str(turn + 1)
        for contender, summary in by_contender.items():
            if turn in summary.by_turn:
                times = (digits(seconds * 1e3) for seconds in astuple(summary.by_turn[turn]))
                table.add_row(label, contender, *times)
                label = ""
    return table


def save_plots(directory: Path, by_contender: Mapping[str, Summary], title: str) -> list[Path]:
    """Write the plots as PNG; return their paths. Raises ImportError without matplotlib."""
    figure = make_figure(7, 4)
    axes = figure.subplots()
    for contender, summary in by_contender.items():
        turns = [turn + 1 for turn in summary.by_turn]
        for name, style in (("mean", "o-"), ("p99", ":")):
            values = [getattr(times, name) * 1e3 for times in summary.by_turn.values()]
            label = f"{contender}, {name}"
            axes.plot(turns, values, style, color=_COLORS.get(contender), label=label)
    axes.set(title=title, xlabel="turn", ylabel="TTFT, ms", ylim=(0, None))
    axes.locator_params(axis="x", integer=True)
    axes.legend()
    throughput = make_figure(7, 4)
    axes = throughput.subplots()
    values = [each.numbers["requests_per_second"] for each in by_contender.values()]
    bars = axes.bar(
        list(by_contender), values, color=[_COLORS.get(name, "black") for name in by_contender]
    )
    axes.bar_label(bars, [digits(value) for value in values])
    axes.set(title=title, ylabel="requests/s")
    paths = [directory / name for name in PLOTS]
    for path, each in zip(paths, (figure, throughput), strict=True):
        save_figure(path, each)
    return paths
