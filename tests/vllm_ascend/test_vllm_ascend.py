"""The connector beside vllm-ascend: its scheduler patches, coordinator and model runners.

They run in a process of their own, on the vLLM that they are for, without an NPU (``devices.py``).
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.vllm_ascend.packages import VLLM, VLLM_ASCEND
from tests.wheels import CACHE, UnavailableError
from tools.set_up import ROOT

RUN_SECONDS = 240
TESTS = ROOT / "tests" / "vllm_ascend"

# The first test may have to download both.
pytestmark = pytest.mark.timeout(VLLM_ASCEND.download_seconds + VLLM.download_seconds + RUN_SECONDS)


@pytest.fixture(scope="module")
def path() -> str:
    """PYTHONPATH for vllm-ascend and its vLLM, which has no operators, as in the images."""
    try:
        folders = VLLM.fetch(), VLLM_ASCEND.fetch()
    except UnavailableError as error:
        pytest.fail(str(error), pytrace=False)
    return os.pathsep.join(map(str, (*folders, ROOT)))


def num_passed(path: str, folder: Path, *arguments: str) -> int:
    """Run tests, which all have to pass; return their number."""
    environment = {
        **os.environ,
        "PYTHONPATH": path,
        "HF_HUB_OFFLINE": "1",
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "VLLM_CACHE_ROOT": str(CACHE / f"vllm-{VLLM.version}-cache"),
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_PLUGINS": "",
        "VLLM_TARGET_DEVICE": "cpu",
    }
    command = [
        *(sys.executable, "-m", "pytest", "-q", "-W", "ignore", "-p", "no:cacheprovider"),
        *("-p", "tests.vllm_ascend.devices"),
        *("--rootdir", str(ROOT), "--config-file", str(ROOT / "pyproject.toml"), *arguments),
    ]
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        check=False,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=RUN_SECONDS,
        text=True,
        errors="replace",
    )
    passed = re.search(r"^(\d+) passed", done.stdout, re.MULTILINE)
    if done.returncode or passed is None:
        pytest.fail(f"ended with {done.returncode}:\n{done.stdout}", pytrace=False)
    return int(passed[1])


def test_beside_vllm_ascend(path: str, tmp_path: Path) -> None:
    files = (str(TESTS / name) for name in ("kv_caches.py", "scheduler.py"))
    assert num_passed(path, tmp_path, *files) >= 31


@pytest.mark.slow
def test_many_scripts(path: str, tmp_path: Path) -> None:
    assert num_passed(path, tmp_path, str(TESTS / "scheduler.py"), "-m", "slow") == 1
