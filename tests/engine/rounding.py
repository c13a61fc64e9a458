"""Whether two engines gave the same answers, up to the rounding of half precision.

If two engines compute the same tokens in steps of the same shape, kernels give the same bits, and
tokens must be equal. If other requests share the steps, or one engine has CUDA graphs, the order of
summation differs. Rounding may then swap the two best tokens, and the rest of that answer cannot be
compared.
"""

from collections.abc import Sequence
from typing import NamedTuple

from tests.engine.spec import Answer


class Rounding(NamedTuple):
    """The largest effect of the order of summation."""

    logprob: float
    """Largest distance of two logprobs of one token."""
    same_shape: float | None = None
    """The same limit if both engines computed the token in steps of one shape; None: ``logprob``. A
    coarse format needs a smaller one, since ``logprob`` would hide a wrong block."""

    @property
    def lead(self) -> float:
        """Smallest lead of the best token that rounding cannot reverse."""
        return 2 * self.logprob


class Comparison(NamedTuple):
    """The comparison of one round."""

    wrong: list[str]
    """One line per answer with a difference that rounding cannot explain."""
    whole: int
    """Number of answers with equal tokens."""
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
