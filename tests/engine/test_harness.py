"""Child processes that fail or do not end."""

from pathlib import Path

import pytest

from tests.engine.harness import EngineJobFailed, run_child


def test_a_stuck_child_writes_its_stacks(tmp_path: Path) -> None:
    with pytest.raises(EngineJobFailed, match=r"no end within 2 s(.*\n)*.*harness.py.* in main"):
        run_child(tmp_path, "time:sleep", 600, deadline=2.0)


def test_a_child_that_fails_shows_its_error(tmp_path: Path) -> None:
    with pytest.raises(EngineJobFailed, match=r"status 1(.*\n)*ZeroDivisionError"):
        run_child(tmp_path, "builtins:divmod", 1, 0)
    assert run_child(tmp_path, "builtins:divmod", 7, 2) == (3, 1)
