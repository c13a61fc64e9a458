"""Beside another connector in vLLM's MultiConnector: its own example, which keeps whole prompts in
files and loads them within a step."""

from typing import Any

import pytest

from tests.engine.compare import assert_nothing_left, assert_same_answers
from tests.engine.harness import log_tail
from tests.engine.runs import HOST_BLOCKS, Runs
from tests.engine.spec import EngineResult, Round
from tests.engine.workloads import follow_ups, shared_prefix_asks

OURS: dict[str, Any] = {
    "kv_connector": "SimpleCPUOffloadConnector",
    "kv_connector_module_path": "simple_offload",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"num_cpu_blocks": HOST_BLOCKS},
}
ROOM: dict[str, Any] = {
    # The example saves a prompt in the step that schedules it first, computed or not.
    "max_num_batched_tokens": 1024,
    "num_gpu_blocks_override": 96,
    "disable_hybrid_kv_cache_manager": True,
}


def rounds() -> tuple[Round, ...]:
    """Prompts twice, then their next turns, which are new."""
    asks = shared_prefix_asks("multi", seed=9, tails=2)
    return (
        Round(asks=asks, together=False),
        Round(asks=asks, together=False, reset="device"),
        Round(asks=follow_ups(asks, "turn", seed=10), together=False, reset="device"),
    )


def run(runs: Runs, *, ours_first: bool) -> tuple[EngineResult, EngineResult]:
    """The rounds on an engine without a connector, and on one with both."""
    name = "multi-ours-first" if ours_first else "multi-ours-last"
    example = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(runs.directory / f"{name}-kv")},
    }
    both = {
        "kv_connector": "MultiConnector",
        "kv_connector_module_path": None,
        "kv_connector_extra_config": {
            "connectors": [OURS, example] if ours_first else [example, OURS]
        },
    }
    specs = {
        "plain": runs.spec("llama", connector=None, rounds=rounds(), **ROOM),
        "both": runs.spec("llama", connector={}, rounds=rounds(), transfer_arguments=both, **ROOM),
    }
    results = runs.run(name, specs)
    return results["plain"], results["both"]


@pytest.mark.slow
@pytest.mark.parametrize("ours_first", [True, False], ids=["ours first", "ours last"])
def test_beside_another_connector(runs: Runs, ours_first: bool) -> None:
    plain, both = run(runs, ours_first=ours_first)
    assert_same_answers(plain.rounds, both)
    assert both.host_pool is not None
    assert_nothing_left(both)
    _, again, turns = both.rounds
    assert all(answer.num_cached_tokens > 0 for answer in again.values())
    assert all(answer.num_cached_tokens > 0 for answer in turns.values()), "the example has none"
    assert both.log is not None
    injected = both.log.read_text(errors="replace").count("Inject KV cache")
    assert (injected == 0) == ours_first, log_tail(both.log)
