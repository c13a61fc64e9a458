"""Wheels and source packages that tests read from without installing them: downloaded once, kept
under `.cache/`."""

import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tools.set_up import ROOT, exclusive_lock, pip_environment

CACHE = ROOT / ".cache"


class UnavailableError(Exception):
    """The package could not be downloaded; the message has the reason and the remedy."""


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
    with_required: bool = False
    """Whether the packages that it requires are downloaded, and extracted to the same folder."""

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
                    for package in self._download(Path(scratch)):
                        self._extract(package, extracted)
                    extracted.replace(self.folder)
        return self.folder

    def _extract(self, package: Path, into: Path) -> None:
        with zipfile.ZipFile(package) as archive:
            archive.extractall(into, [name for name in archive.namelist() if self.needed(name)])

    def _download(self, into: Path) -> list[Path]:
        self._pip_download(into, ["--only-binary=:all:"], {})
        return sorted(into.glob("*.whl"))

    def _pip_download(self, into: Path, options: list[str], variables: dict[str, str]) -> None:
        wanted = f"{self.distribution}=={self.version}"
        command = [
            *(sys.executable, "-m", "pip", "download", wanted, "--dest", str(into)),
            *("--retries", "2", *options, *([] if self.with_required else ["--no-deps"])),
        ]
        done = subprocess.run(
            command,
            env=pip_environment() | variables,
            check=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=self.download_seconds,
        )
        if done.returncode:
            raise UnavailableError(
                f"These tests run on files of {wanted}, and pip could not download them "
                f"({self.download_mb} MB, once). Give pip an index or a find-links folder that has "
                f"it, or leave these tests out: make test ARGS='{self.without}'.\n\n"
                f"{' '.join(command)}\n{done.stdout}"
            )


_NO_BUILD = """
from email.parser import Parser
from pathlib import Path

def prepare_metadata_for_build_wheel(folder, config_settings=None):
    text = Path("PKG-INFO").read_text()
    known = Parser().parsestr(text)
    made = Path(folder, f"{known['Name'].replace('-', '_')}-{known['Version']}.dist-info")
    made.mkdir()
    (made / "METADATA").write_text(text)
    return made.name
"""
"""A build backend that builds nothing. pip asks for a source package's metadata before it keeps the
file, and vllm-ascend's own backend needs torch_npu and CANN."""


class SourcePackage(Wheel):
    """A release without a wheel. Paths are those below the package's only folder."""

    def _extract(self, package: Path, into: Path) -> None:
        with tarfile.open(package) as archive:
            archive.extraction_filter = getattr(tarfile, "data_filter", None)  # Python 3.11.4
            for member in archive.getmembers():
                _, _, member.name = member.name.partition("/")
                if member.isfile() and self.needed(member.name):
                    archive.extract(member, into)

    def _download(self, into: Path) -> list[Path]:
        backend = into / "backend" / "setuptools"
        backend.mkdir(parents=True)
        (backend / "__init__.py").touch()
        (backend / "build_meta.py").write_text(_NO_BUILD)
        options = ["--no-binary=:all:", "--no-build-isolation"]
        self._pip_download(into, options, {"PYTHONPATH": str(backend.parent)})
        return list(into.glob("*.tar.gz"))
