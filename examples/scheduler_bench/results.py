"""The measured numbers."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from functools import reduce
from itertools import chain
from operator import add
from statistics import fmean
from typing import Any

from examples.bench.tables import percentile, ratio
from examples.scheduler_bench.contenders import CONTENDERS
from examples.scheduler_bench.engine import Wait
from examples.scheduler_bench.plan import Plan
from examples.scheduler_bench.stopwatch import Cost

GOAL = 1 / 3
"""Largest share of the rival's time in the hooks, at the large end."""

BYTES_GOAL = 1.15
"""Most host bytes of a token, over the least."""
LEAST = "least"
"""Names the bytes that any connector needs: a column of the bytes table."""

POOL = "vLLM's BlockPool"
"""Names vLLM's pool alone: a line of the memory table, a column of the cost table. Connectors that
keep their blocks in it take no less memory."""


class Kind(Enum):
    """The work of a row, and the unit of its size."""

    DECODE = "decode"
    """A step, by requests that decode."""
    SERVING = "serving"
    """A step, by requests that load their prompts, decode, end, and are replaced by others."""
    CONVERSATIONS = "conversations"
    """The same with longer prompts and answers."""
    STORED = "stored"
    """A prompt that is computed and stored, by tokens."""
    LOADED = "loaded"
    """The same prompt again, after the device has lost it."""
    ON_DEVICE = "on the device"
    """The same prompt again: nothing is new."""
    STORED_FULL = "stored, tier full"
    """A prompt of one length, by the host blocks of a tier that has to evict for it."""
    LOADED_FULL = "loaded, tier full"


@dataclass
class Row:
    """All contenders at one size."""

    kind: Kind
    size: int
    cells: dict[str, Cost]


@dataclass(frozen=True)
class Footprint:
    """A large tier in a process of its own, by device blocks that it has room for."""

    tier_blocks: int
    seconds_to_start: float
    """Processor time, median."""
    bytes_per_block: float
    """Of a block that is free and empty."""
    bytes_per_filled_block: float | None
    """Additional bytes of a block that holds KV; None: not measured."""


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
    every = sorted(chain.from_iterable(runs))
    means = [fmean(run) for run in runs]
    worst = [run[-1] for run in runs]
    passed = [wait.num_passed for wait in requests]
    return {
        "requests": len(every),
        "mean": fmean(every),
        "p50": percentile(every, 0.5),
        "p99": percentile(every, 0.99),
        "worst": every[-1],
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
    loaded: int
    """Blocks."""
    preempted: int
    """How often a request was."""
    shared: float
    """Share of the tier that the device had too, mean of samples."""
    hook_seconds: float
    """Processor time in the connector's hooks."""
    steps: int
    requests: int
    seconds: float
    """Of the engine's clock."""
    lru_host: int
    """Tokens that the same requests find in an LRU cache of the tier's size."""
    lru_both: int
    """The same of the device's and the tier's size together."""
    optimal: int
    """The same if that cache knew the future."""
    first_turns: Waits
    later_turns: Waits
    known: int = 0
    """Of conversations that take turns: tokens computed before, in whole blocks."""
    known_on_device: int = 0
    """Of these, found on the device."""
    known_in_host: int = 0
    """Of these, loaded from the host tier."""
    host_bytes: int = 0
    """Of agents: what the tier holds at the end, of the whole server."""

    @property
    def found(self) -> int:
        """On the device or in the tier."""
        return self.device + self.host

    def share(self, tokens: int) -> float:
        """``tokens`` over those of the prompts."""
        return tokens / self.prompt if self.prompt else 0.0

    @property
    def hit_rate(self) -> float:
        """Of the host tier: share of the known tokens that were not on the device."""
        possible = self.known - self.known_on_device
        return self.known_in_host / possible if possible else 0.0

    @property
    def overall_hit_rate(self) -> float:
        """Share of the known tokens that were found, on the device or in the tier."""
        found = self.known_on_device + self.known_in_host
        return found / self.known if self.known else 0.0

    def __add__(self, other: "Outcome") -> "Outcome":
        sums = {
            each.name: getattr(self, each.name) + getattr(other, each.name) for each in fields(self)
        }
        mean = (self.shared * self.steps + other.shared * other.steps) / sums["steps"]
        return Outcome(**(sums | {"shared": mean}))

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

    def add(self, contender: str, outcome: Outcome) -> None:
        """Add the outcome of another seed."""
        self.runs.setdefault(contender, []).append(outcome)

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


@dataclass
class Sizes:
    """One contender and trace, and the memory of the replay that the others are predicted from."""

    name: str
    runs: list[dict[float, Size]] = field(default_factory=list)
    """By seed and factor."""


@dataclass
class Results:
    """The measurements of a run so far."""

    plan: Plan
    machine: dict[str, Any]
    """Processor, versions, date."""
    rows: list[Row] = field(default_factory=list)
    footprints: dict[str, Footprint] = field(default_factory=dict)
    hits: list[Play] = field(default_factory=list)
    chats: list[Play] = field(default_factory=list)
    traces: list[Play] = field(default_factory=list)
    sizes: list[Sizes] = field(default_factory=list)
    models: list[Play] = field(default_factory=list)
    bytes: dict[str, dict[str, float]] = field(default_factory=dict)
    """By model and contender, host bytes of a token; and the least."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Contenders that refuse their settings, and their reasons."""
    failures: dict[str, str] = field(default_factory=dict)
    """Contenders that ended in an error: the step and the error."""
    problems: dict[str, str] = field(default_factory=dict)
    """Measurements that prove nothing: contender and place, and the reason."""
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        plays = {
            name: [play.to_json() for play in getattr(self, name)]
            for name in ("hits", "chats", "traces", "models")
        }
        return vars(self) | plays | {"goals": goals(self)}


def rival_of(name: str) -> str:
    """The contender that ``name`` is compared with; empty if there is none."""
    return (CONTENDERS[name].rival or "") if name in CONTENDERS else ""


def of_rival(row: Row, name: str, value: str = "seconds") -> float | None:
    """An attribute of a contender's cost over its rival's; None where either is missing."""
    return ratio(
        getattr(row.cells.get(name), value, None),
        getattr(row.cells.get(rival_of(name)), value, None),
    )


def largest_rows(results: Results) -> Mapping[Kind, Row]:
    """Of each kind that was measured, the row with the largest size."""
    rows = sorted(results.rows, key=lambda row: row.size)
    largest = {row.kind: row for row in rows}
    return {kind: largest[kind] for kind in Kind if kind in largest}


def goals(results: Results) -> dict[str, bool]:
    """The goals, in words with the numbers; True if reached."""
    found: dict[str, bool] = {}
    for kind, row in largest_rows(results).items():
        for name in row.cells:
            if (share := of_rival(row, name)) is not None:
                words = f"{kind.value}, {row.size}: {name} takes {share:.2f} of its rival's"
                found[f"{words} time (goal: {GOAL:.2f})"] = share <= GOAL
    for play in results.hits:
        for name, outcome in play.outcomes.items():
            if (rival := play.outcomes.get(rival_of(name))) is not None:
                ours, theirs = outcome.hit_rate, rival.hit_rate
                words = f"{name} hits {ours:.1%}, its rival {theirs:.1%}"
                found[f"{play.name}: {words}"] = ours >= theirs
    for model, sizes in results.bytes.items():
        if (times := ratio(sizes.get("ours"), sizes[LEAST])) is not None:
            words = f"{model}: a token takes {times:.2f} times the least bytes"
            found[f"{words} (goal: {BYTES_GOAL})"] = times <= BYTES_GOAL
    return found
