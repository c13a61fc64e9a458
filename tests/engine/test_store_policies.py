"""Stores that are lazy, or only of what comes again: nobody can tell from the answers."""

from typing import Any

import pytest

from tests.engine.compare import assert_nothing_left, assert_same_answers
from tests.engine.runs import HOST_BLOCKS, Runs
from tests.engine.spec import EngineResult, Round
from tests.engine.workloads import follow_ups, shared_prefix_asks

SMALL_STEPS: dict[str, Any] = {
    "max_model_len": 512,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 64,
    "num_gpu_blocks_override": 48,
}
"""A device with more free blocks than lazy stores look ahead, and too few for the workload."""

ASKS = shared_prefix_asks("a", seed=8, tails=3, max_tokens=8)
ROUNDS = (
    Round(asks=ASKS, together=False),
    Round(asks=ASKS[::-1], together=False),
    Round(asks=follow_ups(ASKS, "turn", seed=9), together=True),
)


FORGETTING = tuple(each.model_copy(update={"reset": "device"}) for each in ROUNDS)
"""The same, each on a device that has forgotten the one before."""


def compare(
    runs: Runs, name: str, rounds: tuple[Round, ...] = ROUNDS, **connector: Any
) -> EngineResult:
    """Play the rounds with stores as ``connector`` says, and compare with no connector at all."""
    configurations = {"plain": None, name: {"num_cpu_blocks": HOST_BLOCKS, **connector}}
    specs = {
        key: runs.spec("llama", connector=configuration, rounds=rounds, **SMALL_STEPS)
        for key, configuration in configurations.items()
    }
    results = runs.run(name, specs)
    assert_same_answers(results["plain"].rounds, results[name])
    assert_nothing_left(results[name])
    assert results[name].metrics["external_prefix_cache_hits"] > 0
    return results[name]


def test_lazy_stores(runs: Runs) -> None:
    result = compare(runs, "lazy", lazy_offload=True)
    assert result.log is not None
    assert "lazy stores" in result.log.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("lazy", [False, True])
def test_stores_of_what_comes_again(runs: Runs, lazy: bool) -> None:
    compare(runs, f"again-{lazy}", FORGETTING, lazy_offload=lazy, store_threshold=2)
