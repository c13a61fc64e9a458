"""Replies to requests over HTTP, and what their times come to."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean

from examples.bench.tables import percentile


@dataclass
class Reply:
    """One request, as its client saw it. Times in seconds."""

    conversation: str
    turn: int
    """From 0."""
    prompt_tokens: int
    answer_tokens: int
    cached_tokens: int
    """Prompt tokens that were not computed, from any source."""
    ttft: float
    latency: float
    """To the last token."""
    answer: str

    @property
    def tpot(self) -> float | None:
        """From token to token, after the first."""
        if self.answer_tokens < 2:
            return None
        return (self.latency - self.ttft) / (self.answer_tokens - 1)


@dataclass(frozen=True)
class Times:
    """Seconds."""

    mean: float
    p50: float
    p90: float
    p99: float


def times(values: Iterable[float]) -> Times:
    """Of one or more values."""
    ordered = sorted(values)
    p50, p90, p99 = (percentile(ordered, share) for share in (0.5, 0.9, 0.99))
    return Times(fmean(ordered), p50, p90, p99)


def latencies(replies: Sequence[Reply]) -> dict[str, float]:
    """TTFT of one or more replies, and TPOT of those with several tokens."""
    ttft = times(reply.ttft for reply in replies)
    numbers = {f"ttft_{name}": value for name, value in asdict(ttft).items()}
    if tpot := [reply.tpot for reply in replies if reply.tpot is not None]:
        numbers |= {"tpot_mean": fmean(tpot), "tpot_p99": percentile(sorted(tpot), 0.99)}
    return numbers
