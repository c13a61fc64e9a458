"""Sampling options: several answers to a prompt, stop tokens, prompt logprobs, drafts."""

from typing import Any, NamedTuple

import pytest

from tests.engine.compare import assert_nothing_left, assert_same_answers
from tests.engine.runs import HOST_BLOCKS, Runs
from tests.engine.spec import Answer, EngineResult, Round
from tests.engine.workloads import shared_prefix_asks

CONNECTOR = {"num_cpu_blocks": HOST_BLOCKS}
SAMPLING: dict[str, dict[str, Any]] = {
    # All answers are equal: vLLM on CPUs refuses a seed with chunked prefill.
    "several": {"n": 3, "temperature": 0.8, "top_k": 1},
    "stopping": {"stop_token_ids": list(range(3, 120))},
    "logprobs": {"prompt_logprobs": 1},
}
N_GRAMS: dict[str, Any] = {
    "speculative_config": {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_min": 1,
        "prompt_lookup_max": 3,
    }
}


DRAFTING: dict[str, dict[str, Any]] = {"no drafts": {}, "drafts": N_GRAMS}


def ways(drafts: str) -> dict[str, dict[str, Any]]:
    """Sampling parameters by name. vLLM's check of drafts on CPUs fails with top_k in a step
    without drafts."""
    chosen = {way: s for way, s in SAMPLING.items() if way != "several" or drafts == "no drafts"}
    return chosen | {"plain": {}}


def rounds(drafts: str) -> tuple[Round, ...]:
    """A round with each option, then each request alone from the host tier. Prompts repeat
    themselves, so that drafts by n-grams exist."""
    once = shared_prefix_asks("f", seed=12, tails=2, system_lengths=(70, 45, 90), max_tokens=40)
    asks = tuple(
        ask.model_copy(
            update={"id": f"{way}-{ask.id}", "prompt": ask.prompt * 2, "sampling": sampling}
        )
        for way, sampling in ways(drafts).items()
        for ask in once
    )
    return (
        Round(asks=asks, together=True),
        Round(asks=asks, together=False, reset="device"),
        Round(asks=asks, together=True, reset="device"),
    )


class Pair(NamedTuple):
    """The same rounds on two engines."""

    drafts: str
    plain: EngineResult
    tier: EngineResult

    def answers_to(self, number: int, way: str) -> list[Answer]:
        """The answers of one round, with a host tier, to the requests with one option."""
        return [a for id, a in self.tier.rounds[number].items() if id.startswith(f"{way}-")]


@pytest.fixture(scope="module", params=DRAFTING)
def pair(runs: Runs, request: pytest.FixtureRequest) -> Pair:
    drafts = request.param
    # One process each: vLLM replaces kernels at start, those for drafts only once.
    plain, tier = (
        runs.run(f"features {drafts} {name}", {name: spec}, deadline=400)[name]
        for name, spec in {
            name: runs.spec("llama", connector=connector, rounds=rounds(drafts), **DRAFTING[drafts])
            for name, connector in (("plain", None), ("tier", CONNECTOR))
        }.items()
    )
    return Pair(drafts, plain, tier)


pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_same_answers(pair: Pair) -> None:
    assert_same_answers(pair.plain.rounds, pair.tier)
    assert pair.tier.metrics["num_preemptions"] > 0
    assert_nothing_left(pair.tier)


def test_only_prompts_with_logprobs_are_computed(pair: Pair) -> None:
    for way in ways(pair.drafts):
        cached = [answer.num_cached_tokens for answer in pair.answers_to(1, way)]
        assert cached, way
        assert all((num_tokens > 0) == (way != "logprobs") for num_tokens in cached), way


def test_the_options_change_the_answers(pair: Pair) -> None:
    num_tokens = {
        way: [len(answer.tokens) for answer in pair.answers_to(0, way)] for way in ways(pair.drafts)
    }
    assert set(num_tokens["plain"]) == {40}
    assert min(num_tokens["stopping"]) < 40
    if pair.drafts == "no drafts":
        assert set(num_tokens["several"]) == {3 * 40}


def test_drafts_are_accepted_and_rejected(pair: Pair) -> None:
    if pair.drafts == "no drafts":
        assert "spec_decode_num_draft_tokens" not in pair.tier.metrics
        return
    drafted, accepted = (
        pair.tier.metrics[f"spec_decode_num_{kind}_tokens"] for kind in ("draft", "accepted")
    )
    assert 0 < accepted < drafted
