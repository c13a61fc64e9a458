"""Valid configurations on a small device: the answers do not change. For refused ones see the tests
of the configuration and ``test_architectures.py``."""

from typing import Any

import pytest

from tests.engine.compare import assert_nothing_left, assert_same_answers
from tests.engine.harness import log_tail
from tests.engine.runs import BLOCK_SIZE, HOST_BLOCKS, SMALL_STEPS, Runs
from tests.engine.spec import THIS_CONNECTOR, EngineResult, Round
from tests.engine.workloads import follow_ups, shared_prefix_asks

pytestmark = pytest.mark.slow

ROOMY = {"num_cpu_blocks": HOST_BLOCKS, "keep_on_device_reset": True}

NUM_SUB_BLOCKS = 4
HOST_BLOCK_SIZE = NUM_SUB_BLOCKS * BLOCK_SIZE


def assert_serves_alike(plain: EngineResult, result: EngineResult) -> None:
    """The same answers, some of them with a prefix from the host tier."""
    assert_same_answers(plain.rounds, result)
    assert_nothing_left(result)
    assert result.metrics["external_prefix_cache_hits"] > 0


def test_without_prefix_caching_the_connector_does_nothing(runs: Runs) -> None:
    spec = runs.spec("llama", connector=ROOMY, enable_prefix_caching=False)
    result = runs.run("no-prefix-caching", {"tier": spec})["tier"]
    assert_same_answers(runs.engines("llama").plain.rounds, result)
    assert result.metrics["external_prefix_cache_hits"] == 0
    assert result.num_host_blocks is None
    assert result.log is not None
    assert result.log.read_text().count("Prefix caching is off") == 1
    assert_nothing_left(result)


def test_stores_of_repeated_prefixes(runs: Runs) -> None:
    asks = shared_prefix_asks("a", seed=8, max_tokens=8)
    rounds = (
        Round(asks, together=False, reset="device"),
        Round(asks[::-1], together=False, reset="device"),
        Round(follow_ups(asks, "turn", seed=9), together=True, reset="device"),
    )
    repeated = ROOMY | {"store_threshold": 2}
    connectors = {"plain": None, "soon": repeated, "lazy": repeated | {"lazy_offload": True}}
    specs = {
        name: runs.spec(connector=connector, rounds=rounds, **SMALL_STEPS)
        for name, connector in connectors.items()
    }
    plain, soon, lazy = runs.run("repeated", specs).values()
    assert_serves_alike(plain, soon)
    assert_serves_alike(plain, lazy)


def test_loads_between_any_sub_blocks(runs: Runs) -> None:
    """Some prompts have a common beginning that ends inside a host block. Others end with a host
    block, and their last token is computed again."""
    asks = shared_prefix_asks(
        "a", seed=2, system_lengths=(230, 170), tails=2, tail_lengths=(90, 130), max_tokens=12
    )
    cut = [ask._replace(prompt=ask.prompt[: 2 * HOST_BLOCK_SIZE]) for ask in asks[:2]]
    asks = (*cut, *asks[2:])
    rounds = (
        Round(asks, together=False),
        Round(asks, together=False, reset="device"),
        Round(follow_ups(asks, "turn", seed=3), together=True),
    )
    connector = ROOMY | {"cpu_block_size": HOST_BLOCK_SIZE}
    specs = {
        "plain": runs.spec("llama", connector=None, rounds=rounds),
        "sub-blocks": runs.spec("llama", connector=connector, rounds=rounds),
    }
    plain, ours = runs.run("sub-blocks", specs).values()
    assert_serves_alike(plain, ours)
    assert ours.num_host_blocks == HOST_BLOCKS // NUM_SUB_BLOCKS - 1
    assert ours.metrics["external_prefix_cache_hits"] > 500
    assert any(first % NUM_SUB_BLOCKS for first, _ in ours.loads), "none begins inside a host block"
    assert any((last + 1) % NUM_SUB_BLOCKS for _, last in ours.loads), "none ends inside one"


