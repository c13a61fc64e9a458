"""The results as tables and as plots."""

from collections.abc import Mapping
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.table import Table

from examples.multi_turn.results import Summary

Row = tuple[str, str, float]
"""A number's name in a summary, its title with the unit, and what to multiply it with."""

ROWS: tuple[Row, ...] = (
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
PLOTS = ("ttft_by_turn.png", "throughput.png")
COUNTS = frozenset({"requests", "device_hit_tokens", "external_hit_tokens", "computed_tokens"})
"""Whole numbers, of which a ratio says nothing."""


def summary_table(by_contender: Mapping[str, Summary], title: str) -> Table:
    """One line a number, one column a contender; times with their ratio to the first's."""
    table = Table(title=title, title_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("", no_wrap=True)
    for contender in by_contender:
        table.add_column(contender, justify="right", no_wrap=True)
    for name, heading, scale in ROWS:
        values = [each.numbers.get(name) for each in by_contender.values()]
        cells = []
        for value in values:
            if value is None:
                cells.append("-")
            elif name in COUNTS:
                cells.append(f"{value:,.0f}")
            else:
                text = _number(value * scale)
                base = values[0]
                ratio = f" ({value / base:.2f}x)" if base and value is not base else ""
                cells.append(text + ratio)
        table.add_row(heading, *cells)
    return table


def turn_table(by_contender: Mapping[str, Summary]) -> Table:
    """TTFT of each turn, one line a contender."""
    table = Table(title="TTFT by turn, ms", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    for heading in ("turn", ""):
        table.add_column(heading, no_wrap=True)
    for heading in ("mean", "p50", "p90", "p99"):
        table.add_column(heading, justify="right", no_wrap=True)
    turns = sorted({turn for each in by_contender.values() for turn in each.by_turn})
    for turn in turns:
        label = str(turn + 1)
        for contender, summary in by_contender.items():
            if turn in summary.by_turn:
                times = summary.by_turn[turn]
                values = (times.mean, times.p50, times.p90, times.p99)
                table.add_row(label, contender, *(_number(value * 1e3) for value in values))
                label = ""
    return table


def save_plots(directory: Path, by_contender: Mapping[str, Summary], title: str) -> list[Path]:
    """Write the plots as PNG; return where they are."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import MaxNLocator

    # A contender keeps its colour whoever else takes part.
    colours = {
        "none": "tab:gray",
        "ours": "tab:blue",
        "builtin": "tab:orange",
        "builtin-BLHNC": "tab:red",
        "offloading": "tab:green",
    }
    paths = [directory / name for name in PLOTS]
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for contender, summary in by_contender.items():
        turns = [turn + 1 for turn in summary.by_turn]
        for name, style in (("mean", "o-"), ("p99", ":")):
            values = [getattr(times, name) * 1e3 for times in summary.by_turn.values()]
            label = f"{contender}, {name}"
            axes.plot(turns, values, style, color=colours.get(contender), label=label)
    axes.set(title=title, xlabel="turn", ylabel="TTFT, ms", ylim=(0, None))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend()
    figure.savefig(paths[0], dpi=120)
    plt.close(figure)

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    names = list(by_contender)
    values = [each.numbers["requests_per_second"] for each in by_contender.values()]
    bars = axes.bar(names, values, color=[colours.get(name) for name in names])
    axes.bar_label(bars, [_number(value) for value in values])
    axes.set(title=title, ylabel="requests/s")
    figure.savefig(paths[1], dpi=120)
    plt.close(figure)
    return paths


def _number(value: float) -> str:
    """Three digits that count, and no more."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"
