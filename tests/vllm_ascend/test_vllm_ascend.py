"""The connector beside vllm-ascend: its scheduler patches, coordinator and model runners.

They run in a process of their own, on the vLLM that they are for, without an NPU (``devices.py``).
"""

import os
from pathlib import Path

import pytest

from tests.pytest_child import num_passed
from tests.vllm_ascend.packages import VLLM, VLLM_ASCEND
from tests.wheels import CACHE, UnavailableError
from tools.set_up import ROOT

RUN_SECONDS = 240
TESTS = "tests/vllm_ascend"

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


def num_passed_beside(path: str, folder: Path, *arguments: str) -> int:
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
    options = ("-W", "ignore", "-p", "tests.vllm_ascend.devices")
    return num_passed(environment, folder, *options, *arguments, seconds=RUN_SECONDS)


def test_beside_vllm_ascend(path: str, tmp_path: Path) -> None:
    files = (f"{TESTS}/{name}" for name in ("kv_caches.py", "scheduler.py"))
    assert num_passed_beside(path, tmp_path, *files) >= 31


@pytest.mark.slow
def test_many_scripts(path: str, tmp_path: Path) -> None:
    assert num_passed_beside(path, tmp_path, f"{TESTS}/scheduler.py", "-m", "slow") == 1
