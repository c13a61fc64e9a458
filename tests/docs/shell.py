"""Runs the commands of the documentation in the environment of a reader's shell."""

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
"""Commands that run in the checkout. All others run in an empty folder, with their output."""

_VLLM = '#!/bin/sh\nexec "{python}" -m examples.vllm_command "$@"\n'
_STOP_SECONDS = 60.0


def as_run(words: Sequence[str], way: Run, places: Mapping[str, str]) -> list[str]:
    """The words of a command with the changes of ``way``. ``places``: values for ``{...}``.

    AssertionError if the text to replace is not shown."""
    changed = list(words)
    for shown, instead in way.instead.items():
        assert any(shown in word for word in changed), f"{shown} is not in {' '.join(words)}"
        changed = [word.replace(shown, instead.format(**places)) for word in changed]
    if way.output:
        folder = f"ARGS={way.output} {places['out']}"
        if any(word.startswith("ARGS=") for word in changed):
            changed = [word.replace("ARGS=", f"{folder} ") for word in changed]
        else:
            changed.append(folder)
    return [*changed, *(word.format(**places) for word in shlex.split(way.add))]


def reader_environment(folder: Path, *first: Path) -> dict[str, str]:
    """The environment of a reader who has activated this virtual environment: `python3`,
    `simple-offload` and `vllm` are on PATH, after the folders ``first``. Writes to ``folder``."""
    tools = folder / "tools"
    tools.mkdir(exist_ok=True)
    # The CPU build's own `vllm` fails on the name of the build.
    (tools / "vllm").write_text(_VLLM.format(python=sys.executable))
    (tools / "vllm").chmod(0o755)
    # The variables of `make test ARGS=...` are not for a make that a test runs.
    makefile = (ROOT / "Makefile").read_text()
    of_make = {"MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES"}
    of_make |= set(re.findall(r"^(\w+) \?=", makefile, re.MULTILINE)) - {"PYTHON"}
    environment = {key: value for key, value in pip_environment().items() if key not in of_make}
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
    """Start a command in ``folder``, or in the checkout if IN_THE_CHECKOUT names it, with its
    output in ``log``."""
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
            # Tests that a shell started in the background ignore SIGINT.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509 - no lock taken
        )


def stop(process: "subprocess.Popen[bytes]", number: signal.Signals = signal.SIGTERM) -> int:
    """Stop a command, as Ctrl-C or a service manager does; its exit code."""
    try:
        if process.poll() is None:
            process.send_signal(number)
        return process.wait(_STOP_SECONDS)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def run(words: Sequence[str], folder: Path, environment: Mapping[str, str]) -> tuple[int, str]:
    """The exit code and the output of a command, which has ended in any case."""
    log = folder / "output.log"
    process = start(words, folder, environment, log)
    try:
        process.wait()
    finally:
        code = stop(process)
    return code, log.read_text(errors="replace")


def empty_environment(folder: Path) -> Path:
    """Make a virtual environment with nothing but pip; the folder of its programs."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    return folder / "bin"
