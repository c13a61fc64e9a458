"""The answers of a run; the comparison of two runs, as a table and as a plot."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from rich.table import Table

from examples.bench.tables import make_figure, make_table, save_figure

WITHOUT, WITH = "tab:red", "tab:blue"
SOURCES = {"from_device": "tab:green", "from_host": "tab:blue", "recomputed": "tab:orange"}
"""Colors of the sources of a prompt's KV."""


@dataclass(frozen=True)
class Answer:
    """One request, as the engine served it. Users and turns count from 0."""

    user: int
    turn: int
    prompt_tokens: int
    from_device: float
    """Prompt tokens whose KV the engine's own prefix cache still held."""
    from_host: float
    """Prompt tokens whose KV came from the connector."""
    recomputed: float
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
    """One turn, mean over its users; the sources are those of the run with the connector."""

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
        means = {
            name: fmean(getattr(answer, name) for answer in after)
            for name in ("prompt_tokens", *SOURCES)
        }
        times = [fmean(answer.ttft for answer in answers) for answers in (before, after)]
        rows.append(TurnRow(turn, **means, ttft_without=times[0], ttft_with=times[1]))
    return rows


class Verdict(NamedTuple):
    passed: bool
    sentence: str


def compare(without: Sequence[Answer], with_host: Sequence[Answer]) -> Verdict:
    """Compare both runs, answer by answer and token by token. The demo passes with the same tokens
    in both, some of them from host memory."""
    difference = _first_difference(without, with_host)
    if difference is not None:
        return Verdict(False, f"NOT the same: {difference}.")
    gap = max(
        abs(one - other)
        for before, after in zip(without, with_host, strict=True)
        for one, other in zip(before.logprobs, after.logprobs, strict=True)
    )
    num_tokens = sum(len(answer.tokens) for answer in with_host)
    same = f"All {num_tokens} tokens of {len(with_host)} answers are the same"
    same = f"{same} (logprobs within {gap:.1e})"
    from_host = sum(answer.from_host for answer in with_host)
    if not from_host:
        return Verdict(False, f"{same}, but no token came from host memory.")
    return Verdict(True, f"{same}; {from_host:.0f} prompt tokens came from host memory.")


def compare_restarted(before: Sequence[Answer], after: Sequence[Answer]) -> Verdict:
    """Compare an engine with one that started later, with its files: that one passes if it gives
    the same tokens, and finds first messages too."""
    difference = _first_difference(before, after)
    if difference is not None:
        return Verdict(False, f"After the restart NOT the same: {difference}.")
    first = [answer for answer in after if answer.turn == 0]
    found = sum(answer.from_host for answer in first)
    ttft, ttft_before = (
        fmean(answer.ttft for answer in answers if answer.turn == 0) for answers in (after, before)
    )
    return Verdict(
        found > 0,
        f"After the restart, the same tokens; {found:.0f} of the "
        f"{sum(answer.prompt_tokens for answer in first)} tokens of first messages came from "
        f"files. First token after {ttft:.2f} s, before {ttft_before:.2f} s.",
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
    turns = [row.turn + 1 for row in rows]
    times.plot(turns, [row.ttft_without for row in rows], color=WITHOUT, label="without connector")
    times.plot(turns, [row.ttft_with for row in rows], color=WITH, label="with connector")
    for answers, color in ((without, WITHOUT), (with_host, WITH)):
        users = [answer.turn + 1 for answer in answers]
        times.scatter(users, [answer.ttft for answer in answers], color=color, s=14, alpha=0.6)
    times.set_ylabel("time to first token (s)")
    times.set_title("Time to first token (line: mean, dots: each user)")
    times.legend()
    bottom = [0.0] * len(rows)
    for field, color in SOURCES.items():
        counts = [getattr(row, field) for row in rows]
        label = field.replace("_", " ")
        sources.bar(turns, counts, bottom=bottom, width=0.6, color=color, label=label)
        bottom = [low + count for low, count in zip(bottom, counts, strict=True)]
    sources.set_ylabel("prompt tokens, mean over users")
    sources.set_title("Sources of the prompt's KV, with the connector")
    sources.legend(loc="upper left")
    for axes in (times, sources):
        axes.set_xlabel("turn of the conversation")
        axes.locator_params(axis="x", integer=True)
        axes.grid(axis="y", alpha=0.3)
        axes.set_ylim(bottom=0)
    save_figure(path, figure)
