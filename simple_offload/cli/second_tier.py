"""doctor's check of the second tier: how fast its directory is, and what that pays for."""

import mmap
import os
import shutil
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from simple_offload.cli.checks import Check, error, ok, warning
from simple_offload.config import SecondTierConfig

_FILE_BYTES = 4 << 20
_NUM_FILES = 64
_THREADS = 16
"""As vLLM's fs tier has."""
_KV_BYTES = 128 * 1024
"""Of a token, in Llama 3 8B."""
_SLOW = 1e9


def check_second_tier(config: SecondTierConfig) -> list[Check]:
    """Writes and reads 256 MiB in the directory of the ``fs`` tier, or in the folder that it would
    be made in. Nothing of other tiers."""
    root_dir = config.options.get("root_dir")
    if config.type != "fs" or not isinstance(root_dir, str):
        return [ok("second tier", f"{config.type}, not tried")]
    root = Path(root_dir).absolute()
    while not root.exists():
        root = root.parent
    disk = shutil.disk_usage(root)
    try:
        write_speed, read_speed, kind = _measure(root)
    except OSError as problem:
        return [error("second tier", f"{root}: {problem}", "choose another root_dir")]
    found = (
        f"{root}: reads {read_speed / 1e9:.2f} GB/s, writes {write_speed / 1e9:.2f} ({kind}). With "
        f"128 KiB of KV a token, that brings {read_speed / _KV_BYTES:,.0f} tokens/s: it pays if "
        "computing is slower"
    )
    if config.bytes is not None and config.bytes > disk.total:
        advice = f"bytes={config.bytes} is more than the disk has ({disk.total}): ask for less"
        return [warning("second tier", found, advice)]
    if read_speed < _SLOW:
        return [warning("second tier", found, "computing may be quicker; nothing is fetched then")]
    return [ok("second tier", found)]


def _measure(root: Path) -> tuple[float, float, str]:
    """Bytes per second of writes and reads, and how they go. Raises OSError if the directory cannot
    be used."""
    with (
        tempfile.TemporaryDirectory(prefix=".simple-offload-doctor-", dir=root) as folder,
        ThreadPoolExecutor(_THREADS) as threads,
    ):
        kind, flag = "direct", os.O_DIRECT
        try:
            _write(Path(folder) / "0", flag)
        except OSError:
            kind, flag = "through the page cache", 0
        paths = [Path(folder) / str(index) for index in range(_NUM_FILES)]
        speeds = []
        for act in (_write, _read):
            start = time.perf_counter()
            list(threads.map(act, paths, [flag] * _NUM_FILES))
            speeds.append(_NUM_FILES * _FILE_BYTES / (time.perf_counter() - start))
    return speeds[0], speeds[1], kind


def _write(path: Path, flag: int) -> None:
    descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | flag, 0o600)
    try:
        with mmap.mmap(-1, _FILE_BYTES) as page:
            os.write(descriptor, page)
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read(path: Path, flag: int) -> None:
    descriptor = os.open(path, os.O_RDONLY | flag)
    try:
        with mmap.mmap(-1, _FILE_BYTES) as page:
            os.readv(descriptor, [page])
    finally:
        os.close(descriptor)
