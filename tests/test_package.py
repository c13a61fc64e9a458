"""The package itself: its names, and the cost of importing it."""

import subprocess
import sys

import pytest

import simple_offload


def run(script: str) -> str:
    """The output of a new interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_it_needs_neither_vllm_nor_torch() -> None:
    script = """
import sys
sys.modules.update(dict.fromkeys(("vllm", "torch", "numpy", "pydantic", "psutil")))  # absent
import simple_offload
print(simple_offload.__version__)
try:
    simple_offload.SimpleCPUOffloadConnector
except ImportError as error:
    print(error.name)
"""
    version, missing = run(script).split()
    assert version == simple_offload.__version__
    assert missing == "vllm" or missing.startswith("vllm.")


def test_the_connector_is_imported_on_first_use() -> None:
    from simple_offload.connector import SimpleCPUOffloadConnector

    assert simple_offload.SimpleCPUOffloadConnector is SimpleCPUOffloadConnector


def test_its_names() -> None:
    for name in simple_offload.__all__:
        assert getattr(simple_offload, name) is not None
    with pytest.raises(AttributeError, match="SimpleCpuOffloadConnector"):
        simple_offload.SimpleCpuOffloadConnector  # noqa: B018 - the wrong spelling is the point
