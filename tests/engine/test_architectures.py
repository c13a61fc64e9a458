"""The connector's main promise, by architecture: blocks that a small device pool evicts come back,
and the answers do not change. Gemma 3, with sliding windows and full attention, runs by default."""

import pytest

from examples.random_model import Architecture
from tests.engine.compare import (
    MIN_LEAD,
    assert_nothing_left,
    assert_same_answers,
    differences,
)
from tests.engine.harness import log_tail
from tests.engine.runs import EMPTIED, NUM_AGAIN, OTHER_SALT, SALTED, SALTED_AGAIN, Engines, Runs
from tests.engine.spec import Answer
from tests.engine.workloads import COLD, TOGETHER, TURNS, TURNS_FROM_HOST, full_workload

ARCHITECTURES: list[Architecture] = ["llama", "qwen3", "gemma3"]
FEW_HOST_BLOCKS: dict[Architecture, int] = {"llama": 60, "qwen3": 60, "gemma3": 120}
"""Host blocks: so few that the host tier evicts too."""


@pytest.fixture(
    params=[
        pytest.param(name, marks=() if name == "gemma3" else pytest.mark.slow)
        for name in ARCHITECTURES
    ]
)
def engines(runs: Runs, request: pytest.FixtureRequest) -> Engines:
    return runs.engines(request.param)


def cached(answers: dict[str, Answer]) -> dict[str, int]:
    """Cached tokens of a few prompts, by request."""
    return {
        ask_id: answer.num_cached_tokens for ask_id, answer in list(answers.items())[:NUM_AGAIN]
    }


def few_cold(engines: Engines) -> dict[str, Answer]:
    """The plain engine's answers to the requests that short rounds repeat."""
    return dict(list(engines.plain.rounds[COLD].items())[:NUM_AGAIN])


def test_same_tokens_and_logprobs(engines: Engines) -> None:
    expected = [*engines.plain.rounds, *[few_cold(engines)] * 4]
    assert_same_answers(expected, engines.tier)


def test_prompts_come_from_the_host(engines: Engines) -> None:
    hits, queries, from_caches = (
        [result.metrics[name] for result in (engines.plain, engines.tier)]
        for name in (
            "external_prefix_cache_hits",
            "external_prefix_cache_queries",
            "prompt_tokens_cached",
        )
    )
    assert hits[0] == 0
    assert hits[1] > 0.5 * queries[1]
    assert from_caches[1] > from_caches[0]
    turns = engines.tier.rounds[TURNS_FROM_HOST].values()
    assert all(answer.num_cached_tokens > 0 for answer in turns)


def test_one_corrupted_host_block_changes_answers(engines: Engines) -> None:
    """Negative control: the comparison detects a single wrong block."""
    control = engines.control
    assert control.error is None, control.error
    assert [result.corrupted_blocks for result in engines[:3]] == [0, 0, 1]
    cold, from_host = control.rounds
    assert not differences([few_cold(engines)], [cold])
    changed = differences([few_cold(engines)], [from_host])
    assert any("token" in line for line in changed), changed


def test_requests_are_preempted(engines: Engines) -> None:
    assert engines.tier.metrics["num_preemptions"] > 0


@pytest.mark.proves("I7")
def test_nothing_is_left_at_the_end(engines: Engines) -> None:
    assert engines.plain.host_pool is None
    assert engines.tier.host_pool is not None
    for result in (engines.plain, engines.tier, engines.control):
        assert_nothing_left(result)


@pytest.mark.proves("I8")
def test_nothing_is_shared_across_cache_salts(engines: Engines) -> None:
    """Both tiers hold all prompts without a salt, and a few with another salt."""
    rounds = engines.tier.rounds
    assert cached(rounds[SALTED]) == cached(rounds[COLD])
    assert cached(rounds[OTHER_SALT]) == cached(rounds[COLD])
    assert all(number > 0 for number in cached(rounds[SALTED_AGAIN]).values())


def test_a_reset_empties_the_host_tier(engines: Engines) -> None:
    assert cached(engines.tier.rounds[EMPTIED]) == cached(engines.tier.rounds[COLD])


def test_lazy_stores(engines: Engines) -> None:
    lazy = engines.lazy
    assert_same_answers(engines.plain.rounds, lazy)
    assert_nothing_left(lazy)
    assert lazy.metrics["external_prefix_cache_hits"] > 0
    assert lazy.log is not None
    assert "lazy stores" in lazy.log.read_text()


def test_a_refused_configuration_ends_the_start(engines: Engines) -> None:
    """The error has the message for the user. Unit tests cover all other messages."""
    refused = engines.refused
    assert not refused.started
    assert refused.error is not None
    for words in ("cpu_byte_to_use", "did you mean 'cpu_bytes_to_use'"):
        assert words in refused.error, f"{words!r} is not in the error\n{log_tail(refused.log)}"


def test_comparison_is_sound(engines: Engines) -> None:
    """Without the connector, neither other requests nor rounding change a token. So the connector
    causes every difference."""
    rounds = engines.plain.rounds
    assert not differences(
        [rounds[COLD], rounds[TURNS]], [rounds[TOGETHER], rounds[TURNS_FROM_HOST]]
    )
    assert len({tuple(answer.tokens) for answer in rounds[COLD].values()}) == len(rounds[COLD])
    answers = [answer for by_id in rounds for answer in by_id.values()]
    assert min(lead for answer in answers for lead in answer.leads) > MIN_LEAD


def test_comparison_sees_one_wrong_token(engines: Engines) -> None:
    rounds = engines.plain.rounds
    changed = [dict(answers) for answers in rounds]
    ask_id, answer = next(iter(changed[1].items()))
    tokens = [*answer.tokens[:-1], answer.tokens[-1] + 1]
    changed[1][ask_id] = answer.model_copy(update={"tokens": tokens})
    (line,) = differences(rounds, changed)
    assert line.startswith(f"round 1, {ask_id}: token {len(tokens) - 1} is ")


@pytest.mark.slow
@pytest.mark.parametrize("seed", [4, 5])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_tier_that_evicts(runs: Runs, architecture: Architecture, seed: int) -> None:
    num_host_blocks = {"plain": 0, "roomy": 800, "tight": FEW_HOST_BLOCKS[architecture]}
    results = runs.run(
        f"evicting-{architecture}-{seed}",
        {
            name: runs.spec(
                architecture,
                connector={"num_cpu_blocks": number} if number else None,
                rounds=full_workload(seed),
            )
            for name, number in num_host_blocks.items()
        },
    )
    hits = {name: result.metrics["external_prefix_cache_hits"] for name, result in results.items()}
    assert hits["roomy"] > hits["tight"] > 0
    for result in results.values():
        assert_same_answers(results["plain"].rounds, result)
        assert_nothing_left(result)
