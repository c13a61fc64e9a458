"""The directory that engines have files in."""

import os
import subprocess
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from examples.bench.command import CannotStart


@dataclass(frozen=True)
class Directory:
    """What a directory is on."""

    path: str
    file_system: str
    o_direct: bool
    """Whether vLLM's ``fs`` tier reads and writes it past the page cache."""

    def __str__(self) -> str:
        past = "past" if self.o_direct else "through"
        return f"Files in {self.path}: {self.file_system}, {past} the page cache"


def look_at(path: Path) -> Directory:
    """Raises CannotStart if nothing can be written to ``path``."""
    from vllm.v1.kv_offload.tiering.fs.io import probe_o_direct

    try:
        with tempfile.TemporaryDirectory(dir=path) as folder:
            o_direct = probe_o_direct(folder)
    except OSError as error:
        raise CannotStart(f"--files: cannot write to {path}: {error.strerror}") from None
    command = ["stat", "--file-system", "--format=%T", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return Directory(str(path), done.stdout.strip() or "unknown", o_direct)


def num_bytes(folder: Path) -> int:
    """Of all objects below ``folder``. A file may vanish meanwhile."""
    total = 0
    for path in folder.rglob("*.bin"):
        with suppress(FileNotFoundError):
            total += path.stat().st_size
    return total


def drop_from_page_cache(folder: Path) -> None:
    """The next reads come from the disk. Without effect on tmpfs."""
    for path in folder.rglob("*.bin"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
