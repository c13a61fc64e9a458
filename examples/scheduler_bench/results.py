"""The measured numbers, and their tables."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import reduce
from itertools import chain
from operator import add
from statistics import fmean
from typing import Any

from rich.table import Table

from examples.bench.race import RaceResults
from examples.bench.tables import Row as Cells
from examples.bench.tables import make_table, spread, with_ratio
from examples.scheduler_bench.engine import Wait
from examples.scheduler_bench.plan import Plan

RIVAL = "builtin"
"""The contender that the others are compared with."""
LEAST = "least"
"""Names the bytes that any connector needs: a column of the bytes table."""
POOL = "vLLM's BlockPool"
"""Names vLLM's pool alone: a column of the cost table."""
KINDS = ("decode", "serving", "conversations", "stored", "loaded", "on the device")
"""The work of a row. Decode, serving and conversations are a step of ``size`` running requests:
they decode, or load their prompts, decode, end and are replaced. The others are one prompt of
``size`` tokens: it is stored, loaded when the device has lost it, and found on the device."""


@dataclass
class Row:
    """All contenders at one size."""

    kind: str
    """One of KINDS."""
    size: int
    cells: dict[str, float]
    """By contender, seconds in the connector's hooks."""


Waits = tuple[tuple[Wait, ...], ...]
"""How requests waited for their first token, run by run."""


def figures(waits: Waits) -> dict[str, float]:
    """Seconds: TTFT of all requests, its parts on average, and the least and the greatest mean
    and worst of a run. Counts: requests, and later ones that got blocks first. Empty if no
    request waited."""
    runs = [sorted(wait.answered - wait.came for wait in run) for run in waits if run]
    if not runs:
        return {}
    requests = list(chain.from_iterable(waits))
    every = list(chain.from_iterable(runs))
    means = [fmean(run) for run in runs]
    worst = [run[-1] for run in runs]
    passed = [wait.num_passed for wait in requests]
    return {
        "requests": len(every),
        **spread(every, 50, 99),
        "until_blocks": fmean(wait.got_blocks - wait.came for wait in requests),
        "load": fmean(wait.began - wait.got_blocks for wait in requests),
        "compute": fmean(wait.answered - wait.began for wait in requests),
        "least_mean": min(means),
        "greatest_mean": max(means),
        "least_worst": min(worst),
        "greatest_worst": max(worst),
        "passed_most": max(passed),
        "passed_sum": sum(passed),
    }


@dataclass(frozen=True)
class Outcome:
    """What requests found, did again and waited for. Tokens are those that were played."""

    prompt: int
    """Tokens of all prompts, in whole blocks."""
    device: int
    """Of these, found on the device."""
    host: int
    """Of these, found in the host tier."""
    unstored: int
    """Computed before, and evicted by the device when the tier did not have them."""
    evicted: int
    """Computed before, and evicted by the tier later."""
    stored: int
    """Blocks."""
    preempted: int
    """How often a request was."""
    seconds: float
    """Of the engine's clock."""
    lru: int
    """Tokens that the same requests find in an LRU cache of the device's and the tier's size
    together."""
    optimal: int
    """The same if that cache knew the future."""
    first_turns: Waits
    later_turns: Waits

    @property
    def found(self) -> int:
        """On the device or in the tier."""
        return self.device + self.host

    def share(self, tokens: int) -> float:
        """``tokens`` over those of the prompts."""
        return tokens / self.prompt if self.prompt else 0.0

    def __add__(self, other: "Outcome") -> "Outcome":
        names = (each.name for each in fields(self))
        return Outcome(*(getattr(self, name) + getattr(other, name) for name in names))

    def to_json(self) -> dict[str, Any]:
        """All numbers, and the figures of the waits."""
        waits = {"first_turns": figures(self.first_turns), "later_turns": figures(self.later_turns)}
        return vars(self) | waits


@dataclass
class Play:
    """All contenders at the same requests, with the same memory."""

    name: str
    runs: dict[str, list[Outcome]] = field(default_factory=dict)
    """By contender, the outcomes of the seeds."""

    @property
    def outcomes(self) -> dict[str, Outcome]:
        """Of all seeds together."""
        return {name: reduce(add, runs) for name, runs in self.runs.items()}

    def to_json(self) -> dict[str, Any]:
        outcomes = {name: outcome.to_json() for name, outcome in self.outcomes.items()}
        runs = {name: [each.to_json() for each in runs] for name, runs in self.runs.items()}
        return {"name": self.name, "contenders": outcomes, "runs": runs}


@dataclass(frozen=True)
class Size:
    """Shares of the prompts' tokens that are found with one size of host memory."""

    lru: float
    """By an LRU cache of device and host together."""
    predicted: float
    replayed: float
    """The requests came at the same times."""
    in_loop: float
    """Agents waited for their answers. The same as ``replayed`` where there are no agents."""
    of_order: float
    """Predicted as well, from a replay with the memory that all are predicted from, but of requests
    that come as they came in that loop."""


