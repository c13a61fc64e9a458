"""Running what the documentation shows, as a reader's shell would."""

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from tests.docs.ways import Run
from tools.set_up import ROOT, pip_environment

IN_THE_CHECKOUT = ("make", "pip", ".venv/bin/python")
"""What is run in the checkout. All else is run in an empty folder, where it leaves its output."""

_VLLM = '#!/bin/sh\nexec "{python}" -m examples.vllm_command "$@"\n'
_STOP_SECONDS = 60.0


def as_run(words: Sequence[str], way: Run, places: Mapping[str, str]) -> list[str]:
    """The words of a command with the changes that ``way`` says. ``places``: for ``{...}``.

    AssertionError where something is to be replaced that is not shown."""
    changed = list(words)
    for shown, instead in way.instead.items():
        assert any(shown in word for word in changed), f"{shown} is not in {' '.join(words)}"
        changed = [word.replace(shown, instead.format(**places)) for word in changed]
    return [*changed, *(word.format(**places) for word in shlex.split(way.add))]


def reader_environment(folder: Path, *first: Path) -> dict[str, str]:
    """Variables of a reader who has activated this environment and knows nothing of tests:
    `python3`, `simple-offload` and `vllm` are found. ``first``: folders of programs that come
    before those. ``folder`` gets what is made for it."""
    tools = folder / "tools"
    tools.mkdir(exist_ok=True)
    # The CPU build's own `vllm` stops over the build's name.
    (tools / "vllm").write_text(_VLLM.format(python=sys.executable))
    (tools / "vllm").chmod(0o755)
    # What `make test ARGS=...` was told is not meant for a make that a test runs.
    makefile = (ROOT / "Makefile").read_text()
    told = {"MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES"}
    told |= set(re.findall(r"^(\w+) \?=", makefile, re.MULTILINE)) - {"PYTHON"}
    environment = {key: value for key, value in pip_environment().items() if key not in told}
    path = [*map(str, first), str(tools), str(Path(sys.executable).parent), os.environ["PATH"]]
    return environment | {
        "PATH": os.pathsep.join(path),
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }


def start(
    words: Sequence[str], folder: Path, environment: Mapping[str, str], log: Path
) -> "subprocess.Popen[bytes]":
    """Start a command in ``folder``, or in the checkout where it belongs there; what it says goes
    to ``log``."""
    in_checkout = words[0] in IN_THE_CHECKOUT
    program = str(ROOT / words[0]) if words[0].startswith(".venv/") else words[0]
    with log.open("wb") as output:
        return subprocess.Popen(
            [program, *words[1:]],
            cwd=ROOT if in_checkout else folder,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            # Started in the background by a shell, the tests themselves ignore SIGINT.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509 - no lock taken
        )


def stop(process: "subprocess.Popen[bytes]", number: signal.Signals = signal.SIGTERM) -> int:
    """End a command that may still run, as Ctrl-C or a service manager would; its exit code."""
    try:
        if process.poll() is None:
            process.send_signal(number)
        return process.wait(_STOP_SECONDS)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def run(words: Sequence[str], folder: Path, environment: Mapping[str, str]) -> tuple[int, str]:
    """The exit code of a command, and what it said. However this returns, it has ended."""
    log = folder / "said.log"
    process = start(words, folder, environment, log)
    try:
        process.wait()
    finally:
        code = stop(process)
    return code, log.read_text(errors="replace")


def empty_environment(folder: Path) -> Path:
    """Make a virtual environment that has nothing but pip; the folder of its programs."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    return folder / "bin"
