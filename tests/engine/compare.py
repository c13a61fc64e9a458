"""Whether two engines gave the same answers."""

from collections.abc import Sequence

from tests.engine.harness import log_tail
from tests.engine.spec import Answer, EngineResult

LOGPROB_TOLERANCE = 5e-4
"""Largest difference of logprobs. Rounding causes about 1e-5; a wrong KV block causes
hundredths."""

MIN_LEAD = 1e-4
"""Smallest lead of the best token that rounding cannot reverse."""


def differences(
    expected: Sequence[dict[str, Answer]], actual: Sequence[dict[str, Answer]]
) -> list[str]:
    """One line per answer that differs: in any token, or in a logprob by more than rounding."""
    if len(expected) != len(actual):
        return [f"{len(actual)} rounds, not {len(expected)}"]
    found = []
    for number, (ours, theirs) in enumerate(zip(expected, actual, strict=True)):
        if ours.keys() != theirs.keys():
            found.append(f"round {number}: answers to {sorted(theirs)}, not {sorted(ours)}")
            continue
        for ask_id, answer in ours.items():
            difference = _difference(answer, theirs[ask_id])
            if difference is not None:
                found.append(f"round {number}, {ask_id}: {difference}")
    return found


def assert_same_answers(expected: Sequence[dict[str, Answer]], result: EngineResult) -> None:
    """Fail, with the first differences, unless ``result`` has the ``expected`` rounds."""
    assert result.error is None, result.error
    found = differences(expected, result.rounds)
    first = "\n".join(found[:10])
    assert not found, f"{len(found)} answers differ:\n{first}\n{log_tail(result.log)}"


def assert_nothing_left(result: EngineResult) -> None:
    """Fail unless every block of both pools is free, the connector's own check of its state passes,
    and the engine's shutdown left no thread."""
    assert result.error is None, result.error
    assert result.device_pool is not None
    left = [
        f"{pool.total - pool.free} {name} blocks are not free"
        for name, pool in (("device", result.device_pool), ("host", result.host_pool))
        if pool is not None and pool.free != pool.total
    ]
    if result.integrity_problem is not None:
        left.append(result.integrity_problem)
    if result.surviving_threads:
        left.append(f"threads left: {result.surviving_threads}")
    assert not left, "\n".join([*left, log_tail(result.log)])


def _difference(ours: Answer, theirs: Answer) -> str | None:
    for position, (token, other) in enumerate(zip(ours.tokens, theirs.tokens, strict=False)):
        if token != other:
            lead = ours.leads[position]
            return f"token {position} is {other}, not {token}, which led by {lead:.1e}"
    if len(ours.tokens) != len(theirs.tokens):
        return f"{len(theirs.tokens)} tokens, not {len(ours.tokens)}"
    distance = max(abs(a - b) for a, b in zip(ours.logprobs, theirs.logprobs, strict=True))
    if distance > LOGPROB_TOLERANCE:
        return f"logprobs differ by up to {distance:.1e}"
    return None
