"""The packages that the extras install. Small ones go into an empty environment. For large ones,
and those for other machines, pip only resolves the versions."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests.test_packaging import EXTRAS, build_wheel
from tools.set_up import canonical, pip_environment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

# The purpose of each extra, checked in a Python with no other packages.
CLAIMS = {
    "bench": """
import matplotlib.figure
from lm_eval.api.registry import get_model
assert get_model("local-completions").__name__ == "LocalCompletionsAPI"
import aiohttp, requests, tenacity  # of its API extra
matplotlib.figure.Figure().savefig("plot.svg")
""",
    "ray": """
import ray
print(ray.__version__)
""",
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


def _empty(folder: Path) -> Path:
    """The Python of a new environment that has nothing but pip."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    return folder / "bin" / "python"


def _run(*command: str | Path, cwd: Path, **variables: str) -> str:
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env={**pip_environment(), **variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


@pytest.mark.parametrize("extra", CLAIMS)
def test_extras_work_in_an_empty_environment(extra: str, wheel: Path, tmp_path: Path) -> None:
    python = _empty(tmp_path / "environment")
    _run(python, "-m", "pip", "install", f"{wheel}[{extra}]", cwd=tmp_path)
    _run(python, "-c", CLAIMS[extra], cwd=tmp_path)
    _run(python, "-m", "pip", "check", cwd=tmp_path)
    command = python.with_name("simple-offload")
    assert "simple-offload " in _run(command, "--version", cwd=tmp_path)
    listed = json.loads(_run(python, "-m", "pip", "list", "--format=json", cwd=tmp_path))
    found = {canonical(each["name"]): each["version"] for each in listed}
    _check_requirements(extra, found)


@pytest.mark.parametrize("extra", ["cpu", "cuda", "npu"])
def test_extras_resolve(extra: str, wheel: Path, tmp_path: Path) -> None:
    """pip finds the packages and the device's torch, built for this machine. The CPU's extra does
    not name torch, so pip needs the address of that build."""
    python = _empty(tmp_path / "environment")
    nothing = tmp_path / "nothing"
    nothing.mkdir()
    report = tmp_path / "report.json"
    what: list[str | Path] = [
        "--dry-run",
        "--only-binary=:all:",
        "--report",
        report,
        f"{wheel}[{extra}]",
    ]
    own = {} if extra == "cpu" else {"PIP_FIND_LINKS": str(nothing)}
    _run(python, "-m", "pip", "install", *what, cwd=tmp_path, **own)
    installed: list[dict[str, Any]] = json.loads(report.read_text())["install"]
    found = {canonical(each["metadata"]["name"]): each["metadata"]["version"] for each in installed}
    files = {
        canonical(each["metadata"]["name"]): each["download_info"]["url"].rpartition("/")[2]
        for each in installed
    }
    _check_requirements(extra, found)
    machine = os.uname().machine
    brought = [Requirement(text).name for text in EXTRAS[extra]]
    assert all(f"{machine}.whl" in files[canonical(name)] for name in brought), files
    torch = Version(found["torch"])
    if extra == "npu":
        assert Version(found["torch-npu"]).release[:2] == torch.release[:2]
    else:
        brings_cuda = any(name.startswith("nvidia-") for name in found)
        assert (torch.local == "cpu", brings_cuda) == (extra == "cpu", extra == "cuda")


def _check_requirements(extra: str, found: Mapping[str, str]) -> None:
    """The named packages are resolved, in versions that the extra accepts."""
    for text in EXTRAS[extra]:
        requirement = Requirement(text)
        version = found[canonical(requirement.name)]
        assert requirement.specifier.contains(version), f"{text}: {version}"
