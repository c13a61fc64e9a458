"""Tensor and pipeline parallel ranks, each in a process of vLLM's executors. A split model differs
in rounding only: the answers must be those of the plain engine of one process."""

from typing import Any

import pytest

from examples.random_model import Architecture
from tests.engine.compare import assert_nothing_left, assert_same_answers
from tests.engine.runs import DEVICE_BLOCKS, HOST_BLOCKS, Runs
from tests.engine.spec import EngineResult
from tests.engine.workloads import LONG, TURNS, TURNS_FROM_HOST, full_workload

ROOMY = {"num_cpu_blocks": HOST_BLOCKS, "keep_on_device_reset": True}
TENSOR: dict[str, Any] = {"tensor_parallel_size": 2}
PIPELINE: dict[str, Any] = {"pipeline_parallel_size": 2}

NUM_FROM_HOST = 3
"""Number of requests of TURNS_FROM_HOST."""

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


def run_parallel(
    runs: Runs,
    architecture: Architecture,
    parallel: dict[str, Any],
    connector: dict[str, Any],
    num_kv_heads: int = 2,
) -> EngineResult:
    """The result of an engine that serves some rounds of the full workload, since steps across
    processes are slow; and which serves them like the plain engine."""
    full = full_workload()
    few = full[TURNS_FROM_HOST].asks[:NUM_FROM_HOST]
    rounds = (full[LONG], full[TURNS], full[TURNS_FROM_HOST]._replace(asks=few))
    name = f"{architecture}-{parallel}-{num_kv_heads}"
    of_stages: dict[str, Any] = {}
    if "pipeline_parallel_size" in parallel:
        num_blocks = DEVICE_BLOCKS[architecture] + MORE_BLOCKS.get(architecture, 0)
        of_stages = TRACE_ONLY | {"num_gpu_blocks_override": num_blocks}
    spec = runs.spec(
        architecture,
        connector={"keep_on_device_reset": True, **connector},
        rounds=rounds,
        num_kv_heads=num_kv_heads,
        **{"distributed_executor_backend": "mp"} | parallel | of_stages,
    )
    alone = runs.spec(architecture, connector=None, rounds=rounds, num_kv_heads=num_kv_heads)
    results = runs.run(name, {"parallel": spec, "alone": alone}, deadline=DEADLINE_SECONDS)
    result = results["parallel"]
    assert_same_answers(results["alone"].rounds, result)
    assert result.metrics["external_prefix_cache_hits"] > 0
    assert all(answer.num_cached_tokens > 0 for answer in result.rounds[-1].values())
    assert_nothing_left(result)
    return result


@pytest.mark.slow
def test_ranks_that_repeat_kv_heads_share_host_memory(runs: Runs) -> None:
    """There are more ranks than KV heads. The tier has room for as many tokens as if there was one
    rank, and each rank stores half of them."""
    size = 64 * 2**20
    result = run_parallel(runs, "gemma3", TENSOR, {"cpu_bytes_to_use": size}, num_kv_heads=1)
    block_bytes = 2 * 32 * 32 * 4  # of the one layer in each group
    assert result.num_host_blocks == size // block_bytes - 1
    num_stored = result.metrics["simple_offload_stored_blocks"]
    num_loaded = result.metrics["simple_offload_loaded_blocks"]
    num_copied = num_stored + 2 * num_loaded  # each rank stores a half, and loads all
    assert result.metrics["simple_offload_bytes"] == num_copied * block_bytes


@pytest.mark.slow
@pytest.mark.timeout(DEADLINE_SECONDS + 60)
def test_pipeline_parallel_with_ranks_of_unequal_room(runs: Runs) -> None:
    """Sized in bytes, the rank with more layers has room for fewer blocks. Both ranks use that
    number."""
    result = run_parallel(runs, "llama", PIPELINE, {"cpu_bytes_to_use": "64MiB"})
    per_rank, block_bytes_of_a_layer = 32 * 2**20, 2 * 32 * 2 * 32 * 4
    assert result.num_host_blocks == per_rank // (2 * block_bytes_of_a_layer) - 1


@pytest.mark.slow
@pytest.mark.timeout(DEADLINE_SECONDS + 60)
@pytest.mark.parametrize(
    ("architecture", "parallel"),
    [
        ("qwen3", TENSOR),
        ("qwen3", PIPELINE),
        ("qwen3", TENSOR | PIPELINE),
        ("gemma3", TENSOR | PIPELINE),
    ],
    ids=str,
)
def test_more_combinations(
    runs: Runs, architecture: Architecture, parallel: dict[str, Any]
) -> None:
    run_parallel(runs, architecture, parallel, ROOMY)


@pytest.mark.slow
@pytest.mark.timeout(DEADLINE_SECONDS + 60)
def test_two_ranks_in_a_local_ray_cluster(runs: Runs) -> None:
    """On a node each. Metadata goes down, and reports come up, through Ray's own channels."""
    pytest.importorskip("ray", reason="needs Ray: pip install 'simple-offload[ray]'")
    run_parallel(runs, "llama", TENSOR | {"distributed_executor_backend": "ray"}, ROOMY)
