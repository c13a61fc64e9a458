"""The results of all rounds: medians by contender, problems, tables and plots."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.table import Table

from examples.bench.connectors import COLORS
from examples.bench.counters import with_loaded_bytes
from examples.bench.replies import Reply, Times, latencies, times
from examples.bench.tables import (
    Runs,
    digits,
    make_figure,
    make_table,
    medians,
    numbers_table,
    save_figure,
)
from examples.multi_turn.plan import Plan

LEAST_AGREEMENT = 0.95
"""Share of the answers that have to be the first contender's. Not all: chance decides which
requests share a step, and with it the rounding of sums."""

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


@dataclass(frozen=True)
class Summary:
    """One contender. Each number is the median over its rounds."""

    numbers: Mapping[str, float]
    by_turn: Mapping[int, Times]
    """TTFT; turns count from 0."""


def summaries(runs: Runs, bytes_per_token: int | None) -> dict[str, Summary]:
    """By contender, of those that have a round with an answer. ``bytes_per_token`` (KV of all
    layers) stands in where a connector does not
    report its loads; None if not known."""
    found = {}
    for contender, rounds in runs.items():
        played = [each for each in rounds if each["replies"]]
        if played:
            found[contender] = Summary(
                medians([_numbers(each, bytes_per_token) for each in played]),
                _by_turn([_replies(each) for each in played]),
            )
    return found


def problems(runs: Runs, plan: Plan, requests: int, connected: Iterable[str]) -> list[str]:
    """The reasons why the numbers prove nothing, one line each. ``requests``: number of requests of
    a round; ``connected``: the contenders with a connector."""
    found = []
    for contender, rounds in runs.items():
        if len(rounds) != plan.rounds:
            found.append(f"{contender}: {len(rounds)} of {plan.rounds} rounds")
        for each in rounds:
            who = f"{contender}, round {each['round']}"
            found += [f"{who}: lost a request: {lost}" for lost in each["lost"]]
            if len(each["replies"]) != requests:
                found.append(f"{who}: {len(each['replies'])} of {requests} requests done")
            hits = each["counters"]["external_hit_tokens"]
            if contender in connected and plan.expects_hits and hits == 0:
                found.append(f"{who}: the connector got no hits")
    return found + (_disagreements(runs) if plan.compares_answers else [])


def _disagreements(runs: Runs) -> list[str]:
    answers: dict[tuple[str, int], str] = {}
    found = []
    for contender, rounds in runs.items():
        for each in rounds:
            same = [
                answers.setdefault((reply.conversation, reply.turn), reply.answer) == reply.answer
                for reply in _replies(each)
            ]
            if same and sum(same) < LEAST_AGREEMENT * len(same):
                found.append(
                    f"{contender}, round {each['round']}: {len(same) - sum(same)} of {len(same)} "
                    f"answers differ from {next(iter(runs))}'s"
                )
    return found


def _numbers(each: Mapping[str, Any], bytes_per_token: int | None) -> dict[str, float]:
    replies = _replies(each)
    later = [reply.ttft for reply in replies if reply.turn > 0]
    answered = sum(reply.answer_tokens for reply in replies)
    asked = sum(reply.prompt_tokens for reply in replies)
    numbers: dict[str, float] = {
        "requests": len(replies),
        "seconds": each["seconds"],
        "requests_per_second": len(replies) / each["seconds"],
        "answer_tokens_per_second": answered / each["seconds"],
        "tokens_per_second": (asked + answered) / each["seconds"],
        **latencies(replies),
        **with_loaded_bytes(each["counters"], bytes_per_token),
    }
    if later:
        numbers["later_ttft_mean"] = fmean(later)
    return numbers


def _by_turn(rounds: Sequence[Sequence[Reply]]) -> dict[int, Times]:
    turns = sorted({reply.turn for replies in rounds for reply in replies})
    found = {}
    for turn in turns:
        each = [[reply.ttft for reply in replies if reply.turn == turn] for replies in rounds]
        found[turn] = Times(**medians([asdict(times(ttft)) for ttft in each if ttft]))
    return found


def _replies(each: Mapping[str, Any]) -> list[Reply]:
    return [Reply(**reply) for reply in each["replies"]]


def summary_table(by_contender: Mapping[str, Summary], title: str) -> Table:
    """One line a number, one column a contender."""
    numbers = {name: each.numbers for name, each in by_contender.items()}
    return numbers_table(numbers, ROWS, COUNTS, title)


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
            axes.plot(turns, values, style, color=COLORS.get(contender), label=label)
    axes.set(title=title, xlabel="turn", ylabel="TTFT, ms", ylim=(0, None))
    axes.locator_params(axis="x", integer=True)
    axes.legend()
    throughput = make_figure(7, 4)
    axes = throughput.subplots()
    values = [each.numbers["requests_per_second"] for each in by_contender.values()]
    bars = axes.bar(
        list(by_contender), values, color=[COLORS.get(name, "black") for name in by_contender]
    )
    axes.bar_label(bars, [digits(value) for value in values])
    axes.set(title=title, ylabel="requests/s")
    paths = [directory / name for name in PLOTS]
    for path, each in zip(paths, (figure, throughput), strict=True):
        save_figure(path, each)
    return paths
