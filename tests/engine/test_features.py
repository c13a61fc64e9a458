"""Ways to ask that change how an engine goes about it: several answers to a prompt, stopping
early, prompt logprobs, drafted tokens."""

from collections.abc import Iterable
from typing import Any

import pytest

from tests.engine.compare import assert_nothing_left, assert_same_answers
from tests.engine.runs import HOST_BLOCKS, Runs
from tests.engine.spec import Answer, Ask, EngineResult, Round
from tests.engine.workloads import shared_prefix_asks

CONNECTOR = {"num_cpu_blocks": HOST_BLOCKS}
SAMPLING: dict[str, dict[str, Any]] = {
    # Alike, for want of another choice: a seed stops vLLM on CPUs in chunks of a prompt.
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


def rounds() -> tuple[Round, ...]:
    """Each way to ask, and one by one once more from the host tier; prompts that repeat
    themselves, so that n-grams are found in them."""
    once = shared_prefix_asks("f", seed=12, tails=2, system_lengths=(70, 45, 90), max_tokens=40)
    asks = tuple(
        ask.model_copy(
            update={"id": f"{way}-{ask.id}", "prompt": ask.prompt * 2, "sampling": sampling}
        )
        for way, sampling in (SAMPLING | {"plain": {}}).items()
        for ask in once
    )
    return (
        Round(asks=asks, together=True),
        Round(asks=asks, together=False, reset="device"),
        Round(asks=asks, together=True, reset="device"),
    )


@pytest.fixture(scope="module")
def engines(runs: Runs) -> dict[str, EngineResult]:
    specs = {
        name: runs.spec(connector=connector, rounds=rounds(), **drafting)
        for drafts, drafting in (("", {}), (", drafts", N_GRAMS))
        for name, connector in ((f"plain{drafts}", None), (f"tier{drafts}", CONNECTOR))
    }
    # One process each: vLLM replaces kernels at start, and where drafts are checked, only once.
    return {
        name: runs.run(f"features: {name}", {name: spec}, deadline=400)[name]
        for name, spec in specs.items()
    }


pytestmark = [pytest.mark.slow, pytest.mark.timeout(1700)]

DRAFTS = pytest.mark.parametrize("drafts", ["", ", drafts"], ids=["no drafts", "drafts"])


def of_way(asks: Iterable[Ask], answers: dict[str, Answer], way: str) -> list[Answer]:
    return [answers[ask.id] for ask in asks if ask.id.startswith(way)]


@DRAFTS
def test_same_answers(engines: dict[str, EngineResult], drafts: str) -> None:
    assert_same_answers(engines[f"plain{drafts}"].rounds, engines[f"tier{drafts}"])
    assert engines[f"tier{drafts}"].metrics["num_preemptions"] > 0
    assert_nothing_left(engines[f"tier{drafts}"])


@DRAFTS
def test_only_those_that_want_prompt_logprobs_are_computed(
    engines: dict[str, EngineResult], drafts: str
) -> None:
    _, again, _ = engines[f"tier{drafts}"].rounds
    asks = rounds()[1].asks
    assert all(answer.num_cached_tokens == 0 for answer in of_way(asks, again, "logprobs"))
    for way in ("several", "stopping", "plain"):
        assert all(answer.num_cached_tokens > 0 for answer in of_way(asks, again, way)), way


def test_the_ways_to_ask_make_a_difference(engines: dict[str, EngineResult]) -> None:
    first, *_ = engines["tier"].rounds
    asks = rounds()[0].asks
    num_tokens = {
        way: [len(answer.tokens) for answer in of_way(asks, first, way)]
        for way in (*SAMPLING, "plain")
    }
    assert set(num_tokens["plain"]) == {40}
    assert set(num_tokens["several"]) == {3 * 40}
    assert min(num_tokens["stopping"]) < 40


def test_drafts_are_accepted_and_rejected(engines: dict[str, EngineResult]) -> None:
    metrics = engines["tier, drafts"].metrics
    drafted, accepted = (
        metrics[f"spec_decode_num_{kind}_tokens"] for kind in ("draft", "accepted")
    )
    assert 0 < accepted < drafted
