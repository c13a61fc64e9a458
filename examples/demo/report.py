"""The demo's results as a table and as a plot."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich.box import SIMPLE_HEAD
from rich.table import Table

from examples.demo.results import Answer, TurnRow

WITHOUT, WITH = "tab:red", "tab:blue"


def turn_table(rows: Sequence[TurnRow]) -> Table:
    """One line a turn: means over the users, tokens as counts and times in seconds."""
    table = Table(
        box=SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
        caption="Means over users. Sources of the prompt's KV\n"
        "are those with the connector. TTFT: time to the\n"
        "first token, without the connector and with it.",
        caption_justify="left",
        caption_style="",
    )
    headings = (
        "turn",
        "prompt\ntokens",
        "from\ndevice",
        "from\nhost",
        "recomputed",
        "TTFT\nwithout",
        "TTFT\nwith",
        "speed-up",
    )
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            str(row.turn + 1),
            f"{row.prompt_tokens:.0f}",
            f"{row.from_device:.0f}",
            f"{row.from_host:.0f}",
            f"{row.recomputed:.0f}",
            f"{row.ttft_without:.2f} s",
            f"{row.ttft_with:.2f} s",
            f"{row.speedup:.1f}x",
        )
    return table


def save_plot(
    path: Path,
    rows: Sequence[TurnRow],
    without: Sequence[Answer],
    with_host: Sequence[Answer],
) -> None:
    """Write a PNG: time to first token by turn, and where each turn's prompt came from."""
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    times, sources = figure.subplots(1, 2)
    _plot_times(times, rows, without, with_host)
    _plot_sources(sources, rows)
    for axes in (times, sources):
        axes.set_xlabel("turn of the conversation")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(axis="y", alpha=0.3)
        axes.set_ylim(bottom=0)
    figure.savefig(path, format="png", dpi=120)


def _plot_times(
    axes: Axes,
    rows: Sequence[TurnRow],
    without: Sequence[Answer],
    with_host: Sequence[Answer],
) -> None:
    turns = [row.turn + 1 for row in rows]
    axes.plot(turns, [row.ttft_without for row in rows], color=WITHOUT, label="without connector")
    axes.plot(turns, [row.ttft_with for row in rows], color=WITH, label="with connector")
    for answers, color in ((without, WITHOUT), (with_host, WITH)):
        axes.scatter(
            [answer.turn + 1 for answer in answers],
            [answer.ttft for answer in answers],
            color=color,
            s=14,
            alpha=0.6,
        )
    axes.set_ylabel("time to first token (s)")
    axes.set_title("Time to first token (line: mean, dots: each user)")
    axes.legend()


def _plot_sources(axes: Axes, rows: Sequence[TurnRow]) -> None:
    turns = [row.turn + 1 for row in rows]
    bottom = [0.0] * len(rows)
    layers = (
        ("from device", "tab:green", [row.from_device for row in rows]),
        ("from host", "tab:blue", [row.from_host for row in rows]),
        ("recomputed", "tab:orange", [row.recomputed for row in rows]),
    )
    for name, color, counts in layers:
        axes.bar(turns, counts, bottom=bottom, width=0.6, color=color, label=name)
        bottom = [low + count for low, count in zip(bottom, counts, strict=True)]
    axes.set_ylabel("prompt tokens, mean over users")
    axes.set_title("Where the prompt's KV came from, with the connector")
    axes.legend(loc="upper left")
