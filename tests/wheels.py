"""Wheels that tests read from without installing them: downloaded once, kept under `.cache/`."""

import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tools.set_up import ROOT, exclusive_lock, pip_environment

CACHE = ROOT / ".cache"


class UnavailableError(Exception):
    """The wheel could not be downloaded; the message has the reason and the remedy."""


@dataclass(frozen=True)
class Wheel:
    """One release of a distribution, and the selection of its files."""

    distribution: str
    version: str
    folder: Path
    """The folder for its files; best below ``CACHE``."""
    download_mb: int
    download_seconds: int
    """Time limit of the download, in seconds."""
    without: str
    """Arguments with which `make test` skips the tests that need the wheel."""
    needed: Callable[[str], bool] = lambda _: True
    """Whether a file is kept, by its path in the wheel."""

    def fetch(self) -> Path:
        """Return the folder with the files.

        The first call downloads the wheel; later calls return at once. The folder appears with all
        files at once, so an interrupted call leaves no incomplete folder. Raises UnavailableError.
        """
        if self.folder.is_dir():
            return self.folder
        parent, name = self.folder.parent, self.folder.name
        with exclusive_lock(parent / f"{name}.lock"):
            if not self.folder.is_dir():
                with tempfile.TemporaryDirectory(prefix=f"{name}.tmp-", dir=parent) as scratch:
                    extracted = Path(scratch) / "extracted"
                    with zipfile.ZipFile(self._download(Path(scratch))) as archive:
                        wanted = [name for name in archive.namelist() if self.needed(name)]
                        archive.extractall(extracted, wanted)
                    extracted.replace(self.folder)
        return self.folder

    def _download(self, into: Path) -> Path:
        wanted = f"{self.distribution}=={self.version}"
        command = [
            *(sys.executable, "-m", "pip", "download", wanted, "--dest", str(into)),
            *("--no-deps", "--only-binary=:all:", "--retries", "2"),
        ]
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
        if done.returncode:
            raise UnavailableError(
                f"These tests run on files of {wanted}, and pip could not download its wheel "
                f"({self.download_mb} MB, once). Give pip an index or a find-links folder that has "
                f"it, or leave these tests out: make test ARGS='{self.without}'.\n\n"
                f"{' '.join(command)}\n{done.stdout}"
            )
        (wheel,) = into.glob("*.whl")
        return wheel
