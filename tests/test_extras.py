"""The versions that pip resolves for the extras. tests/docs/ installs and uses ``bench``."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests.test_packaging import EXTRAS, build_wheel
from tools.set_up import canonical, pip_environment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.mark.parametrize("extra", ["bench", "cpu", "cuda", "npu", "ray"])
def test_extras_resolve(extra: str, wheel: Path, tmp_path: Path) -> None:
    """pip finds the packages and the device's torch, built for this machine. The CPU's extra does
    not name torch, so pip needs the address of that build."""
    environment, report = tmp_path / "environment", tmp_path / "report.json"
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
    install = [str(environment / "bin" / "python"), "-m", "pip", "install", "--dry-run"]
    own = {} if extra == "cpu" else {"PIP_FIND_LINKS": str(environment)}  # none there
    done = subprocess.run(
        [*install, "--only-binary=:all:", "--report", str(report), f"{wheel}[{extra}]"],
        cwd=tmp_path,
        env=pip_environment() | own,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    installed: list[dict[str, Any]] = json.loads(report.read_text())["install"]
    found = {canonical(each["metadata"]["name"]): each["metadata"]["version"] for each in installed}
    for text in EXTRAS[extra]:
        requirement = Requirement(text)
        version = found[canonical(requirement.name)]
        assert requirement.specifier.contains(version), f"{text}: {version}"
    if extra in ("bench", "ray"):
        return
    urls = {canonical(each["metadata"]["name"]): each["download_info"]["url"] for each in installed}
    brought = [canonical(Requirement(text).name) for text in EXTRAS[extra]]
    assert all(urls[name].endswith(f"{os.uname().machine}.whl") for name in brought), urls
    torch = Version(found["torch"])
    if extra == "npu":
        assert Version(found["torch-npu"]).release[:2] == torch.release[:2]
    else:
        brings_cuda = any(name.startswith("nvidia-") for name in found)
        assert (torch.local == "cpu", brings_cuda) == (extra == "cpu", extra == "cuda")
