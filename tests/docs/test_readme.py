"""The commands of README.md and CONTRIBUTING.md run as shown, some with smaller sizes."""

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.docs.pages import COMMANDS
from tests.serve.conftest import PLAIN, save_model
from tests.serve.server import Server
from tools.set_up import ROOT, VirtualEnvironment, pip_environment

SLOW = [pytest.mark.slow, pytest.mark.timeout(3600)]  # the slowest command, on a busy machine
SHOWN = {each.text: each for each in COMMANDS if each.page in ("README.md", "CONTRIBUTING.md")}
HITS = "vllm:external_prefix_cache_hits_total"


class Run(NamedTuple):
    """How a command is run."""

    prints: str
    """A pattern that its output must match, as a proof that it works."""
    add: str = ""
    """An argument after the shown ones."""
    is_slow: bool = True


WORKS = r"The connector works here"
INSTALLED = r"Successfully installed .*simple-offload"
RUN: Mapping[str, Run] = {
    "make set-up": Run(r"\A\Z", is_slow=False),
    "make docs": Run(r"\A\Z", is_slow=False),
    "make demo": Run(r"All 480 tokens of 20 answers are the same"),
    "make demo ARGS=--restart": Run(r"After the restart, the same tokens"),
    "make test ARGS=tests/scheduler": Run(r"\d{3} passed"),
    "make test ARGS=-k tail_first": Run(r"\d passed"),
    "make soak STEPS=100000 SEED=0": Run(r"no\s+violation"),
    "make accuracy ARGS=--samples 32": Run(r"(?s)PASSED: all .* samples .*PASSED: all"),
    "make test-gpu GPU_PYTHON=python3": Run(
        r"\d{2,}/\d+ tests collected", add="ARGS=--collect-only"
    ),
    "make bench-scheduler": Run(r"host 2 x device, one-offs", add="ARGS=--quick"),
    "python -m tools.vllm_members 0.33.0": Run(r"changed: vllm\..*\n +here: .*\n +there: "),
    'simple-offload doctor --ranks 2 --config {"cpu_bytes_to_use": "64GiB"}': Run(WORKS),
    "simple-offload doctor": Run(WORKS),
    "pip install .": Run(INSTALLED),
    "pip install .[dev]": Run(INSTALLED),
}
ELSEWHERE: Mapping[str, str] = {
    "make check": ".ci/run",
    "make test": ".ci/run",
    "make test ARGS=-m slow": "tests/docs/test_readme.py",
    "pip install .[cpu]": "tests/test_packaging.py",
}
"""By command, what else runs it."""


def test_every_command_is_run() -> None:
    (serve,) = (text for text in SHOWN if text.startswith("vllm serve"))
    assert {*RUN, *ELSEWHERE, serve} == SHOWN.keys()
    assert all((ROOT / file).is_file() for file in ELSEWHERE.values())


@pytest.mark.parametrize(
    "text", [pytest.param(text, marks=SLOW if way.is_slow else ()) for text, way in RUN.items()]
)
def test_commands(text: str, tmp_path: Path) -> None:
    # `make` would replace the environment in which these tests run.
    environment = VirtualEnvironment(ROOT)
    if text.startswith("make") and environment.installed() != environment.wanted():
        pytest.skip("needs the .venv that `make set-up` makes")
    programs = Path(sys.executable).parent
    if text.startswith("pip"):  # where there is nothing but pip
        subprocess.run([sys.executable, "-m", "venv", str(tmp_path)], check=True)
        programs = tmp_path / "bin"
    words = [each.replace("64GiB", "1GiB") for each in SHOWN[text].words]
    # The variables of `make test ARGS=...` are not for a make that a test runs.
    of_make = re.findall(r"^(\w+) \?=", (ROOT / "Makefile").read_text(), re.MULTILINE)
    variables = {
        key: value
        for key, value in pip_environment().items()
        if key not in of_make and not key.startswith(("MAKE", "MFLAGS"))
    }
    done = subprocess.run(
        [*words, *filter(None, [RUN[text].add])],
        cwd=ROOT,
        env=variables | {"PATH": f"{programs}:{os.environ['PATH']}"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    assert re.search(RUN[text].prints, done.stdout), done.stdout[-6000:]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_server(tmp_path: Path) -> None:
    """It answers, and a prompt that the device has evicted comes back from the host."""
    (command,) = (each for text, each in SHOWN.items() if text.startswith("vllm serve MODEL"))
    arguments = [each.replace("64GiB", "64MiB") for each in command.words[3:]]
    model = save_model(tmp_path / "model")
    with Server(model, tmp_path, *PLAIN, *arguments) as server:
        first, *_ = (server.complete(range(start, start + 300), 4) for start in (3, 70, 140, 210))
        assert server.metric(HITS) == 0
        assert server.complete(range(3, 303), 4).tokens == first.tokens
        assert server.metric(HITS) == 288