def test_beside_another_connector(runs: Runs) -> None:
    """In either order. vLLM's own example keeps whole prompts in files and loads them within a
    step. The last round has the prompts' next turns, which are new."""
    asks = shared_prefix_asks("multi", seed=9, tails=2)
    rounds = (
        Round(asks, together=False),
        Round(asks, together=False, reset="device"),
        Round(follow_ups(asks, "turn", seed=10), together=False, reset="device"),
    )
    room: dict[str, Any] = {
        # The example saves a prompt in the step that schedules it first, computed or not.
        "max_num_batched_tokens": 1024,
        "num_gpu_blocks_override": 96,
        "disable_hybrid_kv_cache_manager": True,
    }
    ours = THIS_CONNECTOR | {"kv_connector_extra_config": ROOMY}
    plain = runs.spec("llama", connector=None, rounds=rounds, **room)
    expected = runs.run("multi-plain", {"plain": plain})["plain"]
    for ours_first in (True, False):
        name = "multi-ours-first" if ours_first else "multi-ours-last"
        files = {"shared_storage_path": str(runs.directory / f"{name}-kv")}
        example = {
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": files,
        }
        connectors = [ours, example] if ours_first else [example, ours]
        both = {
            "kv_connector": "MultiConnector",
            "kv_connector_module_path": None,
            "kv_connector_extra_config": {"connectors": connectors},
        }
        spec = runs.spec("llama", connector={}, rounds=rounds, transfer_arguments=both, **room)
        result = runs.run(name, {name: spec})[name]
        assert_same_answers(expected.rounds, result)
        assert result.num_host_blocks is not None
        assert result.metrics["simple_offload_stored_blocks"] > 0
        assert_nothing_left(result)
        _, again, turns = result.rounds
        assert all(answer.num_cached_tokens > 0 for answer in again.values())
        assert all(answer.num_cached_tokens > 0 for answer in turns.values()), "the example's"
        assert result.log is not None
        injected = result.log.read_text(errors="replace").count("Inject KV cache")
        assert (injected == 0) == ours_first, log_tail(result.log)


SAMPLING: dict[str, dict[str, Any]] = {
    "plain": {},
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


@pytest.mark.timeout(900)
@pytest.mark.parametrize("drafts", [False, True], ids=["no drafts", "drafts"])
def test_sampling_options(runs: Runs, drafts: bool) -> None:
    """Several answers to a prompt, stop tokens, prompt logprobs, drafts. Only prompts with logprobs
    are computed."""
    # vLLM's check of drafts on CPUs fails with top_k in a step without drafts.
    ways = {way: each for way, each in SAMPLING.items() if way != "several" or not drafts}
    # Prompts repeat themselves, so that drafts by n-grams exist.
    once = shared_prefix_asks("f", seed=12, tails=2, system_lengths=(70, 45, 90), max_tokens=40)
    asks = tuple(
        ask._replace(id=f"{way}-{ask.id}", prompt=ask.prompt * 2, sampling=sampling)
        for way, sampling in ways.items()
        for ask in once
    )
    rounds = (
        Round(asks, together=True),
        Round(asks, together=False, reset="device"),
        Round(asks, together=True, reset="device"),
    )
    arguments = N_GRAMS if drafts else {}
    # One process each: vLLM replaces kernels at start, those for drafts only once.
    plain, tier = (
        runs.run(f"sampling {drafts} {name}", {name: spec}, deadline=400)[name]
        for name, spec in {
            "plain": runs.spec("llama", connector=None, rounds=rounds, **arguments),
            "tier": runs.spec("llama", connector=ROOMY, rounds=rounds, **arguments),
        }.items()
    )
    assert_serves_alike(plain, tier)
    num_tokens: dict[str, set[int]] = {}
    for way in ways:
        ids = [f"{way}-{ask.id}" for ask in once]
        cached = [tier.rounds[1][ask_id].num_cached_tokens for ask_id in ids]
        assert all((count > 0) == (way != "logprobs") for count in cached), way
        num_tokens[way] = {len(tier.rounds[0][ask_id].tokens) for ask_id in ids}
    assert num_tokens["plain"] == {40}
    assert min(num_tokens["stopping"]) < 40
    assert drafts or num_tokens["several"] == {3 * 40}
    drafted = tier.metrics.get("spec_decode_num_draft_tokens", 0)
    accepted = tier.metrics.get("spec_decode_num_accepted_tokens", 0)
    assert (0 < accepted < drafted) == drafts
