"""The connector's main promise, by architecture: what a small device pool evicts comes back,
and nobody can tell from the answers."""

import pytest

from examples.random_model import Architecture
from tests.engine.compare import (
    MIN_LEAD,
    assert_nothing_left,
    assert_same_answers,
    differences,
)
from tests.engine.runs import Runs, Trio
from tests.engine.workloads import full_workload

ARCHITECTURES: list[Architecture] = ["llama", "qwen3", "gemma3"]


@pytest.fixture(params=ARCHITECTURES)
def trio(runs: Runs, request: pytest.FixtureRequest) -> Trio:
    return runs.trio(request.param)


def test_same_tokens_and_logprobs(trio: Trio) -> None:
    assert_same_answers(trio.plain.rounds, trio.roomy)
    assert_same_answers(trio.plain.rounds, trio.tight)


def test_much_comes_from_the_host(trio: Trio) -> None:
    hits, queries, cached = (
        {name: result.metrics[metric] for name, result in trio._asdict().items()}
        for metric in (
            "external_prefix_cache_hits",
            "external_prefix_cache_queries",
            "prompt_tokens_cached",
        )
    )
    assert hits["plain"] == 0
    assert hits["roomy"] > 0.5 * queries["roomy"]
    assert hits["roomy"] > hits["tight"] > 0
    assert cached["roomy"] > cached["tight"] > cached["plain"]


def test_requests_are_preempted(trio: Trio) -> None:
    assert trio.roomy.metrics["num_preemptions"] > 0
    assert trio.tight.metrics["num_preemptions"] > 0


@pytest.mark.proves("I7")
def test_nothing_is_left_at_the_end(trio: Trio) -> None:
    assert trio.plain.host_pool is None
    assert trio.roomy.host_pool is not None
    for result in trio:
        assert_nothing_left(result)


def test_comparison_is_sound(trio: Trio) -> None:
    """Without the connector the answers do not depend on what runs beside them, and rounding
    cannot change a token: what differs with the connector is the connector's doing."""
    first, repeated, together, *_ = trio.plain.rounds
    assert not differences([first, first], [repeated, together])
    assert len({tuple(answer.tokens) for answer in first.values()}) == len(first)
    answers = [answer for by_id in trio.plain.rounds for answer in by_id.values()]
    assert min(lead for answer in answers for lead in answer.leads) > MIN_LEAD


def test_comparison_sees_one_wrong_token(runs: Runs) -> None:
    rounds = runs.plain("llama").rounds
    changed = [dict(answers) for answers in rounds]
    ask_id, answer = next(iter(changed[1].items()))
    tokens = [*answer.tokens[:-1], answer.tokens[-1] + 1]
    changed[1][ask_id] = answer.model_copy(update={"tokens": tokens})
    (line,) = differences(rounds, changed)
    assert line.startswith(f"round 1, {ask_id}: token {len(tokens) - 1} is ")


@pytest.mark.slow
@pytest.mark.parametrize("seed", [4, 5])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_other_workloads(runs: Runs, architecture: Architecture, seed: int) -> None:
    trio = runs.run_trio(architecture, full_workload(seed))
    for result in (trio.roomy, trio.tight):
        assert_same_answers(trio.plain.rounds, result)
        assert result.metrics["external_prefix_cache_hits"] > 0
        assert_nothing_left(result)
