#!/usr/bin/env python3.11
"""Makes `.venv` hold exactly the packages of constraints.txt, and this package in editable mode.
With the argument `eval`, makes `.venv-eval` hold those of constraints-eval.txt: lm_eval, which
talks to vLLM over HTTP and whose many packages need not agree with vLLM's.

Needs only Python 3.11 and pip's configuration. Returns at once when nothing has changed. A changed
pin updates the environment in place; a killed run or a moved repository makes it anew. A second
run waits for the first.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent
PYTORCH_INDEX = "https://download.pytorch.org/whl/cpu"

BUSY = "busy"
"""In the record while a run works on an environment; remains if the run is killed."""


class SetUpError(Exception):
    """The set-up cannot go on; the message says why and what to do."""


def canonical(name: str) -> str:
    """The normalized name of a distribution (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read_pins(constraints: Path) -> dict[str, str]:
    """Canonical name -> version of every pin, for any platform. Options of pip are skipped."""
    pins = re.findall(
        r"^([\w.-]+)==([^\s;]+)", constraints.read_text(encoding="utf-8"), re.MULTILINE
    )
    return {canonical(name): version for name, version in pins}


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


class VirtualEnvironment:
    """`.venv` under `root`, or `.venv-eval`, with a record of its contents in set-up.json."""

    def __init__(self, root: Path, suffix: str = "") -> None:
        self.root = root
        self.constraints = root / f"constraints{suffix}.txt"
        self.folder = root / f".venv{suffix}"
        self.python = self.folder / "bin" / "python"
        self._has_project = not suffix
        self._record = self.folder / "set-up.json"

    def wanted(self) -> str:
        """Digest of everything that decides what has to be installed."""
        parts = [self.constraints.read_text(encoding="utf-8")]
        if self._has_project:
            project = tomllib.loads((self.root / "pyproject.toml").read_text(encoding="utf-8"))
            init = (self.root / "simple_offload" / "__init__.py").read_text(encoding="utf-8")
            parts += re.findall(r"^__version__ = .*", init, re.MULTILINE)
            built = [project["build-system"], project["project"], project["tool"]["hatch"]]
            parts.append(json.dumps(built))
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    def installed(self) -> str:
        """The digest that was installed; BUSY if the environment has to be made anew."""
        try:
            record = json.loads(self._record.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return BUSY
        usable = record["root"] == str(self.root) and os.access(self.python, os.X_OK)
        return str(record["installed"]) if usable else BUSY

    def note(self, installed: str) -> None:
        """Write the record in one piece."""
        new = self._record.with_suffix(".new")
        new.write_text(json.dumps({"root": str(self.root), "installed": installed}))
        new.replace(self._record)

    def create(self) -> None:
        """Make it anew, with pip alone. Raises SetUpError for a folder that is not from here."""
        self.folder.mkdir(exist_ok=True)
        found = set(self.folder.iterdir())
        if self.folder.is_symlink() or (found and self._record not in found):
            raise SetUpError(
                f"{self.folder} was not made by this script. Remove it or move it away, then run "
                "again."
            )
        self.note(BUSY)  # the record is never absent, so that an interrupted run is recognized
        for path in found - {self._record}:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        subprocess.run([sys.executable, "-I", "-m", "venv", str(self.folder)], check=True)

    def install(self, pip: Callable[..., None]) -> None:
        """Install every pin, remove all other packages, and add this project to `.venv`."""
        pins = read_pins(self.constraints)
        if "torch" in pins:
            install_torch(pip, pins["torch"])
        # It builds the packages that are published as source only.
        pip("install", "--no-deps", "--only-binary=:all:", f"setuptools=={pins['setuptools']}")
        pip("install", "--no-deps", "--no-build-isolation", "-r", str(self.constraints))
        site_packages = [str(path) for path in self.folder.glob("lib/python3.*/site-packages")]
        found = {canonical(d.name) for d in importlib.metadata.distributions(path=site_packages)}
        if leftover := sorted(found - pins.keys() - {"pip", "simple-offload"}):
            pip("uninstall", "--yes", *leftover)
        if self._has_project:
            pip("install", "--no-deps", "--no-build-isolation", "--no-index", "-e", str(self.root))


def install_torch(pip: Callable[..., None], version: str) -> None:
    """Install CPU torch from where pip is configured to look, else from PyTorch's CPU index."""
    wheel = ("install", "--no-deps", "--only-binary=:all:", f"torch=={version}")
    try:
        pip(*wheel)
    except subprocess.CalledProcessError:
        say(f"pip's own configuration leads to no torch {version}; trying {PYTORCH_INDEX}")
        pip(*wheel, "--index-url", PYTORCH_INDEX)


def set_up(environment: VirtualEnvironment) -> None:
    """Bring `environment` up to date. Raises SetUpError, or CalledProcessError after pip has
    printed why."""
    if environment.installed() == environment.wanted():
        return
    with exclusive_lock(environment.folder.with_name(f"{environment.folder.name}.lock")) as lock:
        wanted = environment.wanted()
        if environment.installed() == wanted:
            return
        say(f"installing {environment.constraints} (takes minutes the first time)")
        if environment.installed() == BUSY:
            environment.create()
        environment.note(BUSY)  # remains if this process is killed

        def pip(*arguments: str) -> None:
            command = [str(environment.python), "-I", "-m", "pip", "-qq", *arguments]
            variables = pip_environment()
            subprocess.run(
                command, env=variables, check=True, stdin=subprocess.DEVNULL, pass_fds=[lock]
            )

        try:
            environment.install(pip)
        except subprocess.CalledProcessError:
            environment.note("incomplete")
            raise
        environment.note(wanted)


def main(arguments: Sequence[str]) -> NoReturn:
    """Exit with 0, or with 1 and a message."""
    if list(arguments) not in ([], ["eval"]):
        sys.exit(f"usage: set_up.py [eval]\n\n{__doc__}")
    try:
        set_up(VirtualEnvironment(ROOT, "-eval" if arguments else ""))
    except (SetUpError, subprocess.CalledProcessError) as error:
        sys.exit(f"set-up: {error}")
    except KeyboardInterrupt:
        sys.exit("\nset-up: interrupted; the next run begins anew")
    sys.exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
