"""Tensor and pipeline parallel ranks, each in a process of vLLM's multiprocessing executor.

The scheduler is in the child process itself, so its pools can be read. A split model differs in
rounding only: the answers must be those of the plain engine of one process.
"""

from typing import Any

import pytest

from examples.random_model import Architecture
from tests.engine.compare import assert_nothing_left, assert_same_answers
from tests.engine.runs import DEVICE_BLOCKS, HOST_BLOCKS, Runs
from tests.engine.spec import Answer, EngineResult, Round
from tests.engine.workloads import LONG, TURNS, TURNS_FROM_HOST, full_workload

TENSOR: dict[str, Any] = {"tensor_parallel_size": 2}
PIPELINE: dict[str, Any] = {"pipeline_parallel_size": 2}

ROUNDS = (LONG, TURNS)
"""Rounds of the full workload that run here, since steps across processes are slow. A last round
has a few requests of TURNS_FROM_HOST."""
NUM_FROM_HOST = 3

DEADLINE_SECONDS = 840
"""Time limit, in seconds: four processes that wait for each other in busy loops are slow on two
cores."""

MORE_BLOCKS: dict[Architecture, int] = {"gemma3": 18}
"""Additional device blocks. With Gemma's layers split into stages, vLLM makes four groups of each
stage's layers instead of three. It requires room for one whole request."""

# A later pipeline stage gets its receive buffer in a warm-up run, which vLLM skips on CPUs when
# nothing is compiled. Tracing once without a compiler costs seconds.
TRACE_ONLY: dict[str, Any] = {
    "enforce_eager": False,
    "compilation_config": {"mode": 2, "backend": "eager"},
}


def workload() -> tuple[Round, ...]:
    rounds = full_workload()
    last = rounds[TURNS_FROM_HOST]
    few = last.model_copy(update={"asks": last.asks[:NUM_FROM_HOST]})
    return (*(rounds[number] for number in ROUNDS), few)


def expected_answers(plain: EngineResult) -> list[dict[str, Answer]]:
    few = workload()[-1].asks
    last = {ask.id: plain.rounds[TURNS_FROM_HOST][ask.id] for ask in few}
    return [*(plain.rounds[number] for number in ROUNDS), last]


def run_parallel(
    runs: Runs, architecture: Architecture, parallel: dict[str, Any], connector: dict[str, Any]
) -> EngineResult:
    name = "-".join([architecture, *parallel])
    of_stages: dict[str, Any] = {}
    if "pipeline_parallel_size" in parallel:
        num_blocks = DEVICE_BLOCKS[architecture] + MORE_BLOCKS.get(architecture, 0)
        of_stages = TRACE_ONLY | {"num_gpu_blocks_override": num_blocks}
    spec = runs.spec(
        architecture,
        connector=connector,
        rounds=workload(),
        **{"distributed_executor_backend": "mp"} | parallel | of_stages,
    )
    return runs.run(name, {name: spec}, deadline=DEADLINE_SECONDS)[name]


def assert_serves_alike(runs: Runs, architecture: Architecture, result: EngineResult) -> None:
    assert_same_answers(expected_answers(runs.plain(architecture)), result)
    assert result.metrics["num_preemptions"] > 0
    assert result.metrics["external_prefix_cache_hits"] > 0
    last = result.rounds[-1]
    assert all(answer.num_cached_tokens > 0 for answer in last.values())
    assert_nothing_left(result)


def test_tensor_parallel(runs: Runs) -> None:
    result = run_parallel(runs, "gemma3", TENSOR, {"num_cpu_blocks": HOST_BLOCKS})
    assert_serves_alike(runs, "gemma3", result)


@pytest.mark.slow
@pytest.mark.timeout(DEADLINE_SECONDS + 60)
def test_pipeline_parallel_with_ranks_of_unequal_room(runs: Runs) -> None:
    """Sized in bytes, the rank with more layers has room for fewer blocks. Both ranks use that
    number."""
    result = run_parallel(runs, "llama", PIPELINE, {"cpu_bytes_to_use": "64MiB"})
    assert_serves_alike(runs, "llama", result)
    assert result.host_pool is not None
    per_rank, block_bytes_of_a_layer = 32 * 2**20, 2 * 32 * 2 * 32 * 4
    assert result.host_pool.total == per_rank // (2 * block_bytes_of_a_layer) - 1


@pytest.mark.slow
@pytest.mark.timeout(DEADLINE_SECONDS + 60)
@pytest.mark.parametrize(
    ("architecture", "parallel"),
    [
        ("llama", TENSOR),
        ("qwen3", TENSOR),
        ("qwen3", PIPELINE),
        ("qwen3", TENSOR | PIPELINE),
        ("gemma3", PIPELINE),
        ("gemma3", TENSOR | PIPELINE),
    ],
    ids=str,
)
def test_more_combinations(
    runs: Runs, architecture: Architecture, parallel: dict[str, Any]
) -> None:
    result = run_parallel(runs, architecture, parallel, {"num_cpu_blocks": HOST_BLOCKS})
    assert_serves_alike(runs, architecture, result)
