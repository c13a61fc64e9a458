"""The measured numbers."""

from dataclasses import dataclass, field, fields
from enum import Enum
from functools import reduce
from itertools import chain
from operator import add
from statistics import fmean
from typing import Any

from examples.bench.tables import percentile
from examples.scheduler_bench.engine import Wait
from examples.scheduler_bench.plan import Plan

RIVAL = "builtin"
"""The contender that the others are compared with."""
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


@dataclass
class Row:
    """All contenders at one size."""

    kind: Kind
    size: int
    cells: dict[str, float]
    """By contender, seconds in the connector's hooks."""


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


@dataclass
class Results:
    """The measurements of a run so far."""

    plan: Plan
    machine: dict[str, Any]
    """Processor, versions, date."""
    rows: list[Row] = field(default_factory=list)
    footprints: dict[str, Footprint] = field(default_factory=dict)
    plays: list[Play] = field(default_factory=list)
    """Chats, replays, and agents of hybrid models."""
    sizes: dict[str, list[dict[float, Size]]] = field(default_factory=dict)
    """By trace and the memory that the other sizes are predicted from; then by seed and factor."""
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
        return vars(self) | {"plays": [play.to_json() for play in self.plays]}
