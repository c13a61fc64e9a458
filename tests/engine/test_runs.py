"""Runs: a failed job is not run again."""

from pathlib import Path
from typing import Any

import pytest

from tests.engine import runs as module
from tests.engine.harness import EngineJobFailed
from tests.engine.runs import Runs


def test_a_failed_job_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []

    def fail(directory: Path, *_: Any, **__: Any) -> None:
        started.append(directory.name)
        raise EngineJobFailed(f"{directory.name} failed")

    monkeypatch.setattr(module, "run_engines", fail)
    runs = Runs(tmp_path)
    for name in ("one", "one", "other", "one"):
        with pytest.raises(EngineJobFailed, match=f"{name} failed"):
            runs.run(name, {})
    assert started == ["one", "other"]
