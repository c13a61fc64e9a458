"""The measured seconds, what they come to in tables, and what they decide."""

from collections import defaultdict
from dataclasses import dataclass, field
from statistics import median, quantiles
from typing import Any, NamedTuple

from rich.table import Table

from examples.bench.tables import make_table, optional
from examples.overlap_probe.plan import GRAPHS, Plan

LEAST_FALL = 0.10
"""By how much TTFT has to fall."""
LEAST_BANDWIDTH = 0.98
"""Of one group's, which counts as no loss: repeats of one load differ by as much."""
DECIDING = 8192, 512
"""Context and new tokens."""


class Kind(NamedTuple):
    """What was timed."""

    context: int
    what: str
    """"bytes" and "scattered": a load alone, of neighbouring or scattered blocks. "compute" and
    "beside": a forward pass on the device, alone or while other bytes are copied. "both", "copied"
    and "queued": as in ``Pass``."""
    groups: int = 1
    new_tokens: int = 0
    launch: str = ""


@dataclass
class Results:
    """The measurements of a run so far."""

    plan: Plan
    machine: dict[str, Any]
    attention: str = ""
    """Its kernels."""
    seconds: defaultdict[Kind, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Of each round."""
    num_faults: int = 0
    """Forward passes with other logits than those of the same KV, never moved."""
    total_seconds: float = 0.0

    def median(self, kind: Kind) -> float | None:
        """None where it was not measured."""
        return median(self.seconds[kind]) if self.seconds.get(kind) else None

    def fall(self, kind: Kind, fixed_seconds: float) -> float | None:
        """The share that groups save of one group's time, each with ``fixed_seconds`` more."""
        after, before = self.median(kind), self.median(kind._replace(groups=1))
        if after is None or before is None:
            return None
        return 1 - (after + fixed_seconds) / (before + fixed_seconds)

    def bandwidth(self, groups: int) -> float | None:
        """Of loads in ``groups`` groups over one group's in the better order of blocks: the least
        of all contexts."""
        shares = []
        for context in self.plan.contexts:
            today = [self.median(Kind(context, order)) for order in ("bytes", "scattered")]
            grouped = self.median(Kind(context, "bytes", groups))
            if grouped is not None:
                shares.append(min(filter(None, today), default=0.0) / grouped)
        return min(shares, default=None)

    def verdict(self) -> tuple[bool | None, list[str]]:
        """Whether groups pay, and why; None where that cannot be said."""
        (context, new_tokens), lines, pays = DECIDING, [], []
        for groups in self.plan.groups[1:]:
            kind = Kind(context, "both", groups, new_tokens, GRAPHS)
            fall, share = self.fall(kind, self.plan.fixed_seconds), self.bandwidth(groups)
            if fall is not None and share is not None:
                pays.append(fall >= LEAST_FALL and share >= LEAST_BANDWIDTH)
                lines.append(
                    f"{groups} groups: TTFT falls by {fall:.1%} (at least {LEAST_FALL:.0%}), "
                    f"bandwidth is {share:.1%} of one group's (at least {LEAST_BANDWIDTH:.0%})."
                )
        where = f"{new_tokens} new tokens behind {context:,} loaded ones"
        if self.num_faults:
            return None, [f"No verdict: {self.num_faults} forward passes read wrong KV.", *lines]
        if not pays:
            return None, [f"No verdict: {where} were not measured."]
        return any(pays), [f"{'BUILD' if any(pays) else 'DO NOT BUILD'}, by {where}.", *lines]

    def to_json(self) -> dict[str, Any]:
        """The content of the results file."""
        builds, lines = self.verdict()
        rows = [{**kind._asdict(), "seconds": found} for kind, found in self.seconds.items()]
        found = {**vars(self), "seconds": rows, "builds": builds, "verdict": lines}
        return {**found.pop("machine"), **found}

    def loads_table(self) -> Table:
        """Loads alone."""
        table = make_table(
            *("context", "groups", "blocks", "piece, KiB", "ms", "GB/s"),
            caption="Loads alone, from submission to the end, medians. GB/s: 10^9 bytes.",
        )
        for kind in self.seconds:
            if kind.what in ("bytes", "scattered"):
                seconds, block_bytes = median(self.seconds[kind]), self.plan.shape.block_bytes
                blocks = kind.context // self.plan.shape.block_tokens
                table.add_row(
                    f"{kind.context:,}",
                    str(kind.groups),
                    "scattered" if kind.what == "scattered" else "neighbours",
                    f"{block_bytes // kind.groups >> 10:,}",
                    f"{seconds * 1e3:.1f}",
                    f"{blocks * block_bytes / seconds / 1e9:.1f}",
                )
        return table

    def passes_table(self) -> Table:
        """Forward passes, alone and behind loads."""
        table = make_table(
            *("context", "new", "launch", "compute", "beside"),
            *(f"{groups} groups" if groups > 1 else "1 group" for groups in self.plan.groups),
            "spread",
            caption="Milliseconds, medians. Compute: the forward pass on the device, alone and "
            "beside a load. Groups: from a load's submission to the end of the pass behind it; "
            f"compute is queued {self.plan.lag_seconds * 1e3:g} ms after the submission at the "
            "earliest. Spread: quartiles, of the median.",
        )
        for kind, each in self._passes():
            table.add_row(
                *(f"{kind.context:,}", f"{kind.new_tokens:,}", kind.launch),
                *(self._ms(kind._replace(what=what)) for what in ("compute", "beside")),
                *map(self._ms, each),
                f"{max(_spread(self.seconds[grouped]) for grouped in each):.1%}",
            )
        return table

    def changes_table(self) -> Table:
        """Groups against one group."""
        fixed, more = self.plan.fixed_seconds, self.plan.groups[1:]
        table = make_table(
            *("context", "new", "launch"),
            *(f"{what}\n{groups}" for what in ("both", "TTFT") for groups in more),
            *(f"copied\n{groups}" for groups in self.plan.groups),
            caption="By number of groups, changes against one. Both: load and forward pass; TTFT "
            f"has {fixed * 1e3:g} ms more. Copied: ms that the device took for the load meanwhile. "
            "One new token: vLLM's full CUDA graph has no place to wait, so today's way stays.",
        )
        for kind, each in self._passes():
            falls = [self.fall(grouped, s) for s in (0.0, fixed) for grouped in each[1:]]
            table.add_row(
                *(f"{kind.context:,}", f"{kind.new_tokens:,}", kind.launch),
                *(optional(None if fall is None else -fall, "+.0%") for fall in falls),
                *(self._ms(grouped._replace(what="copied")) for grouped in each),
            )
        return table

    def _passes(self) -> list[tuple[Kind, list[Kind]]]:
        """Each forward pass behind a load in one group, and with all numbers of groups."""
        kinds = [kind for kind in self.seconds if kind.what == "both" and kind.groups == 1]
        return [(kind, [kind._replace(groups=g) for g in self.plan.groups]) for kind in kinds]

    def _ms(self, kind: Kind) -> str:
        seconds = self.median(kind)
        return optional(None if seconds is None else seconds * 1e3, ".1f")


def _spread(seconds: list[float]) -> float:
    """The larger distance of a quartile from the median, as a share of the median."""
    if len(seconds) < 2:
        return 0.0
    low, middle, high = quantiles(seconds, method="inclusive")
    return max(high - middle, middle - low) / middle
