"""The answers of a run, and the comparison of two runs."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from statistics import fmean


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
