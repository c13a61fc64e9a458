"""Tests in several processes: those that share costly things run in one."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import conftest, operators

ROOT = Path(__file__).resolve().parents[1]


def config(dist: str) -> Any:
    return SimpleNamespace(getvalue={"dist": dist, "tx": ["2*popen"]}.get)


@pytest.mark.parametrize(
    ("first", "second", "together"),
    [
        ("tests/engine/test_runs.py::a", "tests/engine/test_gpu.py::b[c]", True),
        ("tests/engine/test_runs.py::a", "tests/serve/test_serve.py::b", False),
        ("tests/scheduler/test_lazy.py::a", "tests/scheduler/test_lazy.py::B::c", True),
        ("tests/scheduler/test_lazy.py::a", "tests/scheduler/test_eager.py::a", False),
        ("tests/simulation/test_remote.py::a[x::1]", "tests/simulation/test_remote.py::b", False),
        ("tests/test_docs.py::a[x::y]", "tests/test_docs.py::b", True),
        ("tests/test_docs.py::a", "tests/test_config.py::a", False),
    ],
)
def test_which_tests_run_in_one_process(first: str, second: str, together: bool) -> None:
    scheduler = conftest.pytest_xdist_make_scheduler(config("loadscope"), None)
    scopes = {scheduler._split_scope(nodeid) for nodeid in (first, second)}
    assert len(scopes) == (1 if together else 2)


def test_other_distributions_are_left_alone() -> None:
    assert conftest.pytest_xdist_make_scheduler(config("load"), None) is None


def test_make_test_selects_it() -> None:
    assert "-n $(WORKERS) --dist loadscope" in (ROOT / "Makefile").read_text()


def test_the_header_names_the_operators() -> None:
    """The log of a failure on one kind of processor identifies that processor."""
    header = conftest.pytest_report_header()
    assert f"operators {operators.runnable_builds()[-1]};" in header
    assert header.startswith("vLLM 0.")
