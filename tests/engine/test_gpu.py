"""The connector's main promise on a GPU: loads bring back the stored bytes. Tested by architecture,
copy path, layout and time of announcement, and with CUDA graphs.

Each model's engines share one child process, whose start costs more than its work. The first engine
has no connector, and all others are compared with it. The same tests run on CPUs with the models
that vLLM serves there (``-m slow``).
"""

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from tests.engine.compare import assert_nothing_left
from tests.engine.device_models import DRAFTER, save_device_model
from tests.engine.harness import log_tail
from tests.engine.rounding import compare
from tests.engine.runs import Runs
from tests.engine.spec import Answer, EngineResult, EngineSpec
from tests.engine.targets import (
    AGAIN,
    COLD,
    CORRUPTED,
    EAGER,
    ENGINES,
    FOLLOW_UPS,
    ONE_BY_ONE,
    SIZED,
    TARGETS,
    TOGETHER,
    asks,
    rounds,
)

ENGINE_SECONDS = 180.0
"""Time limit, in seconds, of one engine from start to end; it compiles kernels."""

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
by_target = pytest.mark.parametrize(
    "target", [pytest.param(target, marks=marker(target)) for target in TARGETS]
)


class GpuRuns:
    """The engines of each target, which run when first used."""

    def __init__(self, runs: Runs) -> None:
        self._runs = runs
        self._results: dict[str, dict[str, EngineResult]] = {}

    def results(self, target: str) -> dict[str, EngineResult]:
        """Results by name of the engine; "plain" has no connector."""
        if target not in self._results:
            specs = {"plain": self.spec(target, None, EAGER)}
            for name, engine in ENGINES[target].items():
                specs[name] = self.spec(target, engine.connector, engine.mode)
            self._results[target] = self._runs.run(
                f"gpu-{target}", specs, deadline=ENGINE_SECONDS * len(specs)
            )
        return self._results[target]

    def spec(
        self,
        target: str,
        connector: Mapping[str, Any] | None,
        mode: Mapping[str, Any],
        **arguments: Any,
    ) -> EngineSpec:
        """One engine of ``target``; ``arguments`` are for EngineArgs and override the target's."""
        where = TARGETS[target]
        usual = where.arguments
        model = self._runs.directory / f"device-model-{where.kind}"
        if not model.exists():
            save_device_model(model, where.kind)
        few = {}
        if connector is not None and where.few_blocks is not None:
            few = {"num_gpu_blocks_override": where.few_blocks}
        spec = self._runs.spec(
            "llama",
            connector=None if connector is None else dict(connector),
            rounds=rounds(connector=connector is not None),
            **{**usual, **few, **mode, **arguments},
        )
        fitting = dict(spec.arguments)
        if (model / DRAFTER).exists():
            drafts = {"model": str(model / DRAFTER)}
            fitting["speculative_config"] = fitting["speculative_config"] | drafts
        if "block_size" not in usual and "dtype" in usual:
            del fitting["block_size"]  # vLLM selects that of the attention kernels
        return spec.model_copy(update={"model": model, "arguments": fitting})


@pytest.fixture(scope="module")
def gpu_runs(runs: Runs) -> GpuRuns:
    return GpuRuns(runs)


def assert_same(target: str, plain: EngineResult, result: EngineResult, *, exact: bool) -> None:
    """Fail unless the rounds before the corrupted one have the plain engine's answers."""
    assert plain.error is None, plain.error
    assert result.error is None, result.error
    wrong = []
    for number in (COLD, AGAIN, TOGETHER, FOLLOW_UPS):
        one_by_one = number in ONE_BY_ONE
        expected, actual = plain.rounds[number], result.rounds[number]
        if number == FOLLOW_UPS:  # they follow the answers of the round before
            before = plain.rounds[TOGETHER], result.rounds[TOGETHER]
            same = [
                i for i in expected if len({tuple(r[_followed(i)].tokens) for r in before}) == 1
            ]
            expected, actual = ({i: r[i] for i in same} for r in (expected, actual))
        found = compare(expected, actual, TARGETS[target].rounding, exact=exact and one_by_one)
        wrong += [f"round {number}, {line}" for line in found.wrong]
        # Ties end the comparison of an answer, so there must be few. A coarse format has
        # many if requests share steps.
        least = 0.6 if one_by_one else 0.3 if TARGETS[target].rounding.same_shape is None else 0.0
        if found.whole < least * len(asks()):
            wrong.append(f"round {number}: only {found.whole} answers are the same throughout")
    assert not wrong, "\n".join([*wrong[:12], log_tail(result.log)])


def _beginning(answer: Answer, shorter: Answer) -> Answer:
    """The first tokens of ``answer``, as many as ``shorter`` has."""
    length = len(shorter.tokens)
    cut = {name: getattr(answer, name)[:length] for name in ("tokens", "logprobs", "leads")}
    return answer.model_copy(update=cut)


