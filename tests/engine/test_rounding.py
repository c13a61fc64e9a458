"""Differences that rounding may explain, and others."""

import math

import pytest

from tests.engine.rounding import Comparison, Rounding, compare
from tests.engine.spec import Answer, EngineResult, JobResult

ROUNDING = Rounding(0.05)


def answer(
    tokens: list[int], *, logprob: float = -1.0, lead: float = 1.0, cached: int = 64
) -> Answer:
    count = len(tokens)
    return Answer(
        tokens=tokens,
        logprobs=[logprob] * count,
        leads=[lead] * count,
        num_cached_tokens=cached,
    )


def compared(ours: Answer, theirs: Answer, *, exact: bool = False) -> Comparison:
    return compare({"a": ours}, {"a": theirs}, ROUNDING, exact=exact)


def test_close_logprobs_are_the_same() -> None:
    found = compared(answer([1, 2, 3]), answer([1, 2, 3], logprob=-1.04), exact=True)
    assert found == ([], 1, 1)


@pytest.mark.parametrize("logprob", [-1.06, math.nan])
def test_a_distant_logprob_is_wrong(logprob: float) -> None:
    assert len(compared(answer([1, 2]), answer([1, 2], logprob=logprob)).wrong) == 1


def test_a_coarse_format_hides_nothing_in_steps_of_the_same_shape() -> None:
    coarse = Rounding(0.5, same_shape=0.05)
    ours, theirs = {"a": answer([1, 2])}, {"a": answer([1, 2], logprob=-1.3)}
    assert len(compare(ours, theirs, coarse, exact=True).wrong) == 1
    assert compare(ours, theirs, coarse, exact=False).wrong == []
    elsewhere = {"a": answer([1, 2], logprob=-1.3, cached=32)}
    assert compare(ours, elsewhere, coarse, exact=True).wrong == []


def test_another_token_is_wrong_after_a_clear_lead() -> None:
    (line,) = compared(answer([1, 2, 3]), answer([1, 9, 3])).wrong
    assert line == "a: token 1 is 9, not 2, which led by 1.0e+00"


def test_another_token_is_a_tie_after_a_small_lead() -> None:
    tied = answer([1, 2, 3], lead=0.09)
    assert compared(tied, answer([1, 9, 8])) == ([], 0, 1)
    # Steps of the same shape give the same bits: then there are no ties.
    assert len(compared(tied, answer([1, 9, 8]), exact=True).wrong) == 1
    assert compared(tied, answer([1, 9, 8], cached=32), exact=True) == ([], 0, 1)


def test_a_tie_does_not_excuse_earlier_differences() -> None:
    theirs = answer([1, 9], lead=0.09).model_copy(update={"logprobs": [-2.0, -1.0]})
    assert len(compared(answer([1, 2], lead=0.09), theirs).wrong) == 1


def test_nan_travels() -> None:
    """After a wrong block a logprob may be NaN, and the negative control reads it."""
    sent = JobResult(results=[EngineResult(rounds=[{"a": answer([1], logprob=math.nan)}])])
    (result,) = JobResult.model_validate_json(sent.model_dump_json()).results
    assert math.isnan(result.rounds[0]["a"].logprobs[0])


def test_missing_tokens_and_answers_are_wrong() -> None:
    assert len(compared(answer([1, 2]), answer([1])).wrong) == 1
    assert len(compare({"a": answer([1])}, {}, ROUNDING, exact=False).wrong) == 1
