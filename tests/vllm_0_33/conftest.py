"""Runs code on vLLM 0.33: its Python files, and all other packages of the 0.32 environment."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.vllm_0_33 import python_files
from tools.set_up import ROOT

RunScript = Callable[[str], str]
SCRIPT_SECONDS = 600


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Time limit, in seconds: the first test may have to download the wheel."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.timeout(python_files.DOWNLOAD_SECONDS + 60))


@pytest.fixture(scope="session")
def vllm_033_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder to put first on PYTHONPATH to have `import vllm` give 0.33."""
    try:
        fetched = python_files.fetch()
    except python_files.UnavailableError as error:
        pytest.fail(str(error), pytrace=False)
    return python_files.with_operators(fetched, tmp_path_factory.mktemp("vllm-0.33") / "path")


@pytest.fixture
def run_on_vllm_033(vllm_033_path: Path, tmp_path: Path) -> RunScript:
    """A function that runs a script in a new interpreter on vLLM 0.33 and returns its stdout.

    VLLM_TARGET_DEVICE selects the CPU platform, since the version has no "cpu" in it. A script that
    fails, or takes more than SCRIPT_SECONDS, fails the test with its whole output.
    """
    environment = {
        **os.environ,
        "PYTHONPATH": f"{vllm_033_path}{os.pathsep}{ROOT}",
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_LOGGING_LEVEL": "WARNING",
        # vLLM caches its inspection of a model's class, for one version at a time.
        "VLLM_CACHE_ROOT": str(python_files.CACHE / f"vllm-{python_files.VERSION}-cache"),
        "HF_HUB_OFFLINE": "1",
    }

    def run(script: str) -> str:
        try:
            done = subprocess.run(
                [sys.executable, "-c", script],
                cwd=tmp_path,
                env=environment,
                check=False,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=SCRIPT_SECONDS,
            )
        except subprocess.TimeoutExpired as late:
            how, output = f"was stopped after {late.timeout:.0f} s", (late.stdout, late.stderr)
        else:
            if done.returncode == 0:
                return done.stdout.decode()
            how, output = f"ended with status {done.returncode}", (done.stdout, done.stderr)
        printed = "\n".join((part or b"").decode(errors="replace") for part in output)
        pytest.fail(f"the script {how}:\n{printed}", pytrace=False)

    return run
