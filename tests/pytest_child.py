"""Tests that run in a pytest of their own, with other packages."""

import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tools.set_up import ROOT


def num_passed(
    environment: Mapping[str, str], folder: Path, *arguments: str, seconds: float
) -> int:
    """Run pytest with ``arguments``, for ``seconds`` at most. All tests have to pass; returns their
    number. ``folder``: where it runs, a temporary one. A test's path begins with "tests/"."""
    command = [
        *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
        *("--rootdir", str(ROOT), "--config-file", str(ROOT / "pyproject.toml")),
        *(str(ROOT / each) if each.startswith("tests/") else each for each in arguments),
    ]
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        check=False,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=seconds,
        text=True,
        errors="replace",
    )
    passed = re.search(r"^(\d+) passed.* in ", done.stdout, re.MULTILINE)
    if done.returncode or passed is None:
        pytest.fail(f"ended with {done.returncode}:\n{done.stdout}", pytrace=False)
    return int(passed[1])