def _without_foreign_threads(result: EngineResult) -> EngineResult:
    """On a GPU, kernel compilers and vLLM leave threads of their own."""
    ours = [name for name in result.surviving_threads if name.startswith("simple-offload")]
    return result.model_copy(update={"surviving_threads": ours})


def _followed(follow_up: str) -> str:
    return follow_up.removeprefix("turn-")


@by_case
def test_same_tokens_and_logprobs(gpu_runs: GpuRuns, target: str, engine: str) -> None:
    results = gpu_runs.results(target)
    exact = ENGINES[target][engine].mode == EAGER
    assert_same(target, results["plain"], results[engine], exact=exact)


@by_case
def test_all_prompts_come_from_the_host(gpu_runs: GpuRuns, target: str, engine: str) -> None:
    """After a reset of the device, each prompt has as many cached tokens as on the engine without a
    connector and without a reset."""
    results = gpu_runs.results(target)
    plain, result = results["plain"], results[engine]
    assert result.error is None, result.error
    assert plain.metrics["external_prefix_cache_hits"] == 0
    cached = [
        {ask_id: answer.num_cached_tokens for ask_id, answer in each.rounds[AGAIN].items()}
        for each in (plain, result)
    ]
    if TARGETS[target].same_hits:
        assert cached[1] == cached[0]
        assert min(cached[1].values()) > 0
    else:
        # With a drafter vLLM drops a hit's last block, and Kimi-K3's blocks have 256 tokens: a
        # prompt with one whole block has no hit on the device either.
        hits, host_hits = ({i for i, count in each.items() if count > 0} for each in cached)
        assert len(hits) > 0.5 * len(asks())
        assert host_hits >= hits
        assert sum(cached[1].values()) > 0.5 * sum(cached[0].values())
    # Nothing but the shared beginnings of prompts may have come from the device there.
    assert result.metrics["external_prefix_cache_hits"] > 0.5 * sum(cached[0].values())


@by_case
def test_one_corrupted_host_block_is_seen(gpu_runs: GpuRuns, target: str, engine: str) -> None:
    """Negative control of each engine: a single wrong block changes answers."""
    results = gpu_runs.results(target)
    plain, result = results["plain"], results[engine]
    assert result.error is None, result.error
    assert result.corrupted_blocks == 1
    assert plain.corrupted_blocks == 0
    rounding = TARGETS[target].rounding
    exact = rounding.same_shape is not None and ENGINES[target][engine].mode == EAGER
    seen = compare(plain.rounds[CORRUPTED], result.rounds[CORRUPTED], rounding, exact=exact)
    assert seen.wrong


@by_case
def test_nothing_is_left_at_the_end(gpu_runs: GpuRuns, target: str, engine: str) -> None:
    result = gpu_runs.results(target)[engine]
    assert result.host_pool is not None
    assert_nothing_left(_without_foreign_threads(result))


@by_target
def test_comparison_is_sound(gpu_runs: GpuRuns, target: str) -> None:
    """Without the connector, hits and other requests change answers by rounding alone, and answers
    depend on their prompts."""
    plain = gpu_runs.results(target)["plain"]
    assert plain.error is None, plain.error
    cold = plain.rounds[COLD]
    for number in (AGAIN, TOGETHER, CORRUPTED):
        other = {i: _beginning(a, cold[i]) for i, a in plain.rounds[number].items()}
        found = compare(cold, other, TARGETS[target].rounding, exact=False)
        assert not found.wrong, f"round {number}: {found.wrong}"
    assert len({tuple(answer.tokens) for answer in cold.values()}) == len(cold)


@by_target
def test_requests_are_preempted(gpu_runs: GpuRuns, target: str) -> None:
    if TARGETS[target].few_blocks is None:
        pytest.skip("this target's engines have plenty of device blocks")
    results = gpu_runs.results(target)
    preempted = {name: result.metrics.get("num_preemptions") for name, result in results.items()}
    assert preempted.pop("plain") == 0
    assert any(preempted.values()), preempted


@pytest.mark.gpu
def test_two_ranks(gpu_runs: GpuRuns, runs: Runs) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    spec = gpu_runs.spec(
        "llama",
        SIZED,
        EAGER,
        tensor_parallel_size=2,
        distributed_executor_backend="mp",
    )
    # The ranks' host memory is out of this test's reach, so nothing is corrupted.
    spec = spec.model_copy(update={"rounds": spec.rounds[:CORRUPTED]})
    specs = {"plain": gpu_runs.spec("llama", None, EAGER), "tp2": spec}
    results = runs.run("gpu-two-ranks", specs, deadline=3 * ENGINE_SECONDS)
    plain, result = results["plain"], results["tp2"]
    assert_same("llama", plain, result, exact=False)
    cached = [answer.num_cached_tokens for answer in result.rounds[AGAIN].values()]
    assert min(cached) > 0
    assert result.metrics["external_prefix_cache_hits"] > 0.5 * sum(cached)
    assert_nothing_left(_without_foreign_threads(result))
