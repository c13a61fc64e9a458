"""The connector on vLLM 0.33: what only that version does, and the unit tests once more."""

import re

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
    "tests/worker",
)


def test_on_033(run_on_vllm_033: RunScript) -> None:
    arguments = [
        *("--rootdir", str(ROOT), "--config-file", str(ROOT / "pyproject.toml")),
        *("-q", "-p", "no:cacheprovider"),
        *(str(ROOT / path) for path in TESTS),
    ]
    script = f"import pytest, sys; sys.exit(pytest.main({arguments!r}))"
    summary = run_on_vllm_033(script).splitlines()[-1]
    passed = re.match(r"(\d+) passed in", summary)
    assert passed is not None, summary
    assert int(passed[1]) > 100
