"""Tests of a version of vLLM: test_versions.py runs them on each."""

import os
from pathlib import Path

import pytest
import vllm

from simple_offload import vllm_compat
from tests.simulation.script import play


def test_this_is_the_first_on_the_path() -> None:
    folder = os.environ["PYTHONPATH"].split(os.pathsep)[0]
    assert Path(vllm.__file__).is_relative_to(folder)
    assert vllm.__version__ in folder
    vllm_compat.require_supported_vllm()


@pytest.mark.parametrize("first", [100, pytest.param(0, marks=pytest.mark.slow)])
def test_scripts_of_the_simulator(first: int) -> None:
    outcomes = [play(seed) for seed in range(first, first + (6 if first else 200))]
    assert sum(outcome.num_blocks_loaded for outcome in outcomes) > 0
