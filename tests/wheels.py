"""Wheels that tests read from without installing them: downloaded once, kept under `.cache/`."""

import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tools.set_up import ROOT, canonical, exclusive_lock, pip_environment


class UnavailableError(Exception):
    """The wheel could not be had; the message says why and what to do."""


@dataclass(frozen=True)
class Wheel:
    """One release of a distribution, of which some files are needed."""

    distribution: str
    version: str
    folder: Path
    """Where its files go; best below ``CACHE``."""
    download_mb: int
    download_seconds: int
    """How long the download may take."""
    without: str
    """Arguments of `make test` that leave out the tests that need it."""
    needed: Callable[[str], bool] = lambda _: True
    """Whether a file of the wheel is kept, by its path in there."""

    def fetch(self, folder: Path | None = None) -> Path:
        """Return the folder (its own unless another is given), which has the files.

        The first call downloads the wheel; later calls return at once. The folder appears in one
        piece, so an interrupted call leaves nothing to mistake for it. Raises UnavailableError.
        """
        folder = folder or self.folder
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
                self._extract(self._download(Path(scratch)), extracted)
                extracted.replace(folder)
        return folder

    def _download(self, into: Path) -> Path:
        name = f"{self.distribution} {self.version}"
        command = [
            *(sys.executable, "-m", "pip", "download", f"{self.distribution}=={self.version}"),
            *("--dest", str(into), "--no-deps", "--only-binary=:all:", "--retries", "2"),
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
                timeout=self.download_seconds,
            )
        except subprocess.TimeoutExpired:
            raise UnavailableError(
                f"{name} did not arrive within {self.download_seconds} s "
                f"({self.download_mb} MB, by pip)."
            ) from None
        if done.returncode:
            raise UnavailableError(
                f"These tests run on files of {name}, and pip could not download its wheel "
                f"({self.download_mb} MB, once). Give pip an index or a find-links folder that has "
                f"it, or leave these tests out: make test ARGS='{self.without}'.\n\n"
                f"{' '.join(command)}\n{done.stdout}"
            )
        return next(
            wheel
            for wheel in into.glob("*.whl")
            if canonical(wheel.name).startswith(f"{canonical(self.distribution)}-")
        )

    def _extract(self, wheel: Path, folder: Path) -> None:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder, [name for name in archive.namelist() if self.needed(name)])


CACHE = ROOT / ".cache"
