"""vLLM 0.33 for a machine that has the CPU build of 0.32: its Python files, with 0.32's operators.

No CPU build of 0.33 is published, and the compiled modules in its wheel are for CUDA. Its Python
files run on the operators of the installed 0.32, which is enough for whole engines.
"""

import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from tools.set_up import ROOT, canonical, exclusive_lock, pip_environment

VERSION = "0.33.0"
FOLDER = ROOT / ".cache" / f"vllm-{VERSION}-python"
DOWNLOAD_SECONDS = 780


class UnavailableError(Exception):
    """The wheel could not be had; the message says why and what to do."""


def fetch(folder: Path = FOLDER) -> Path:
    """Return `folder`, which has the package `vllm` without its compiled modules, and its metadata.

    The first call downloads the wheel (340 MB) and keeps 60 MB of it; later calls return at once.
    The folder appears in one piece, so an interrupted call leaves nothing to mistake for it.
    Raises UnavailableError.
    """
    if folder.is_dir():
        return folder
    with exclusive_lock(folder.with_name(f"{folder.name}.lock")):
        if folder.is_dir():
            return folder
        prefix = f"{folder.name}.tmp-"
        for leftover in folder.parent.glob(f"{prefix}*"):
            shutil.rmtree(leftover)
        with tempfile.TemporaryDirectory(prefix=prefix, dir=folder.parent) as scratch:
            extracted = Path(scratch) / "extracted"
            _extract(_download(Path(scratch)), extracted)
            extracted.replace(folder)
    return folder


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


def _download(into: Path) -> Path:
    command = [
        *(sys.executable, "-m", "pip", "download", f"vllm=={VERSION}", "--dest", str(into)),
        *("--no-deps", "--only-binary=:all:", "--retries", "2"),
    ]
    try:
        done = subprocess.run(
            command,
            env=pip_environment(),
            check=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=DOWNLOAD_SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise UnavailableError(
            f"vllm {VERSION} did not arrive within {DOWNLOAD_SECONDS} s (340 MB, by pip)."
        ) from None
    if done.returncode:
        raise UnavailableError(
            f"These tests run on the Python files of vllm {VERSION}, and pip could not download "
            f"its wheel (340 MB, once). Give pip an index or a find-links folder that has it, or "
            f"leave these tests out: make test ARGS='--ignore=tests/vllm_0_33'.\n\n"
            f"{' '.join(command)}\n{done.stdout}"
        )
    return next(wheel for wheel in into.glob("*.whl") if canonical(wheel.name).startswith("vllm-"))


def _extract(wheel: Path, folder: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.endswith((".py", ".json")) or f"vllm-{VERSION}.dist-info/" in name:
                archive.extract(name, folder)
