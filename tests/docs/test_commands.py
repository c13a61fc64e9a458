"""Every command of the documentation runs, here or in the test that ways.py names."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import COMMANDS, Command
from tests.docs.shell import as_run, empty_environment, reader_environment, run
from tests.docs.ways import THEIRS, WAYS, Elsewhere, Named, Run, key_of
from tools.set_up import ROOT, VirtualEnvironment

SLOW_SECONDS = 3600
"""Time limit of the slowest command, on a busy machine."""

CONVERSATIONS = {
    "filetype": "generate_conversations",
    "num_conversations": 6,
    "text_files": ["not-read.txt"],
    "prompt_input": {
        "num_turns": {"distribution": "constant", "value": 4},
        "common_prefix_num_tokens": {"distribution": "constant", "value": 64},
        "prefix_num_tokens": {"distribution": "constant", "value": 1500},
        "num_tokens": {"distribution": "uniform", "min": 40, "max": 60},
    },
    "prompt_output": {"num_tokens": {"distribution": "constant", "value": 8}},
}
"""Prompts with four times as many tokens as the device of the benchmark's ``cpu`` preset holds."""


def _run_here() -> Iterator[Any]:
    """The commands that this file runs, each once, and how."""
    for text, command in {command.text: command for command in COMMANDS}.items():
        way = WAYS.get(key_of(text) or "")
        if isinstance(way, Run):
            marks = [] if way.fast else [pytest.mark.slow, pytest.mark.timeout(SLOW_SECONDS)]
            yield pytest.param(command, way, marks=marks, id=text[:60])


def test_every_command_has_a_way_and_every_way_a_command() -> None:
    shown = {command.text for command in COMMANDS} - set(THEIRS)
    assert [text for text in shown if key_of(text) is None] == [], "to be added to ways.py"
    assert len(COMMANDS) > 90
    unused = WAYS.keys() - {key_of(text) for text in shown}
    assert unused == set(), "no page shows these: remove them from ways.py"


@pytest.mark.parametrize("key", [key for key, way in WAYS.items() if isinstance(way, Elsewhere)])
def test_tests_elsewhere_exist(key: str) -> None:
    way = WAYS[key]
    assert isinstance(way, Elsewhere)
    path, _, name = way.by.partition("::")
    text = (ROOT / path).read_text()
    if name:
        assert f"\ndef {name}(" in text, f"{path} has no {name}"
    else:
        assert re.search(rf"^{re.escape(key)}( <|$)", text, re.MULTILINE), f"{path} lacks {key}"


def test_a_named_command_is_run_whole() -> None:
    for key, way in WAYS.items():
        assert not (isinstance(way, Named) and isinstance(WAYS[way.whole], Named)), key


@pytest.fixture
def places(tmp_path: Path) -> Mapping[str, str]:
    """Values for the placeholders that a reader replaces."""
    output = tmp_path / "out"
    output.mkdir()
    file = tmp_path / "conversations.json"
    file.write_text(json.dumps(CONVERSATIONS))
    return {"out": str(output), "input": str(file)}


@pytest.mark.parametrize(("command", "way"), list(_run_here()))
def test_commands(command: Command, way: Run, tmp_path: Path, places: Mapping[str, str]) -> None:
    # `make` would replace the environment in which these tests run.
    environment = VirtualEnvironment(ROOT)
    if command.words[0] == "make" and environment.installed() != environment.wanted():
        pytest.skip("needs the .venv that `make set-up` makes")
    alone = [empty_environment(tmp_path / "alone")] if way.alone else []
    words = as_run(command.words, way, places)
    code, output = run(words, tmp_path, reader_environment(tmp_path, *alone))
    assert (code, bool(re.search(way.prints, output))) == (way.code, True), output[-6000:]
    if command.words[0] == "simple-offload":
        assert "\x1b" not in output, "colours in a pipe"
