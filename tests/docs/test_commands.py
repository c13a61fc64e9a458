"""Every command of the documentation runs, here or in the test that ways.py names."""

import json
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.docs.pages import COMMANDS, Command
from tests.docs.shell import as_run, empty_environment, reader_environment, run
from tests.docs.ways import WAYS, Elsewhere, Named, Run, Theirs, key_of
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


def _run_here(*, slow: bool) -> list[Command]:
    """The commands that this file runs, each once."""
    found = {}
    for command in COMMANDS:
        way = WAYS.get(key_of(command.text) or "")
        if isinstance(way, Run) and way.slow == slow:
            found[command.text] = command
    return list(found.values())


def _title(command: Command) -> str:
    return command.text[:60]


# The table


def test_every_command_has_a_way_to_be_run() -> None:
    unknown = [f"{each.page}: {each.text}" for each in COMMANDS if key_of(each.text) is None]
    assert unknown == [], "add these to WAYS in tests/docs/ways.py"
    assert len(COMMANDS) > 90


def test_every_way_belongs_to_a_command() -> None:
    used = {key_of(command.text) for command in COMMANDS}
    assert WAYS.keys() - used == set(), "no page shows these: remove them from tests/docs/ways.py"


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


def test_a_command_is_run_whole_and_by_this_project() -> None:
    ours = ("make", "simple-offload", "python", ".venv", "vllm")
    for key, way in WAYS.items():
        assert not (isinstance(way, Named) and isinstance(WAYS[way.whole], Named | Theirs)), key
        assert not (isinstance(way, Theirs) and key.startswith(ours)), key


# Running them


@pytest.fixture
def places(tmp_path: Path) -> Mapping[str, str]:
    """Values for the placeholders that a reader replaces."""
    output = tmp_path / "out"
    output.mkdir()
    file = tmp_path / "conversations.json"
    file.write_text(json.dumps(CONVERSATIONS))
    return {"out": str(output), "input": str(file)}


def _check(command: Command, folder: Path, places: Mapping[str, str]) -> None:
    # `make` would replace the environment in which these tests run.
    environment = VirtualEnvironment(ROOT)
    if command.words[0] == "make" and environment.installed() != environment.wanted():
        pytest.skip("needs the .venv that `make set-up` makes")
    way = WAYS[key_of(command.text) or ""]
    assert isinstance(way, Run)
    alone = [empty_environment(folder / "alone")] if way.alone else []
    words = as_run(command.words, way, places)
    code, output = run(words, folder, reader_environment(folder, *alone))
    assert (code, bool(re.search(way.prints, output))) == (way.code, True), output[-6000:]
    if command.words[0] == "simple-offload":
        assert "\x1b" not in output, "colours in a pipe"


@pytest.mark.parametrize("command", _run_here(slow=False), ids=_title)
def test_commands(command: Command, tmp_path: Path, places: Mapping[str, str]) -> None:
    _check(command, tmp_path, places)


@pytest.mark.slow
@pytest.mark.timeout(SLOW_SECONDS)
@pytest.mark.parametrize("command", _run_here(slow=True), ids=_title)
def test_slow_commands(command: Command, tmp_path: Path, places: Mapping[str, str]) -> None:
    _check(command, tmp_path, places)
