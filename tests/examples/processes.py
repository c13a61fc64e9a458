"""Programs that are ended while they run, and the processes that they started."""

import os
import signal
import subprocess
from collections.abc import Sequence

import psutil

from examples.bench.child import ROOT


def assert_gone(processes: Sequence[psutil.Process]) -> None:
    """All have ended, or do so soon."""
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert [each for each in alive if each.status() != psutil.STATUS_ZOMBIE] == []


def end_at(words: str, number: signal.Signals, command: Sequence[str], **variables: str) -> int:
    """Run ``command`` and send it a signal when it prints ``words``; return its exit code. Asserts
    that it prints no traceback, and that no process is left of at least two that it started."""
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # Started in the background by a shell, the tests themselves ignore SIGINT.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509 - no lock taken
    )
    assert process.stdout is not None
    family: list[psutil.Process] = []
    try:
        for line in process.stdout:
            if words in line:
                family = psutil.Process(process.pid).children(recursive=True)
                process.send_signal(number)
                break
        rest, _ = process.communicate(timeout=120)
    finally:
        process.kill()
    assert "Interrupted." in rest
    assert "Traceback" not in rest
    assert len(family) >= 2
    assert_gone(family)
    return process.returncode
