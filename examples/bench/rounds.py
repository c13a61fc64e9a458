"""What several runs of the same work come to."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

Runs = Mapping[str, Sequence[Mapping[str, Any]]]
"""By contender, its runs in their order."""


def medians(runs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The median of each number, over the runs that have it."""
    names = dict.fromkeys(name for run in runs for name in run)
    return {name: median(run[name] for run in runs if name in run) for name in names}


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value below which ``share`` of an ascending sequence lies."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
