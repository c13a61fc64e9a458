"""Whether two engines gave the same answers, up to the rounding of half precision.

Where two engines compute the same tokens in steps of the same shape, kernels give the same
bits, and tokens must be equal. Where other requests share the steps, or where one engine has
CUDA graphs, sums are taken in another order: a best token may then change places with one
that was as good but for rounding, and what follows it in that answer says nothing.
"""

from collections.abc import Sequence
from typing import NamedTuple

from tests.engine.spec import Answer


class Rounding(NamedTuple):
    """What the order of summation may change."""

    logprob: float
    """Largest distance of two logprobs of one token."""
    same_shape: float | None = None
    """The same where both engines computed it in steps of one shape; None: no smaller one. A
    format so coarse that ``logprob`` would hide a wrong block needs it."""

    @property
    def lead(self) -> float:
        """A best token that leads by less may change places with the second."""
        return 2 * self.logprob


class Comparison(NamedTuple):
    """Of one round."""

    wrong: list[str]
    """What rounding cannot explain, one line an answer."""
    whole: int
    """Answers whose tokens are all the same."""
    total: int


def compare(
    expected: dict[str, Answer], actual: dict[str, Answer], rounding: Rounding, *, exact: bool
) -> Comparison:
    """Compare one round. ``exact``: a token that differs is wrong even after a small lead, if
    both engines had the same number of cached tokens."""
    if expected.keys() != actual.keys():
        return Comparison([f"answers to {sorted(actual)}, not {sorted(expected)}"], 0, 0)
    wrong = []
    whole = 0
    for ask_id, ours in expected.items():
        theirs = actual[ask_id]
        same_shape = ours.num_cached_tokens == theirs.num_cached_tokens
        line = _difference(ours, theirs, rounding, exact=exact and same_shape)
        if line is not None:
            wrong.append(f"{ask_id}: {line}")
        whole += ours.tokens == theirs.tokens
    return Comparison(wrong, whole, len(expected))


def _difference(ours: Answer, theirs: Answer, rounding: Rounding, *, exact: bool) -> str | None:
    if len(ours.tokens) != len(theirs.tokens):
        return f"{len(theirs.tokens)} tokens, not {len(ours.tokens)}"
    limit = rounding.logprob
    if exact and rounding.same_shape is not None:
        limit = rounding.same_shape
    pairs: Sequence[tuple[int, int]] = list(zip(ours.tokens, theirs.tokens, strict=True))
    for position, (token, other) in enumerate(pairs):
        if token != other:
            lead = ours.leads[position]
            if not exact and lead < rounding.lead:
                return None
            return f"token {position} is {other}, not {token}, which led by {lead:.1e}"
        distance = abs(ours.logprobs[position] - theirs.logprobs[position])
        if not distance <= limit:
            return f"the logprob of token {position} is off by {distance:.1e}"
    return None
