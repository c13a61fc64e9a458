"""Tensor and pipeline parallel ranks, each in a process of vLLM's multiprocessing executor.

The scheduler is in the child process itself, so its pools can be read here too. Splitting a
model changes rounding only: the plain engine of one process says what the answers are.
"""

from typing import Any

import pytest

from examples.random_model import Architecture
from tests.engine.compare import assert_nothing_left, assert_same_answers
from tests.engine.runs import DEVICE_BLOCKS, HOST_BLOCKS, Runs
from tests.engine.spec import Answer, EngineResult, Round
from tests.engine.workloads import full_workload

TENSOR: dict[str, Any] = {"tensor_parallel_size": 2}
PIPELINE: dict[str, Any] = {"pipeline_parallel_size": 2}

TOGETHER = (2, 3, 5)
"""Rounds of the full workload that run here. Steps across processes take their time."""

DEADLINE_SECONDS = 840
"""Four processes that wait for each other in busy loops are slow on two cores."""

MORE_BLOCKS: dict[Architecture, int] = {"gemma3": 18}
"""Beyond the usual on the device: with Gemma's layers split by stages, vLLM puts what each stage
has into four groups instead of three, and wants room for one whole request."""

ONE_BY_ONE, NUM_ASKS = 6, 3
"""And a round of which only the first requests do, from the host tier alone."""

# A later pipeline stage has its buffer for what it receives from a warm-up run, and vLLM skips
# that on CPUs when nothing is compiled. Tracing once without a compiler costs seconds.
TRACE_ONLY: dict[str, Any] = {
    "enforce_eager": False,
    "compilation_config": {"mode": 2, "backend": "eager"},
}


def workload() -> tuple[Round, ...]:
    rounds = full_workload()
    last = rounds[ONE_BY_ONE]
    return (
        *(rounds[number] for number in TOGETHER),
        last.model_copy(update={"asks": last.asks[:NUM_ASKS]}),
    )


def expected_answers(plain: EngineResult) -> list[dict[str, Answer]]:
    few = workload()[-1].asks
    return [
        *(plain.rounds[number] for number in TOGETHER),
        {ask.id: plain.rounds[ONE_BY_ONE][ask.id] for ask in few},
    ]


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
    result = run_parallel(runs, "llama", TENSOR, {"num_cpu_blocks": HOST_BLOCKS})
    assert_serves_alike(runs, "llama", result)


def test_pipeline_parallel_with_ranks_of_unequal_room(runs: Runs) -> None:
    """Sized in bytes, the rank with more layers has room for fewer blocks; both use as many."""
    result = run_parallel(runs, "llama", PIPELINE, {"cpu_bytes_to_use": "64MiB"})
    assert_serves_alike(runs, "llama", result)
    assert result.host_pool is not None
    per_rank, block_bytes_of_a_layer = 32 * 2**20, 2 * 32 * 2 * 32 * 4
    assert result.host_pool.total == per_rank // (2 * block_bytes_of_a_layer) - 1


@pytest.mark.slow
@pytest.mark.timeout(DEADLINE_SECONDS + 60)
@pytest.mark.parametrize("parallel", [TENSOR, PIPELINE, TENSOR | PIPELINE], ids=str)
@pytest.mark.parametrize("architecture", ["qwen3", "gemma3"])
def test_more_combinations(
    runs: Runs, architecture: Architecture, parallel: dict[str, Any]
) -> None:
    result = run_parallel(runs, architecture, parallel, {"num_cpu_blocks": HOST_BLOCKS})
    assert_serves_alike(runs, architecture, result)
