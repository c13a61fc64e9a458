"""Tests of a version of vLLM: test_versions.py runs them on each."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import vllm

from simple_offload import vllm_compat
from simple_offload.sizing.model_bytes import parse_plan
from simple_offload.sizing.planning import describe, plan_engine
from tests.forked import in_child
from tests.simulation.script import play
from tests.sizing.test_model_bytes import DEEPSEEK_V32


def test_this_is_the_first_on_the_path() -> None:
    folder = os.environ["PYTHONPATH"].split(os.pathsep)[0]
    assert Path(vllm.__file__).is_relative_to(folder)
    assert vllm.__version__ in folder
    vllm_compat.require_supported_vllm()


def test_a_models_bytes(tmp_path: Path) -> None:
    """With rules of GPUs, on this CPU: FlashMLA's format of sparse latents, and keys of the index
    (tests/sizing/test_model_bytes.py)."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(DEEPSEEK_V32 | {"num_hidden_layers": 4}))
    model = parse_plan(in_child(_plan, str(path)))
    assert model.token_per_rank == 4 * (512 + 4 * 4 + 64 * 2 + 128 + 4)


@pytest.mark.parametrize("first", [100, pytest.param(0, marks=pytest.mark.slow)])
def test_scripts_of_the_simulator(first: int) -> None:
    outcomes = [play(seed) for seed in range(first, first + (6 if first else 200))]
    assert sum(outcome.num_blocks_loaded for outcome in outcomes) > 0


def _plan(config: str) -> dict[str, Any]:
    return describe(*plan_engine(config, tensor_parallel_size=8, kv_cache_dtype="fp8"))
