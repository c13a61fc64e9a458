"""The demo's results as a table and as a plot."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator
from rich.table import Table

from examples.bench.tables import make_figure, make_table, save_figure
from examples.demo.results import Answer, TurnRow

WITHOUT, WITH = "tab:red", "tab:blue"


def turn_table(rows: Sequence[TurnRow]) -> Table:
    """One line a turn: means over the users, tokens as counts and times in seconds."""
    table = make_table(
        *("turn", "prompt\ntokens", "from\ndevice", "from\nhost", "recomputed"),
        *("TTFT\nwithout", "TTFT\nwith", "speed-up"),
        left=0,
        caption="Means over users. Sources of the prompt's KV\n"
        "are those with the connector. TTFT: time to the\n"
        "first token, without the connector and with it.",
    )
    for row in rows:
        counts = (row.prompt_tokens, row.from_device, row.from_host, row.recomputed)
        table.add_row(
            str(row.turn + 1),
            *(f"{count:.0f}" for count in counts),
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
    """Write a PNG: time to first token by turn, and the sources of each turn's prompt."""
    figure = make_figure(11, 4.5)
    times, sources = figure.subplots(1, 2)
    _plot_times(times, rows, without, with_host)
    _plot_sources(sources, rows)
    for axes in (times, sources):
        axes.set_xlabel("turn of the conversation")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(axis="y", alpha=0.3)
        axes.set_ylim(bottom=0)
    save_figure(path, figure)


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
        users = [answer.turn + 1 for answer in answers]
        axes.scatter(users, [answer.ttft for answer in answers], color=color, s=14, alpha=0.6)
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
    axes.set_title("Sources of the prompt's KV, with the connector")
    axes.legend(loc="upper left")
