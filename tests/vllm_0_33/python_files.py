"""vLLM 0.33 on a machine with the CPU build of 0.32: its Python files with the operators of 0.32.

No CPU build of 0.33 is published, and the compiled modules in its wheel are for CUDA. Whole engines
run with its Python files and the operators of the installed 0.32.
"""

import importlib.util
import shutil
from pathlib import Path

from tests.wheels import CACHE, UnavailableError, Wheel

VERSION = "0.33.0"
DOWNLOAD_SECONDS = 780


def _needed(file: str) -> bool:
    """Whether a file of the wheel is needed: 60 MB are, without compiled modules."""
    return file.endswith((".py", ".json")) or f"vllm-{VERSION}.dist-info/" in file


WHEEL = Wheel(
    "vllm",
    VERSION,
    CACHE / f"vllm-{VERSION}-python",
    download_mb=340,
    download_seconds=DOWNLOAD_SECONDS,
    without="--ignore=tests/vllm_0_33",
    needed=_needed,
)
fetch = WHEEL.fetch

__all__ = ["CACHE", "DOWNLOAD_SECONDS", "VERSION", "UnavailableError", "fetch", "with_operators"]


def with_operators(python_files: Path, folder: Path) -> Path:
    """Fill `folder` with a copy of `python_files` and links to the installed vLLM's operators."""
    shutil.copytree(python_files, folder)
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    installed = Path(spec.origin).parent
    for module in installed.glob("*.so"):
        (folder / "vllm" / module.name).symlink_to(module)
    return folder