@dataclass(kw_only=True)
class Results(RaceResults):
    """The measurements of a run so far."""

    plan: Plan
    rows: list[Row] = field(default_factory=list)
    plays: list[Play] = field(default_factory=list)
    """Chats, replays, and agents of hybrid models."""
    sizes: dict[str, list[dict[float, Size]]] = field(default_factory=dict)
    """By trace and the memory that the other sizes are predicted from; then by seed and factor."""
    bytes: dict[str, dict[str, float]] = field(default_factory=dict)
    """By model and contender, host bytes of a token; and the least."""

    def to_json(self) -> dict[str, Any]:
        return vars(self) | {"plays": [play.to_json() for play in self.plays]}

    def tables(self) -> Iterator[Table]:
        for rows, left in (
            (self._costs(), 1),
            (_found(self.plays), 1),
            (_waits(self.plays), 2),
            (_sizes(self.sizes), 1),
            (_bytes(self.bytes), 1),
        ):
            if found := list(rows):
                caption = "Columns: docs/benchmarks.md, scheduler side"
                yield make_table(found, left=left, caption=caption)

    def _costs(self) -> Iterator[Cells | str]:
        for kind in KINDS:
            rows = [row for row in self.rows if row.kind == kind]
            yield from [""] if rows else []
            for row in rows:
                rival = row.cells.get(RIVAL)
                yield {"": kind, "size": f"{row.size:,}"} | {
                    name: with_ratio(f"{1e3 * value:.3f}", value, name != RIVAL and rival)
                    for name, value in row.cells.items()
                }


def _found(plays: Sequence[Play]) -> Iterator[Cells | str]:
    """A line for each contender of each play."""
    for play in plays:
        yield play.name
        for name, outcome in play.outcomes.items():
            of_runs = [run.share(run.found) for run in play.runs[name]]
            lost = {
                "lost on\ndevice": outcome.unstored,
                "lost in\nhost": outcome.evicted,
                "LRU": outcome.lru,
                "best": outcome.optimal,
            }
            yield {
                "contender": name,
                "device": _percent(outcome.share(outcome.device)),
                "host": _percent(outcome.share(outcome.host)),
                "found": _percent(outcome.share(outcome.found)),
                "of a run": f"{_percent(min(of_runs))} - {_percent(max(of_runs))}",
                **{
                    heading: _percent(outcome.share(tokens)) if outcome.optimal else None
                    for heading, tokens in lost.items()
                },
                "stored": f"{outcome.stored / 1000:.1f}",
                "pre-\nempted": f"{outcome.preempted:,}",
            }


def _waits(plays: Sequence[Play]) -> Iterator[Cells | str]:
    """Two lines for each contender of each play: first turns and later ones."""
    for play in plays:
        yield play.name
        for name, outcome in play.outcomes.items():
            for turns, waits in (("first", outcome.first_turns), ("later", outcome.later_turns)):
                if found := figures(waits):
                    ms = {key: f"{1e3 * value:,.0f}" for key, value in found.items()}
                    yield {
                        "contender": name,
                        "turns": turns,
                        "requests": f"{found['requests']:,.0f}",
                        "mean": ms["mean"],
                        "mean of\na run": f"{ms['least_mean']} - {ms['greatest_mean']}",
                        "p50": ms["p50"],
                        "p99": ms["p99"],
                        "worst": ms["worst"],
                        "worst of\na run": f"{ms['least_worst']} - {ms['greatest_worst']}",
                        "until\nblocks": ms["until_blocks"],
                        "load": ms["load"],
                        "com-\npute": ms["compute"],
                        "passed": f"{found['passed_most']:,.0f}",
                        "in all": f"{found['passed_sum']:,.0f}",
                        "finish, s": f"{outcome.seconds:,.1f}",
                    }


def _sizes(sizes: Mapping[str, Sequence[Mapping[float, Size]]]) -> Iterator[Cells | str]:
    """A line for each size of host memory."""
    for name, by_seed in sizes.items():
        yield name
        for factor in by_seed[0] if by_seed else ():
            runs = [run[factor] for run in by_seed]
            yield {
                "host memory": f"{factor:g} x",
                "LRU of\nD + H": _percent(fmean(run.lru for run in runs)),
                "predicted": _percent(fmean(run.predicted for run in runs)),
                "replayed": _percent(fmean(run.replayed for run in runs)),
                "its error": _error(run.predicted - run.replayed for run in runs),
                "agents\nwait": _percent(fmean(run.in_loop for run in runs)),
                "error": _error(run.predicted - run.in_loop for run in runs),
                "of that\norder": _percent(fmean(run.of_order for run in runs)),
            }


def _bytes(sizes: Mapping[str, Mapping[str, float]]) -> Iterator[Cells]:
    """A line for each model."""
    for model, by_name in sizes.items():
        yield {"model": model} | {
            name: with_ratio(f"{value:,.0f}", value, name == "ours" and by_name[LEAST])
            for name, value in by_name.items()
        }


def _error(shares: Iterable[float]) -> str:
    errors = [100 * share for share in shares]
    return f"{fmean(errors):+.1f} ({max(errors, key=abs):+.1f})"


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"
