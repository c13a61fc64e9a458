"""Ranks that Ray starts: metadata goes down, and reports come up, through Ray's own channels."""

from typing import Any

import pytest

from tests.engine import ray_cluster
from tests.engine.runs import HOST_BLOCKS, Runs
from tests.engine.test_parallel import DEADLINE_SECONDS, assert_serves_alike, run_parallel

TWO_RANKS: dict[str, Any] = {"tensor_parallel_size": 2, "distributed_executor_backend": "ray"}


@pytest.mark.slow
@pytest.mark.timeout(DEADLINE_SECONDS + 60)
@pytest.mark.skipif(
    not ray_cluster.IS_INSTALLED,
    reason="needs Ray: pip install 'simple-offload[ray]' in this environment",
)
def test_two_ranks_in_a_local_cluster(runs: Runs) -> None:
    result = run_parallel(runs, "llama", TWO_RANKS, {"num_cpu_blocks": HOST_BLOCKS})
    assert_serves_alike(runs, "llama", result)
