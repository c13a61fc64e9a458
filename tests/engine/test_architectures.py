"""The connector's main promise, by architecture: blocks that a small device pool evicts come back,
and the answers do not change. Gemma 3, with sliding windows and full attention, runs by default."""

from collections.abc import Mapping

import pytest

from tests.engine.compare import MIN_LEAD, assert_nothing_left, assert_same_answers, compare
from tests.engine.harness import log_tail
from tests.engine.runs import EMPTIED, NUM_AGAIN, OTHER_SALT, SALTED, SALTED_AGAIN, Engines, Runs
from tests.engine.spec import Answer
from tests.engine.workloads import COLD, LONG, TOGETHER, TURNS, TURNS_FROM_HOST


@pytest.fixture(
    params=[
        "gemma3",
        pytest.param("llama", marks=pytest.mark.slow),
        pytest.param("qwen3", marks=pytest.mark.slow),
    ]
)
def engines(runs: Runs, request: pytest.FixtureRequest) -> Engines:
    return runs.engines(request.param)


def few(answers: Mapping[str, Answer]) -> dict[str, Answer]:
    """The answers to the requests that short rounds repeat."""
    return dict(list(answers.items())[:NUM_AGAIN])


def cached(answers: Mapping[str, Answer]) -> list[int]:
    """Cached tokens of those prompts."""
    return [answer.num_cached_tokens for answer in few(answers).values()]


def test_same_answers_from_the_host(engines: Engines) -> None:
    plain, tier = engines.plain, engines.tier
    assert_same_answers([*plain.rounds, *[few(plain.rounds[COLD])] * 4], tier)
    assert plain.metrics["external_prefix_cache_hits"] == 0
    hits = tier.metrics["external_prefix_cache_hits"]
    assert hits > 0.5 * tier.metrics["external_prefix_cache_queries"]
    assert tier.metrics["prompt_tokens_cached"] > plain.metrics["prompt_tokens_cached"]
    assert all(answer.num_cached_tokens > 0 for answer in tier.rounds[TURNS_FROM_HOST].values())


def test_one_corrupted_host_block_changes_answers(engines: Engines) -> None:
    """Negative control: the comparison detects a single wrong block."""
    control = engines.control
    assert control.error is None, control.error
    assert [result.num_corrupted_blocks for result in engines[:3]] == [0, 0, 1]
    expected = few(engines.plain.rounds[COLD])
    cold, from_host = control.rounds
    assert not compare(expected, cold).wrong
    corrupted = compare(expected, from_host)
    assert corrupted.wrong
    assert corrupted.whole < NUM_AGAIN, "no token has changed"


def test_requests_are_preempted(engines: Engines) -> None:
    assert engines.tier.metrics["num_preemptions"] > 0


@pytest.mark.proves("I7")
def test_nothing_is_left_at_the_end(engines: Engines) -> None:
    assert engines.plain.num_host_blocks is None
    assert engines.tier.num_host_blocks is not None
    for result in (engines.plain, engines.tier, engines.control):
        assert_nothing_left(result)


@pytest.mark.proves("I8")
def test_nothing_is_shared_across_cache_salts(engines: Engines) -> None:
    """Both tiers hold all prompts without a salt, and a few with another salt."""
    rounds = engines.tier.rounds
    assert cached(rounds[SALTED]) == cached(rounds[COLD])
    assert cached(rounds[OTHER_SALT]) == cached(rounds[COLD])
    assert min(cached(rounds[SALTED_AGAIN])) > 0


def test_a_reset_empties_the_host_tier(engines: Engines) -> None:
    assert cached(engines.tier.rounds[EMPTIED]) == cached(engines.tier.rounds[COLD])


def test_stores_at_eviction(engines: Engines) -> None:
    """Models with several groups store at once all the same, and say so."""
    lazy = engines.lazy
    assert_same_answers(engines.plain.rounds[:LONG], lazy)
    assert_nothing_left(lazy)
    assert lazy.metrics["external_prefix_cache_hits"] > 0
    assert lazy.log is not None
    log = lazy.log.read_text()
    assert ("stores when the device evicts" in log) != ("lazy_offload=True is for" in log)


def test_any_role_stores_and_loads(engines: Engines) -> None:
    """As with vLLM's own connector. These are a producer and a consumer by their configuration."""
    assert engines.control.metrics["external_prefix_cache_hits"] > 0
    assert engines.lazy.metrics["external_prefix_cache_hits"] > 0


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
    for one, other in ((COLD, TOGETHER), (TURNS, TURNS_FROM_HOST)):
        assert not compare(rounds[one], rounds[other]).wrong
    assert len({tuple(answer.tokens) for answer in rounds[COLD].values()}) == len(rounds[COLD])
    answers = [answer for by_id in rounds for answer in by_id.values()]
    assert min(lead for answer in answers for lead in answer.leads) > MIN_LEAD
