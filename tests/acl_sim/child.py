"""Processes with the real torch_npu, over the simulated ACL runtime."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.acl_sim import build
from tests.wheels import CACHE, UnavailableError, Wheel
from tools.set_up import ROOT

CHILD_SECONDS = 150
DOWNLOAD_SECONDS = 300
VERSION = "2.13.0"
TORCH_NPU = Wheel(
    "torch-npu",
    VERSION,
    CACHE / f"torch-npu-{VERSION}",
    download_mb=44,
    download_seconds=DOWNLOAD_SECONDS,
    without="--deselect tests/backends/test_npu.py",
)


def torch_npu_path() -> Path:
    """The folder to put on PYTHONPATH. It is not installed in the environment: where torch_npu is
    and CANN is not, even `import torch` fails. Fails the test if it cannot be downloaded."""
    try:
        return TORCH_NPU.fetch()
    except UnavailableError as error:
        pytest.fail(str(error), pytrace=False)


def environment(*, has_batch: bool = True) -> dict[str, str]:
    """The environment of a process with torch_npu over the simulated runtime."""
    return {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": f"{torch_npu_path()}{os.pathsep}{ROOT}",
        "LD_LIBRARY_PATH": str(build.library(has_batch=has_batch).parent),
    }


def run_python(
    arguments: Sequence[str], child_environment: dict[str, str], folder: Path
) -> subprocess.CompletedProcess[str]:
    """Run Python in ``folder``. A child that takes longer than CHILD_SECONDS fails the test with
    its output."""
    try:
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=folder,
            env=child_environment,
            check=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=CHILD_SECONDS,
        )
    except subprocess.TimeoutExpired as late:
        printed = (late.stdout or b"").decode(errors="replace")  # bytes, whatever was asked for
        pytest.fail(f"stopped after {CHILD_SECONDS} s:\n{printed}", pytrace=False)
