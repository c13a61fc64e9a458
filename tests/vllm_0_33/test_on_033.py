"""The connector on vLLM 0.33: its new interfaces, and unit and simulation tests once more."""

import re

import pytest

from tests.vllm_0_33.conftest import RunScript
from tools.set_up import ROOT

TESTS = (
    "tests/vllm_0_33/on_033.py",
    "tests/test_connector.py",
    "tests/test_drop_in.py",
    "tests/test_metadata.py",
    "tests/test_metrics.py",
    "tests/test_vllm_compat.py",
    "tests/scheduler/test_counting.py",
    "tests/scheduler/test_events.py",
    "tests/scheduler/test_groups.py",
    "tests/scheduler/test_inner_hits.py",
    "tests/scheduler/test_states.py",
    "tests/simulation/test_real_models.py::test_groups",
    "tests/worker",
)


def num_passed(run_on_vllm_033: RunScript, *tests: str) -> int:
    """Run tests on 0.33, which all have to pass; return their number."""
    arguments = [
        *("--rootdir", str(ROOT), "--config-file", str(ROOT / "pyproject.toml")),
        *("-q", "-p", "no:cacheprovider"),
        *(str(ROOT / test) for test in tests),
    ]
    script = f"import pytest, sys; sys.exit(pytest.main({arguments!r}))"
    summary = run_on_vllm_033(script).splitlines()[-1]
    passed = re.match(r"(\d+) passed in", summary)
    assert passed is not None, summary
    return int(passed[1])


def test_on_033(run_on_vllm_033: RunScript) -> None:
    assert num_passed(run_on_vllm_033, *TESTS) > 100


@pytest.mark.slow
def test_real_models(run_on_vllm_033: RunScript) -> None:
    """Scripts with the KV cache groups that vLLM 0.33 plans."""
    assert num_passed(run_on_vllm_033, "tests/simulation/test_real_models.py") > 20
