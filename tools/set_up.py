#!/usr/bin/env python3.11
"""Makes `.venv` hold exactly the packages of constraints.txt, and this package in editable mode.
With the argument `eval`, makes `.venv-eval` hold those of constraints-eval.txt: lm_eval, which
talks to vLLM over HTTP and whose many packages need not agree with vLLM's.

Standard library only, so that a bare Python 3.11 can run it. When nothing changed since the last
time it returns at once; when a pin or the project's metadata changed it brings `.venv` up to date
(packages that are no longer pinned are removed); when an earlier run was killed half-way, or the
repository was moved, it begins anew. Only one set-up works on a `.venv` at a time: a second waits.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent
PYTORCH_INDEX = "https://download.pytorch.org/whl/cpu"

# vLLM's CPU build asks for these three, but the builds that pip finds by default belong to CUDA
# torch; beside CPU torch they break `import transformers` (operator torchvision::nms does not
# exist). Text models need none of them.
FORBIDDEN = ("torchaudio", "torchcodec", "torchvision")

# lm_eval asks for these, and they are published as source only.
SOURCE_ONLY = ("rouge-score", "sqlitedict", "word2number")


@dataclass(frozen=True)
class Kind:
    """One of the environments that are made here."""

    folder: str
    constraints: str
    free_bytes_needed: int
    """What is installed, and downloads on their way in."""
    cost: str
    holds_project: bool


MAIN = Kind(".venv", "constraints.txt", 6 * 2**30, "fetches about 1 GB and unpacks 4 GB", True)
EVAL = Kind(
    ".venv-eval", "constraints-eval.txt", 2 * 2**30, "fetches 200 MB and unpacks 800 MB", False
)
KINDS = {"main": MAIN, "eval": EVAL}


class SetUpError(Exception):
    """What went wrong and what to do about it, in words for the person at the terminal."""


class PipError(SetUpError):
    """pip ended with an error; the message is the end of what it said."""


def canonical(name: str) -> str:
    """The one spelling of a distribution's name, by which two names are compared."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read_pins(constraints: Path) -> dict[str, str]:
    """Name -> version of every pin, whichever platform its marker is for."""
    pins = {}
    for line in constraints.read_text(encoding="utf-8").splitlines():
        pin = line.partition("#")[0].partition(";")[0].strip()
        if pin:
            name, equals, version = pin.partition("==")
            if not equals:
                raise SetUpError(f"{constraints.name}: {line!r} does not read name==version")
            pins[canonical(name)] = version
    return pins


@contextlib.contextmanager
def exclusive_lock(path: Path) -> Iterator[int]:
    """Hold `path` as a lock; yields a descriptor that child processes may inherit.

    A child that inherits it keeps the lock for as long as it lives, so a pip that outlives its
    killed parent is still alone.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another set-up, which holds {path}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file.fileno()


def say(text: str) -> None:
    print(f"set-up: {text}", file=sys.stderr, flush=True)


# What pip says when nothing is wrong; of no use in an error message.
_ROUTINE = re.compile(
    r"^\s*(Collecting|Downloading|Using cached|Processing|Looking in|Requirement already satisfied)"
    r"|is ignored: it is neither a file nor a directory"
)


class Pip:
    """The pip of one virtual environment; its output goes to a log and drives a progress line."""

    def __init__(self, python: Path, log: Path, lock: int) -> None:
        self.python, self.log, self.lock = python, log, lock

    def __call__(self, *arguments: str, expected: int = 0) -> None:
        """Run `pip arguments...`; `expected` is the number of packages, for the progress line.

        Raises PipError when pip fails.
        """
        command = [str(self.python), "-I", "-m", "pip", *arguments]
        tail: list[str] = []
        collected = 0
        with (
            self.log.open("a", encoding="utf-8") as log,
            subprocess.Popen(
                command,
                cwd=ROOT,
                env=pip_environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                pass_fds=[self.lock],
            ) as process,
        ):
            assert process.stdout is not None
            log.write(f"$ {' '.join(command)}\n")
            for line in process.stdout:
                log.write(line)
                if line.startswith(("Collecting", "Requirement already satisfied")):
                    collected += 1
                    _progress(f"{collected}/{expected} {line.split()[-1]}" if expected else "")
                elif line.startswith("Installing collected packages"):
                    _progress("unpacking; with many packages this takes a minute")
                if not _ROUTINE.search(line):
                    tail = [
                        *tail[-24:],
                        line if len(line) < 400 else f"{line[:200]} ... {line[-150:]}",
                    ]
        _progress("")
        if process.returncode:
            raise PipError("".join(tail).strip())

    def installed(self) -> set[str]:
        """Canonical names of the distributions in the environment."""
        command = [str(self.python), "-I", "-m", "pip", "list", "--format=json"]
        listed = subprocess.run(
            command, env=pip_environment(), check=True, capture_output=True, text=True
        )
        return {canonical(package["name"]) for package in json.loads(listed.stdout)}


def pip_environment() -> dict[str, str]:
    """The caller's variables (index and proxy settings stay) less what leads pip elsewhere."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    for name in ("PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_REQUIREMENT", "PIP_CONSTRAINT"):
        environment.pop(name, None)
    return environment | {
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_NO_INPUT": "1",
        "PIP_PROGRESS_BAR": "off",
        "PIP_USER": "0",
    }


