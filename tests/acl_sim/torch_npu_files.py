"""The real torch_npu, unpacked beside the environment and not installed into it: where it is
installed, and CANN is not, even `import torch` fails."""

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from tools.set_up import ROOT, canonical, exclusive_lock, pip_environment

VERSION = "2.13.0"
FOLDER = ROOT / ".cache" / f"torch-npu-{VERSION}"
DOWNLOAD_SECONDS = 300


class UnavailableError(Exception):
    """The wheel could not be had; the message says why and what to do."""


def fetch(folder: Path = FOLDER) -> Path:
    """Return `folder`, which has the unpacked wheel.

    The first call downloads the wheel (44 MB; 126 MB unpacked); later calls return at once. The
    folder appears in one piece, so an interrupted call leaves nothing to mistake for it.
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
            with zipfile.ZipFile(_download(Path(scratch))) as archive:
                archive.extractall(extracted)
            extracted.replace(folder)
    return folder


def _download(into: Path) -> Path:
    command = [
        *(sys.executable, "-m", "pip", "download", f"torch-npu=={VERSION}", "--dest", str(into)),
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
            f"torch_npu {VERSION} did not arrive within {DOWNLOAD_SECONDS} s (44 MB, by pip)."
        ) from None
    if done.returncode:
        raise UnavailableError(
            f"These tests run on torch_npu {VERSION}, and pip could not download its wheel "
            f"(44 MB, once). Give pip an index or a find-links folder that has it, or leave "
            f"these tests out: make test ARGS='--deselect tests/backends/test_npu.py'.\n\n"
            f"{' '.join(command)}\n{done.stdout}"
        )
    return next(
        wheel for wheel in into.glob("*.whl") if canonical(wheel.name).startswith("torch-npu-")
    )
