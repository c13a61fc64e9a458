"""Processes that have to end."""

from collections.abc import Sequence

import psutil


def assert_gone(processes: Sequence[psutil.Process]) -> None:
    """All have ended, or do so soon."""
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert [each for each in alive if each.status() != psutil.STATUS_ZOMBIE] == []