def _progress(text: str) -> None:
    """Rewrite the terminal's last line; nothing where stderr is no terminal."""
    if sys.stderr.isatty():
        width = shutil.get_terminal_size().columns - 1
        print(f"\r\x1b[K{text[:width]}", end="", file=sys.stderr, flush=True)


class VirtualEnvironment:
    """`.venv` or its like under `root`, with a record in it of what was installed."""

    def __init__(self, root: Path, kind: Kind = MAIN) -> None:
        self.root = root
        self.kind = kind
        self.folder = root / kind.folder
        self.constraints = root / kind.constraints
        self.python = self.folder / "bin" / "python"
        self._record = self.folder / "set-up.json"

    def wanted(self) -> str:
        """Digest of everything that decides what has to be installed."""
        pins = self.constraints.read_text(encoding="utf-8")
        if not self.kind.holds_project:
            return hashlib.sha256(pins.encode()).hexdigest()
        project = tomllib.loads((self.root / "pyproject.toml").read_text(encoding="utf-8"))
        parts = {
            "pins": pins,
            "build": project["build-system"],
            "project": project["project"],
            "hatch": project["tool"]["hatch"],
            "version": re.findall(
                r"^__version__ = .*",
                (self.root / "simple_offload" / "__init__.py").read_text(encoding="utf-8"),
                re.MULTILINE,
            ),
        }
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def state(self) -> dict[str, str]:
        """The record: where it was made, and the digest installed or `busy`; empty without one."""
        try:
            state: dict[str, str] = json.loads(self._record.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return state

    def note(self, installed: str) -> None:
        """Write the record in one piece."""
        new = self._record.with_suffix(".new")
        new.write_text(json.dumps({"root": str(self.root), "installed": installed}))
        new.replace(self._record)

    def is_current(self) -> bool:
        """Whether nothing has to be done."""
        state = self.state()
        return (
            state.get("root") == str(self.root)
            and os.access(self.python, os.X_OK)
            and state.get("installed") == self.wanted()
        )

    def is_usable(self) -> bool:
        """Whether it can be brought up to date where it stands."""
        state = self.state()
        return (
            state.get("root") == str(self.root)
            and os.access(self.python, os.X_OK)
            and state.get("installed") != "busy"
        )

    def create(self) -> None:
        """An empty environment with pip; one that an earlier set-up left is removed first."""
        if self.folder.exists() and any(self.folder.iterdir()) and not self.state():
            raise SetUpError(
                f"{self.folder} exists and was not made by this script, which would have to empty "
                "it. Move it away or remove it, then run again."
            )
        free = shutil.disk_usage(self.root).free
        if free < self.kind.free_bytes_needed:
            raise SetUpError(
                f"{self.root} has {free / 2**30:.1f} GiB of free disk space; "
                f"the environment needs {self.kind.free_bytes_needed / 2**30:.0f} GiB."
            )
        if not all(importlib.util.find_spec(module) for module in ("venv", "ensurepip")):
            raise SetUpError(
                f"{sys.executable} cannot make virtual environments: its venv or ensurepip module "
                "is missing.\nOn Debian and Ubuntu: apt install python3.11-venv"
            )
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.note("busy")
        made = subprocess.run(
            [sys.executable, "-I", "-m", "venv", str(self.folder)],
            check=False,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        if made.returncode:
            raise SetUpError(f"python -m venv {self.folder} failed:\n{made.stdout}{made.stderr}")


def check_machine() -> None:
    """Raise SetUpError where the pins cannot be installed."""
    if sys.version_info[:2] != (3, 11):
        raise SetUpError(
            f"{sys.executable} is Python {platform.python_version()}. The pinned packages of the "
            "development environment are for Python 3.11: install it, or name one with "
            "`make PYTHON=/path/to/python3.11 ...`."
        )
    machine = platform.machine()
    if sys.platform != "linux" or machine not in ("x86_64", "aarch64"):
        raise SetUpError(
            f"This is {platform.system()} on {machine}. vLLM's CPU build is pinned as a wheel, and "
            "wheels exist for Linux on x86_64 and aarch64 only: use such a machine or a container."
        )
    libc, version = platform.libc_ver()
    if libc != "glibc" or tuple(map(int, version.split(".")[:2])) < (2, 28):
        raise SetUpError(
            f"The C library here is {libc or 'not glibc'} {version}. The wheels of torch and vLLM "
            "need glibc 2.28 or newer (Debian 10, Ubuntu 20.04, RHEL 8 or later; not Alpine)."
        )


def install_torch(pip: Pip, version: str) -> None:
    """Install CPU torch from where pip looks by itself, else from PyTorch's own CPU index."""
    wheel = ("install", "--no-deps", "--only-binary=:all:", f"torch=={version}")
    say(f"torch {version}")
    try:
        pip(*wheel)
        return
    except PipError as error:
        first = error
    say(f"no index or folder that pip is configured with gave it; trying {PYTORCH_INDEX}")
    try:
        pip(*wheel, "--index-url", PYTORCH_INDEX, "--retries", "1", "--timeout", "30")
    except PipError as second:
        raise SetUpError(
            f"torch {version} (PyTorch's CPU build) was found nowhere: neither where pip is "
            f"configured to look, nor at {PYTORCH_INDEX}.\nGive this machine access to one of "
            "them, or put the wheel into a folder and run again with "
            "PIP_FIND_LINKS=/that/folder in the environment.\n\n"
            f"The configured places:\n{_indent(str(first))}\n\n"
            f"PyTorch's index:\n{_indent(str(second))}"
        ) from None


def _indent(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())


def install(environment: VirtualEnvironment, pip: Pip) -> None:
    """Make the packages in `environment` those of constraints.txt, and add this project."""
    constraints = environment.constraints
    pins = read_pins(constraints)
    if not environment.kind.holds_project:
        install_lm_eval(pip, pins)
        return
    install_torch(pip, pins["torch"])
    say(f"{len(pins)} pinned packages")
    pip(
        *("install", "--no-deps", "--only-binary=:all:", "-r", str(constraints)),
        expected=len(pins),
    )
    uninstall_all_but(pip, {*pins, "setuptools", "simple-offload"})
    say("simple_offload, editable")
    pip("install", "--no-deps", "--no-build-isolation", "--no-index", "-e", str(environment.root))


def install_lm_eval(pip: Pip, pins: dict[str, str]) -> None:
    """Make the packages those of `pins`. What is there as source only is built with the pinned
    setuptools."""
    lines = {name: f"{name}=={version}" for name, version in pins.items()}
    sources = [lines.pop(name) for name in SOURCE_ONLY]
    say(f"{len(pins)} pinned packages")
    pip("install", "--no-deps", "--only-binary=:all:", *lines.values(), expected=len(lines))
    pip("install", "--no-deps", "--no-build-isolation", *sources, expected=len(sources))
    uninstall_all_but(pip, set(pins))


def uninstall_all_but(pip: Pip, kept: set[str]) -> None:
    leftover = pip.installed() - kept - {"pip"}
    if leftover:
        say(f"removing what is not pinned: {', '.join(sorted(leftover))}")
        pip("uninstall", "--yes", *sorted(leftover))


def set_up(root: Path = ROOT, kind: Kind = MAIN) -> None:
    """Bring `kind` under `root` up to date. Raises SetUpError with what to do about it."""
    environment = VirtualEnvironment(root, kind)
    if environment.is_current():
        return
    check_machine()
    with exclusive_lock(root / f"{kind.folder}.lock") as lock:
        if environment.is_current():
            return
        begin = time.monotonic()
        wanted = environment.wanted()
        if not environment.is_usable():
            say(f"making {environment.folder} with {sys.executable}")
            say(f"once, it {kind.cost}")
            environment.create()
        environment.note("busy")  # stays there if this process is killed
        log = environment.folder / "set-up.log"
        log.unlink(missing_ok=True)
        try:
            install(environment, Pip(environment.python, log, lock))
        except PipError as error:
            environment.note("incomplete")
            raise SetUpError(f"pip failed (all it said: {log}):\n{_indent(str(error))}") from None
        except SetUpError:
            environment.note("incomplete")
            raise
        environment.note(wanted)
        say(f"done in {time.monotonic() - begin:.0f} s")


def main(arguments: Sequence[str]) -> NoReturn:
    """Command line: which environment; exit status 0, or 1 with a message."""
    kind = KINDS.get(arguments[0] if arguments else "main")
    if kind is None or len(arguments) > 1:
        sys.exit(f"usage: set_up.py [{'|'.join(KINDS)}]\n\n{__doc__}")
    try:
        set_up(kind=kind)
    except SetUpError as error:
        sys.exit(f"set-up: {error}")
    except KeyboardInterrupt:
        sys.exit("\nset-up: interrupted; the next run begins anew")
    sys.exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
