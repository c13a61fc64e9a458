"""Child processes that do not end."""

import subprocess
import sys
from pathlib import Path

from tests.engine.harness import ROOT, kill_session, wait_for

STUCK = """
import threading
from tests.engine.harness import prepare_child

def wait_for_nothing():
    print("stuck", flush=True)
    threading.Event().wait()

prepare_child()
wait_for_nothing()
"""


def start(code: str, log: Path) -> "subprocess.Popen[bytes]":
    """A child that has written a line."""
    with log.open("wb") as stream:
        child = subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=stream,
            start_new_session=True,
        )
    assert child.stdout is not None
    assert child.stdout.readline()
    return child


def test_a_stuck_child_writes_its_stacks(tmp_path: Path) -> None:
    with start(STUCK, tmp_path / "log") as child:
        try:
            assert wait_for(child, 0.1) is None
            assert child.poll() is None
        finally:
            kill_session(child.pid)
    assert "wait_for_nothing" in (tmp_path / "log").read_text()


def test_a_child_that_ends_writes_no_stacks(tmp_path: Path) -> None:
    with start("print('here'); raise SystemExit(3)", tmp_path / "log") as child:
        assert wait_for(child, 60.0) == 3
    assert (tmp_path / "log").read_text() == ""
