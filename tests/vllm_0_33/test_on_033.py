"""The connector on vLLM 0.33: its new interfaces, and unit and simulation tests once more.

No CPU build of 0.33 is published, and the compiled modules in its wheel are for CUDA. Whole engines
run with its Python files, and with the operators and all other packages of the 0.32 environment.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.wheels import CACHE, UnavailableError, Wheel
from tools.set_up import ROOT

VERSION = "0.33.0"
RUN_SECONDS = 600
TESTS = (
    "tests/vllm_0_33/on_033.py",
    "tests/test_connector.py",
    "tests/test_drop_in.py",
    "tests/test_metadata.py",
    "tests/test_metrics.py",
    "tests/test_vllm_compat.py",
    "tests/scheduler/test_counting.py",
    "tests/scheduler/test_events.py",
    "tests/scheduler/test_groups.py",
    "tests/scheduler/test_inner_hits.py",
    "tests/scheduler/test_states.py",
    "tests/scheduler/test_supported.py",
    "tests/scheduler/second_tier/test_fetches.py",
    "tests/simulation/test_real_models.py::test_groups",
    "tests/worker",
)


def _needed(file: str) -> bool:
    """Whether a file of the wheel is needed: 60 MB are, without compiled modules."""
    return file.endswith((".py", ".json")) or f"vllm-{VERSION}.dist-info/" in file


WHEEL = Wheel(
    "vllm",
    VERSION,
    CACHE / f"vllm-{VERSION}-python",
    download_mb=340,
    download_seconds=780,
    without="--ignore=tests/vllm_0_33",
    needed=_needed,
)

# The first test may have to download the wheel.
pytestmark = pytest.mark.timeout(WHEEL.download_seconds + RUN_SECONDS)


@pytest.fixture(scope="module")
def vllm_033(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder to put first on PYTHONPATH to have `import vllm` give 0.33: a copy of its Python
    files, with links to the installed vLLM's operators."""
    try:
        fetched = WHEEL.fetch()
    except UnavailableError as error:
        pytest.fail(str(error), pytrace=False)
    folder = tmp_path_factory.mktemp("vllm-0.33") / "path"
    shutil.copytree(fetched, folder)
    installed = importlib.util.find_spec("vllm")
    assert installed is not None
    assert installed.origin is not None
    for module in Path(installed.origin).parent.glob("*.so"):
        (folder / "vllm" / module.name).symlink_to(module)
    return folder


def num_passed(vllm_033: Path, folder: Path, *tests: str) -> int:
    """Run tests on 0.33, which all have to pass; return their number."""
    environment = {
        **os.environ,
        "PYTHONPATH": f"{vllm_033}{os.pathsep}{ROOT}",
        # The version has no "cpu" in it, by which vLLM would choose the platform.
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_LOGGING_LEVEL": "WARNING",
        # vLLM caches its inspection of a model's class, for one version at a time.
        "VLLM_CACHE_ROOT": str(CACHE / f"vllm-{VERSION}-cache"),
        "HF_HUB_OFFLINE": "1",
    }
    command = [
        *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
        *("--rootdir", str(ROOT), "--config-file", str(ROOT / "pyproject.toml")),
        *(str(ROOT / test) for test in tests),
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
    passed = re.search(r"^(\d+) passed in", done.stdout, re.MULTILINE)
    if done.returncode or passed is None:
        pytest.fail(f"ended with {done.returncode}:\n{done.stdout}", pytrace=False)
    return int(passed[1])


def test_on_033(vllm_033: Path, tmp_path: Path) -> None:
    assert num_passed(vllm_033, tmp_path, *TESTS) > 100


@pytest.mark.slow
def test_real_models(vllm_033: Path, tmp_path: Path) -> None:
    """Scripts with the KV cache groups that vLLM 0.33 plans."""
    assert num_passed(vllm_033, tmp_path, "tests/simulation/test_real_models.py") > 20
