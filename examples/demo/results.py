"""The answers of a run; the comparison of two runs, as a table and as a plot."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from rich.table import Table

from examples.bench.tables import make_figure, make_table, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WITHOUT, WITH = "tab:red", "tab:blue"


@dataclass(frozen=True)
class Answer:
    """One request, as the engine served it. Users and turns count from 0."""

    user: int
    turn: int
    prompt_tokens: int
    from_device: int
    """Prompt tokens whose KV the engine's own prefix cache still held."""
    from_host: int
    """Prompt tokens whose KV came from the connector."""
    recomputed: int
    """Prompt tokens that went through the model."""
    ttft: float
    """Seconds from handing the request to the engine to its first token."""
    seconds: float
    """Seconds to its last token."""
    tokens: list[int]
    logprobs: list[float]
    """Of each token in ``tokens``."""


@dataclass(frozen=True)
class TurnRow:
    """One turn, averaged over its users; the sources are those of the run with the connector."""

    turn: int
    prompt_tokens: float
    from_device: float
    from_host: float
    recomputed: float
    ttft_without: float
    ttft_with: float

    @property
    def speedup(self) -> float:
        return self.ttft_without / self.ttft_with


def rows_by_turn(without: Sequence[Answer], with_host: Sequence[Answer]) -> list[TurnRow]:
    """Both runs side by side. They must hold the same users and turns."""
    rows = []
    for turn in sorted({answer.turn for answer in with_host}):
        before = [answer for answer in without if answer.turn == turn]
        after = [answer for answer in with_host if answer.turn == turn]
        counts = ("prompt_tokens", "from_device", "from_host", "recomputed")
        means = {name: fmean(getattr(answer, name) for answer in after) for name in counts}
        times = [fmean(answer.ttft for answer in answers) for answers in (before, after)]
        rows.append(TurnRow(turn, **means, ttft_without=times[0], ttft_with=times[1]))
    return rows


@dataclass(frozen=True)
class Verdict:
    """The demo passes with the same tokens in both runs, some of them from host memory."""

    answers: int
    tokens: int
    host_tokens: int
    first_difference: str | None
    max_logprob_difference: float | None
    """Over all tokens; None where the tokens differ."""

    @property
    def passed(self) -> bool:
        return self.first_difference is None and self.host_tokens > 0

    @property
    def sentence(self) -> str:
        if self.first_difference is not None:
            return f"NOT the same: {self.first_difference}."
        same = (
            f"All {self.tokens} tokens of {self.answers} answers are the same "
            f"(logprobs within {self.max_logprob_difference:.1e})"
        )
        if self.host_tokens == 0:
            return f"{same}, but no token came from host memory."
        return f"{same}; {self.host_tokens} prompt tokens came from host memory."


def compare(without: Sequence[Answer], with_host: Sequence[Answer]) -> Verdict:
    """Compare both runs, answer by answer and token by token."""
    difference = _first_difference(without, with_host)
    gap = None
    if difference is None:
        gap = max(
            abs(one - other)
            for before, after in zip(without, with_host, strict=True)
            for one, other in zip(before.logprobs, after.logprobs, strict=True)
        )
    return Verdict(
        answers=len(with_host),
        tokens=sum(len(answer.tokens) for answer in with_host),
        host_tokens=sum(answer.from_host for answer in with_host),
        first_difference=difference,
        max_logprob_difference=gap,
    )


@dataclass(frozen=True)
class RestartVerdict:
    """A restarted engine passes if it gives the same tokens, and finds first messages too."""

    first_difference: str | None
    found: int
    """Tokens of the first messages that came from the files of the engine before."""
    total: int
    ttft_before: float
    ttft: float
    """Seconds to the first token of first messages, mean over users."""

    @property
    def passed(self) -> bool:
        return self.first_difference is None and self.found > 0

    @property
    def sentence(self) -> str:
        if self.first_difference is not None:
            return f"After the restart NOT the same: {self.first_difference}."
        return (
            f"After the restart, the same tokens; {self.found} of the {self.total} tokens of first "
            f"messages came from files. First token after {self.ttft:.2f} s, before "
            f"{self.ttft_before:.2f} s."
        )


def compare_restarted(before: Sequence[Answer], after: Sequence[Answer]) -> RestartVerdict:
    """Compare an engine with one that started later, with its files."""
    first = [answer for answer in after if answer.turn == 0]
    first_before = [answer for answer in before if answer.turn == 0]
    return RestartVerdict(
        _first_difference(before, after),
        sum(answer.from_host for answer in first),
        sum(answer.prompt_tokens for answer in first),
        fmean(answer.ttft for answer in first_before),
        fmean(answer.ttft for answer in first),
    )


def _first_difference(without: Sequence[Answer], with_host: Sequence[Answer]) -> str | None:
    if len(without) != len(with_host) or not without:
        return f"{len(without)} answers without and {len(with_host)} with the connector"
    for before, after in zip(without, with_host, strict=True):
        if (before.user, before.turn) != (after.user, after.turn):
            return (
                f"user {before.user + 1}, turn {before.turn + 1} without the connector met "
                f"user {after.user + 1}, turn {after.turn + 1} with it"
            )
        pairs = zip_longest(before.tokens, after.tokens)
        for position, (one, other) in enumerate(pairs):
            if one != other:
                return (
                    f"turn {after.turn + 1}, user {after.user + 1}, token {position + 1} of the "
                    f"answer is {_token(before, position)} without and "
                    f"{_token(after, position)} with the connector"
                )
    return None


def _token(answer: Answer, position: int) -> str:
    """The token and its logprob: nearly equal logprobs on both sides mean a tie."""
    if position >= len(answer.tokens):
        return "missing"
    return f"{answer.tokens[position]} (logprob {answer.logprobs[position]:.6f})"


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
        axes.locator_params(axis="x", integer=True)
        axes.grid(axis="y", alpha=0.3)
        axes.set_ylim(bottom=0)
    save_figure(path, figure)


def _plot_times(
    axes: "Axes",
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


def _plot_sources(axes: "Axes", rows: Sequence[TurnRow]) -> None:
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
