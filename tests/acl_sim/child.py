"""Processes with the real torch_npu, over the simulated ACL runtime."""

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.acl_sim import build
from tests.vllm_ascend.packages import VLLM
from tests.wheels import CACHE, UnavailableError, Wheel
from tools.set_up import ROOT

CHILD_SECONDS = 150
DOWNLOAD_SECONDS = 300
OWN_TORCH_SECONDS = 1800
NEWEST, OF_IMAGES = "2.13.0", "2.10.0.post4"
"""The torch_npu that fits the test environment's torch, and that of vllm-ascend 0.30's images."""
_WITHOUT = "--deselect tests/backends/test_npu.py"


def _torch_npu(version: str) -> Wheel:
    return Wheel(
        "torch-npu",
        version,
        CACHE / f"torch-npu-{version}",
        download_mb=44,
        download_seconds=DOWNLOAD_SECONDS,
        without=_WITHOUT,
    )


_UNUSED = re.compile(r"\.(a|bc|h|hpp|cuh)$|/libcudnn_|/libnvperf|\.alt\.|Mg\.so|_linalg\.so")
_OWN_TORCH = Wheel(
    "torch",
    "2.10.0",
    CACHE / "torch-2.10.0",
    # The build for CUDA, with its libraries. The CPU's (200 MB) is on PyTorch's own index, and pip
    # takes it where it is configured for that.
    download_mb=3300,
    download_seconds=OWN_TORCH_SECONDS,
    without=_WITHOUT,
    needed=lambda file: (
        file.startswith(("torch/", "torch-", "torchgen/", "functorch/", "nvidia/"))
        and not _UNUSED.search(file)
    ),
    with_required=True,
)
_WHEELS = {
    NEWEST: (_torch_npu(NEWEST),),
    # vLLM's operators are for another torch; the images have none either.
    OF_IMAGES: (_torch_npu(OF_IMAGES), _OWN_TORCH, VLLM),
}


def torch_npu_path(version: str = NEWEST) -> str:
    """PYTHONPATH for this torch_npu, and its torch and vLLM if these are not the environment's. It
    is not installed there: where torch_npu is and CANN is not, even `import torch` fails. Fails the
    test if one cannot be downloaded."""
    try:
        return os.pathsep.join(str(wheel.fetch()) for wheel in _WHEELS[version])
    except UnavailableError as error:
        pytest.fail(str(error), pytrace=False)


def environment(version: str = NEWEST, *, has_batch: bool = True) -> dict[str, str]:
    """The environment of a process with torch_npu over the simulated runtime."""
    return {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": f"{torch_npu_path(version)}{os.pathsep}{ROOT}",
        "TORCH_NPU_VERSION": version,
        "VLLM_TARGET_DEVICE": "cpu",
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
