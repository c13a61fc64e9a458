"""The connector's main promise on a GPU, by architecture, copy path, layout, time of announcement,
and with CUDA graphs. On CPUs the same tests run with the models that vLLM serves there (slow)."""

from collections.abc import Mapping
from typing import Any

import pytest

from tests.engine.compare import assert_nothing_left, compare
from tests.engine.device_models import DRAFTER, save_device_model
from tests.engine.harness import log_tail
from tests.engine.runs import Runs
from tests.engine.spec import EngineResult, EngineSpec
from tests.engine.targets import (
    AGAIN,
    COLD,
    CORRUPTED,
    EAGER,
    ENGINES,
    FOLLOW_UPS,
    HALF,
    ONE_BY_ONE,
    PLENTY,
    SIZED,
    TARGETS,
    TOGETHER,
    asks,
    rounds,
)

ENGINE_SECONDS = 180.0
"""Time limit, in seconds, of one engine from start to end; it compiles kernels."""

OUR_THREADS = "simple-offload"
"""On a GPU, kernel compilers and vLLM leave threads of their own."""

pytestmark = pytest.mark.timeout(ENGINE_SECONDS * 8)


def marker(target: str) -> pytest.MarkDecorator:
    """The marker of a target's tests."""
    return pytest.mark.slow if target.endswith("-on-cpu") else pytest.mark.gpu


by_case = pytest.mark.parametrize(
    ("target", "engine"),
    [
        pytest.param(target, engine, id=f"{target}-{engine}", marks=marker(target))
        for target, engines in ENGINES.items()
        for engine in engines
    ],
)


def results_of(runs: Runs, target: str) -> dict[str, EngineResult]:
    """Results by name of the target's engines, which run when first used; "plain" has no
    connector."""
    specs = {"plain": spec_of(runs, target, None, EAGER)}
    for name, engine in ENGINES[target].items():
        specs[name] = spec_of(runs, target, engine.connector, engine.mode)
    return runs.run(f"gpu-{target}", specs, deadline=ENGINE_SECONDS * len(specs))


def spec_of(
    runs: Runs, target: str, connector: Mapping[str, Any] | None, mode: Mapping[str, Any]
) -> EngineSpec:
    """One engine of ``target``; ``mode`` is for EngineArgs and overrides the target's."""
    where = TARGETS[target]
    model = runs.directory / f"device-model-{where.kind}"
    if not model.exists():
        save_device_model(model, where.kind)
    arguments = {**where.arguments, **mode}
    if connector is not None and where.few_blocks is not None:
        arguments["num_gpu_blocks_override"] = where.few_blocks
    if (model / DRAFTER).exists():
        drafts = {"model": str(model / DRAFTER)}
        arguments["speculative_config"] = arguments["speculative_config"] | drafts
    spec = runs.spec(
        connector=None if connector is None else dict(connector),
        rounds=rounds(connector=connector is not None),
        **arguments,
    )
    if "block_size" not in arguments and "dtype" in arguments:
        del spec.arguments["block_size"]  # vLLM selects that of the attention kernels
    return spec._replace(model=model)


def assert_same(target: str, plain: EngineResult, result: EngineResult, *, exact: bool) -> None:
    """Fail unless the rounds before the corrupted one have the plain engine's answers."""
    assert plain.error is None, plain.error
    assert result.error is None, result.error
    rounding = TARGETS[target].rounding
    wrong = []
    for number in (COLD, AGAIN, TOGETHER, FOLLOW_UPS):
        one_by_one = number in ONE_BY_ONE
        expected, actual = plain.rounds[number], result.rounds[number]
        if number == FOLLOW_UPS:  # they follow the answers of the round before
            followed = {ask_id: ask_id.removeprefix("turn-") for ask_id in expected}
            before, ours_before = plain.rounds[TOGETHER], result.rounds[TOGETHER]
            same = [i for i, f in followed.items() if before[f].tokens == ours_before[f].tokens]
            expected, actual = ({i: r[i] for i in same} for r in (expected, actual))
        found = compare(expected, actual, rounding, exact=exact and one_by_one)
        wrong += [f"round {number}, {line}" for line in found.wrong]
        # Ties end the comparison of an answer, so there must be few. A coarse format has
        # many if requests share steps.
        least = 0.6 if one_by_one else 0.3 if rounding.same_shape is None else 0.0
        if found.whole < least * len(asks()):
            wrong.append(f"round {number}: only {found.whole} answers are the same throughout")
    assert not wrong, "\n".join([*wrong[:12], log_tail(result.log)])


