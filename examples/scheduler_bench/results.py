"""What was measured, as numbers."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

from examples.scheduler_bench.contenders import CONTENDERS
from examples.scheduler_bench.plan import Order, Plan
from examples.scheduler_bench.stopwatch import Cost

GOAL = 1 / 3
"""Of the rival's time in the hooks, at the large end."""


class Kind(Enum):
    """What a row is about, and by what."""

    DECODE = "decode"
    """A step, by requests that decode."""
    SERVING = "serving"
    """A step, by requests that run: they load their prompts, decode, end, and others come."""
    CONVERSATIONS = "conversations"
    """The same with longer prompts and answers."""
    STORED = "stored"
    """A prompt that is computed and stored, by tokens."""
    LOADED = "loaded"
    """The same prompt again."""
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
    """What it takes in addition when it holds something; None: not measured."""


@dataclass(frozen=True)
class HitCount:
    """Tokens of prompts, added up."""

    possible: int
    """Computed before, in whole blocks, and not found on the device."""
    host: int
    """Of these, loaded from the host tier."""
    device: int
    """Found on the device."""

    @property
    def rate(self) -> float:
        """Of what could hit the tier, what did."""
        return self.host / self.possible if self.possible else 0.0

    @property
    def overall_rate(self) -> float:
        """Of what could be had without computing it again, what was, from device and host."""
        reusable = self.possible + self.device
        return (self.host + self.device) / reusable if reusable else 0.0

    def __add__(self, other: "HitCount") -> "HitCount":
        return HitCount(
            self.possible + other.possible, self.host + other.host, self.device + other.device
        )


@dataclass
class HitRow:
    """All contenders at one host tier."""

    order: Order
    one_offs: bool
    """Whether prompts that nobody continues came in between."""
    host_part: float
    """Host blocks over the blocks of all conversations."""
    counts: dict[str, HitCount] = field(default_factory=dict)


@dataclass
class Results:
    """A run, as far as it has come."""

    plan: Plan
    machine: dict[str, str]
    """Processor, versions, date."""
    rows: list[Row] = field(default_factory=list)
    footprints: dict[str, Footprint] = field(default_factory=dict)
    hit_rows: list[HitRow] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    """Contenders that refuse their settings, and in which words."""
    failures: dict[str, str] = field(default_factory=dict)
    """Contenders that ended in an error, and at what with which."""
    problems: dict[str, str] = field(default_factory=dict)
    """What makes measurements worth nothing: who and where, and what."""
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return {
            **self.machine,
            "plan": asdict(self.plan),
            "rows": [
                {
                    "kind": row.kind.value,
                    "size": row.size,
                    "contenders": {name: _cost_json(row, name) for name in row.cells},
                }
                for row in self.rows
            ],
            "footprints": {name: asdict(found) for name, found in self.footprints.items()},
            "hits": [
                {
                    "order": row.order.value,
                    "one_offs": row.one_offs,
                    "host_part": row.host_part,
                    "contenders": {
                        name: {
                            **asdict(count),
                            "rate": count.rate,
                            "overall_rate": count.overall_rate,
                        }
                        for name, count in row.counts.items()
                    },
                }
                for row in self.hit_rows
            ],
            "goals": goals(self),
            "left_out": self.left_out,
            "failures": self.failures,
            "problems": self.problems,
            "seconds": self.seconds,
        }


def rival_of(name: str) -> str | None:
    """Whom a contender is compared with."""
    return CONTENDERS[name].rival if name in CONTENDERS else None


def ratio(row: Row, name: str) -> float | None:
    """A contender's time over its rival's; None where either is missing."""
    rival = row.cells.get(rival_of(name) or "")
    cell = row.cells.get(name)
    if rival is None or cell is None or rival.seconds == 0:
        return None
    return cell.seconds / rival.seconds


def least_cost(costs: Sequence[Cost]) -> Cost:
    """The one with the least time in all hooks: what else the machine does only adds to it."""
    return min(costs, key=lambda cost: cost.seconds)


def goals(results: Results) -> dict[str, bool]:
    """What was to be reached, in words with the numbers, and whether it was."""
    told: dict[str, bool] = {}
    for kind in Kind:
        rows = [row for row in results.rows if row.kind is kind]
        if not rows:
            continue
        largest = max(rows, key=lambda row: row.size)
        for name in largest.cells:
            if (share := ratio(largest, name)) is not None:
                words = f"{kind.value}, {largest.size}: {name} takes {share:.2f} of its rival's"
                told[f"{words} time (goal: {GOAL:.2f})"] = share <= GOAL
    for row in results.hit_rows:
        for name, count in row.counts.items():
            rival = row.counts.get(rival_of(name) or "")
            if rival is not None:
                told[
                    f"{hit_row_name(row)}: {name} hits {count.rate:.1%}, its rival {rival.rate:.1%}"
                ] = count.rate >= rival.rate
    return told


def hit_row_name(row: HitRow) -> str:
    """Such as "random, one-offs, tier 25%"."""
    one_offs = ", one-offs" if row.one_offs else ""
    return f"{row.order.value}{one_offs}, tier {row.host_part:.0%}"


def _cost_json(row: Row, name: str) -> dict[str, Any]:
    cost = row.cells[name]
    return {
        "seconds": cost.seconds,
        "by_hook": {hook.value: seconds for hook, seconds in cost.by_hook.items()},
        "slowest_step": cost.slowest_step,
        "of_rival": ratio(row, name),
    }
