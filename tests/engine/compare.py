"""Whether two engines gave the same answers, up to rounding."""

from collections.abc import Sequence
from typing import NamedTuple

from tests.engine.harness import log_tail
from tests.engine.spec import Answer, EngineResult

LOGPROB_TOLERANCE = 5e-4
"""Largest difference of logprobs in float32. Rounding causes about 1e-5; a wrong KV block causes
hundredths."""

MIN_LEAD = 1e-4
"""Smallest lead of the best token that rounding in float32 cannot reverse."""


class Rounding(NamedTuple):
    """The largest effect of the order of summation.

    If two engines compute the same tokens in steps of the same shape, kernels give the same bits,
    and tokens must be equal. If other requests share the steps, or one engine has CUDA graphs, the
    order of summation differs. Rounding may then swap the two best tokens, and the rest of that
    answer cannot be compared.
    """

    logprob: float
    """Largest distance of two logprobs of one token."""
    lead: float
    """Smallest lead of the best token that rounding cannot reverse."""
    same_shape: float | None = None
    """``logprob`` if both engines computed the token in steps of one shape; None: no other limit. A
    coarse format needs a smaller one, since ``logprob`` would hide a wrong block."""


SMALL_MODEL = Rounding(LOGPROB_TOLERANCE, lead=0.0)
"""For answers of small models on CPUs. Each of their tokens leads by more than MIN_LEAD."""


class Comparison(NamedTuple):
    """The comparison of one round."""

    wrong: list[str]
    """One line per answer with a difference that rounding cannot explain."""
    whole: int
    """Number of answers with equal tokens."""


def compare(
    expected: dict[str, Answer],
    actual: dict[str, Answer],
    rounding: Rounding = SMALL_MODEL,
    *,
    exact: bool = False,
) -> Comparison:
    """Compare one round. ``exact``: a token that differs is wrong even after a small lead, if
    both engines had the same number of cached tokens."""
    if expected.keys() != actual.keys():
        return Comparison([f"answers to {sorted(actual)}, not {sorted(expected)}"], 0)
    wrong = []
    whole = 0
    for ask_id, ours in expected.items():
        theirs = actual[ask_id]
        same_shape = ours.num_cached_tokens == theirs.num_cached_tokens
        line = _difference(ours, theirs, rounding, exact=exact and same_shape)
        if line is not None:
            wrong.append(f"{ask_id}: {line}")
        whole += ours.tokens == theirs.tokens
    return Comparison(wrong, whole)


def assert_same_answers(expected: Sequence[dict[str, Answer]], result: EngineResult) -> None:
    """Fail, with the first differences, unless ``result`` has the ``expected`` rounds."""
    assert result.error is None, result.error
    assert len(result.rounds) == len(expected)
    found = [
        f"round {number}, {line}"
        for number, (ours, theirs) in enumerate(zip(expected, result.rounds, strict=True))
        for line in compare(ours, theirs).wrong
    ]
    first = "\n".join(found[:10])
    assert not found, f"{len(found)} answers differ:\n{first}\n{log_tail(result.log)}"


def assert_nothing_left(result: EngineResult, *, threads: str = "") -> None:
    """Fail unless every block of both pools is free, the connector's own check of its state passes,
    and the engine's shutdown left no thread whose name begins with ``threads``."""
    assert result.error is None, result.error
    survivors = [name for name in result.surviving_threads if name.startswith(threads)]
    assert not result.left + survivors, f"{result.left}, {survivors}\n{log_tail(result.log)}"


def _difference(ours: Answer, theirs: Answer, rounding: Rounding, *, exact: bool) -> str | None:
    if len(ours.tokens) != len(theirs.tokens):
        return f"{len(theirs.tokens)} tokens, not {len(ours.tokens)}"
    limit = rounding.logprob
    if exact and rounding.same_shape is not None:
        limit = rounding.same_shape
    for position, (token, other) in enumerate(zip(ours.tokens, theirs.tokens, strict=True)):
        if token != other:
            lead = ours.leads[position]
            if not exact and lead < rounding.lead:
                return None
            return f"token {position} is {other}, not {token}, which led by {lead:.1e}"
        distance = abs(ours.logprobs[position] - theirs.logprobs[position])
        if not distance <= limit:  # after a wrong block it may be NaN
            return f"the logprob of token {position} is off by {distance:.1e}"
    return None