@by_case
def test_all_prompts_come_from_the_host(runs: Runs, target: str, engine: str) -> None:
    """Tokens and logprobs are the same. After a reset of the device, each prompt has as many cached
    tokens as on the engine without a connector and without a reset."""
    results = results_of(runs, target)
    plain, result = results["plain"], results[engine]
    assert_same(target, plain, result, exact=ENGINES[target][engine].mode == EAGER)
    assert plain.metrics["external_prefix_cache_hits"] == 0
    cached, host_cached = (
        {ask_id: answer.num_cached_tokens for ask_id, answer in each.rounds[AGAIN].items()}
        for each in (plain, result)
    )
    if TARGETS[target].same_hits:
        assert host_cached == cached
        assert min(host_cached.values()) > 0
    else:
        # With a drafter vLLM drops a hit's last block, and Kimi-K3's blocks have 256 tokens: a
        # prompt with one whole block has no hit on the device either.
        hits, host_hits = ({i for i, count in c.items() if count} for c in (cached, host_cached))
        assert len(hits) > 0.5 * len(asks())
        assert host_hits >= hits
        assert sum(host_cached.values()) > 0.5 * sum(cached.values())
    # Nothing but the shared beginnings of prompts may have come from the device there.
    assert result.metrics["external_prefix_cache_hits"] > 0.5 * sum(cached.values())
    assert result.num_host_blocks is not None
    assert_nothing_left(result, threads=OUR_THREADS)


_WAITS_BY_LAYER = {"llama", "gemma3", "mla", "llama4"}
"""The others have states, drafters, or attention kernels of their own."""


@by_case
def test_compute_begins_before_the_last_bytes_have_come(
    runs: Runs, target: str, engine: str
) -> None:
    result = results_of(runs, target)[engine]
    assert result.error is None, result.error
    announces = ENGINES[target][engine].connector.get("sync_load_ms") != 0
    least = len(asks()) / 2 if target in _WAITS_BY_LAYER and announces else 0
    overlapped = result.metrics.get("simple_offload_overlapped_steps", 0)
    assert overlapped > least if least else overlapped == 0


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["auto", "keep"])
def test_a_layer_that_waits_too_little_is_seen(runs: Runs, layout: str) -> None:
    """Negative control of the test before: each layer group of loads is needed."""
    plain = results_of(runs, "llama")["plain"]
    late = spec_of(runs, "llama", SIZED | {"kv_layout": layout}, EAGER)
    late = late._replace(waits_too_little=True, rounds=late.rounds[: AGAIN + 1])
    late.arguments["num_gpu_blocks_override"] = PLENTY
    result = runs.run(f"gpu-late-{layout}", {"late": late}, deadline=2 * ENGINE_SECONDS)["late"]
    assert result.error is None, result.error
    assert not compare(plain.rounds[COLD], result.rounds[COLD], HALF, exact=True).wrong
    assert compare(plain.rounds[AGAIN], result.rounds[AGAIN], HALF, exact=True).wrong


@by_case
def test_one_corrupted_host_block_is_seen(runs: Runs, target: str, engine: str) -> None:
    """Negative control of each engine: a single wrong block changes answers."""
    results = results_of(runs, target)
    plain, result = results["plain"], results[engine]
    assert result.error is None, result.error
    assert result.num_corrupted_blocks == 1
    assert plain.num_corrupted_blocks == 0
    rounding = TARGETS[target].rounding
    exact = rounding.same_shape is not None and ENGINES[target][engine].mode == EAGER
    assert compare(plain.rounds[CORRUPTED], result.rounds[CORRUPTED], rounding, exact=exact).wrong


@pytest.mark.parametrize("target", [pytest.param(name, marks=marker(name)) for name in ENGINES])
def test_comparison_is_sound(runs: Runs, target: str) -> None:
    """Without the connector, hits and other requests change answers by rounding alone, and answers
    depend on their prompts."""
    plain = results_of(runs, target)["plain"]
    assert plain.error is None, plain.error
    cold = plain.rounds[COLD]
    for number in (AGAIN, TOGETHER, CORRUPTED):
        other = {i: a.beginning(len(cold[i].tokens)) for i, a in plain.rounds[number].items()}
        found = compare(cold, other, TARGETS[target].rounding)
        assert not found.wrong, f"round {number}: {found.wrong}"
    assert len({tuple(answer.tokens) for answer in cold.values()}) == len(cold)


@pytest.mark.gpu
def test_requests_are_preempted(runs: Runs) -> None:
    results = results_of(runs, "llama")
    preempted = {name: result.metrics.get("num_preemptions") for name, result in results.items()}
    assert preempted.pop("plain") == 0
    assert any(preempted.values()), preempted
