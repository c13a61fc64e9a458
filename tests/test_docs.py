"""The documentation: programs accept its commands, its names exist, and its tables are up to date.
tests/docs/ runs the commands of README.md and CONTRIBUTING.md."""

import argparse
import ast
import logging
import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
from vllm.config import KVTransferConfig

from simple_offload.cli.main import main
from simple_offload.cli.transfer_config import read_transfer_config
from simple_offload.config import OffloadConfig
from simple_offload.metrics import SERIES
from tests.docs.pages import COMMANDS, PAGES, blocks
from tests.test_packaging import EXTRAS
from tools import docs
from tools.set_up import ROOT

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


# Commands

ELSEWHERE = ("curl", "docker", "helm", "lm_eval", "mount", "npu-smi")
"""Programs of the system, and those that are not installed here."""


class Parsed(Exception):
    """A program has accepted its arguments."""


@pytest.fixture
def parse_only(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Programs that run in this process end with Parsed when they have parsed their arguments. A
    wrong argument ends them with SystemExit, as ever."""
    parse_args = argparse.ArgumentParser.parse_args

    def parse(*arguments: Any) -> None:
        parse_args(*arguments)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse)
    monkeypatch.setattr(signal, "signal", Mock())
    monkeypatch.setattr(logging, "disable", Mock())
    monkeypatch.setitem(sys.modules, "torch_npu", Mock())
    with patch.dict(os.environ):
        yield


def made_by(words: Sequence[str]) -> list[str]:
    """The last command of a make target."""
    makefile = (ROOT / "Makefile").read_text()
    for name in re.findall(r"^(\w+)=", "\n".join(words), re.MULTILINE):
        assert re.search(rf"^{name} \?=", makefile, re.MULTILINE), f"the Makefile reads no {name}"
    command = ["make", "--dry-run", f"PYTHON={sys.executable}", *words[1:]]
    environment = {"PATH": os.environ["PATH"]}  # without the variables of `make test ARGS=...`
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, check=True)
    return shlex.split(done.stdout.decode().splitlines()[-1])


@pytest.mark.usefixtures("parse_only")
@pytest.mark.parametrize("text", {each.text: each for each in COMMANDS}, ids=lambda text: text[:60])
def test_programs_accept_the_commands(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By their own parsers, where they are of this project or of vLLM."""
    words = next(list(each.words) for each in COMMANDS if each.text == text)
    while re.match(r"[A-Z_]+=", words[0]):
        words.pop(0)
    if words[0] == "make":
        words = made_by(words)
    if words[0] == "vllm":
        words = ["python", "-m", "examples.vllm_command", *words[1:]]
    match words:
        case ["simple-offload", *arguments]:
            with pytest.raises(Parsed):
                main(arguments)
        case [_, "-m", module, *arguments] if module.startswith(("examples.", "tests.")):
            monkeypatch.setattr(sys, "argv", [module, *arguments])
            with pytest.raises((Parsed, SystemExit)) as end:
                runpy.run_module(module, run_name="__main__")
            assert isinstance(end.value, Parsed) or "--help" in arguments
        case [_, "-m", module, *_]:
            assert find_spec(module)
        case ["pip", "install", package]:
            extra = package.removeprefix(".").strip("[]")
            assert extra in {"", *EXTRAS} or package == EXTRAS["bench"][0]
        case [program, *_]:
            assert program in ELSEWHERE or words[1:] == ["tools/set_up.py"]
    for option in {"--config", "--kv-transfer-config"} & set(words):
        require_valid(words[words.index(option) + 1])


def require_valid(config: str) -> None:
    """Whether this is a complete configuration for vLLM, or the connector's section of one."""
    given = read_transfer_config(config)
    if given.whole is not None:
        KVTransferConfig(**given.whole)
        assert '"kv_connector_module_path": "simple_offload"' in config
    OffloadConfig.model_validate(given.extra)


@every_page
def test_json_is_a_configuration(page: Path) -> None:
    for block in blocks(page.read_text(), "json"):
        require_valid(block)


# Named things exist


@every_page
def test_links_and_paths_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    for target in re.findall(r"\]\(([^)]+)\)", text):
        if not target.startswith("https://"):
            path, _, anchor = target.partition("#")
            file = page.parent / path if path else page
            assert file.exists(), target
            if anchor:
                heads = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
                slugs = [re.sub(r"[^\w\- ]", "", head).lower().replace(" ", "-") for head in heads]
                assert anchor in slugs, target
    prefixes = "simple_offload|tests|tools|examples|docs|dashboards"
    for path in re.findall(rf"`((?:{prefixes})/[\w/.*-]+)(?:::\w+)?`", text):
        assert list(ROOT.glob(path)) or (ROOT / path).exists(), path


@every_page
def test_tables_have_a_head(page: Path) -> None:
    """Rows without one, as behind an empty line, are no table but text."""
    lines = page.read_text().splitlines()
    begins = [
        number
        for number, (before, line) in enumerate(pairwise(lines), 1)
        if line.startswith("| ") and not before.startswith("|")
    ]
    assert [lines[each] for each in begins if not lines[each + 1].startswith("|---")] == []


def test_named_tests_exist() -> None:
    pages = "".join(page.read_text() for page in PAGES)
    named = re.findall(r"`(tests/[\w/.]+\.py)::(\w+)", pages)
    assert len(named) > 60
    for path, name in named:
        assert f"\ndef {name}(" in (ROOT / path).read_text(), f"{path}::{name}"


def test_every_invariant_has_a_test() -> None:
    names = [f"I{number}" for number in range(1, len(docs.invariants()) + 1)]
    assert list(docs.invariants()) == names
    assert len(names) >= 9
    assert docs.proofs().keys() == set(names)


def test_every_module_has_its_place_in_the_picture() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    for room in ("scheduler", "second_tier", "worker", "."):
        for module in (ROOT / "simple_offload" / room).glob("*.py"):
            if module.stem not in ("__init__", "ascend_regions", "logs"):
                assert module.name in text, module


# Tables from the code


def test_tables_are_up_to_date() -> None:
    for page, text in docs.pages_with_tables().items():
        assert page.read_text() == text, f"{page.name}: run `make docs`"


_LEVELS = {
    "info": "info",
    "warning": "warning",
    "warning_once": "warning",
    "error": "error",
    "exception": "error",  # with a traceback
}
_PLACEHOLDER = re.compile(r"%(?:\([a-z_]+\))?[-+ #0]*\d*(?:\.\d+)?[a-zA-Z]")


def log_lines() -> Iterator[tuple[str, str]]:
    """Level and text of every line except debug lines, with … for each value that is filled in."""
    for file in sorted((ROOT / "simple_offload").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            match node:
                case ast.Call(
                    func=ast.Attribute(value=ast.Name(id="logger"), attr=level),
                    args=[ast.Constant(value=str(text)), *_],
                ) if level in _LEVELS:
                    yield _LEVELS[level], _PLACEHOLDER.sub("…", text)
                case ast.Call(
                    func=ast.Attribute(attr="_warn"), args=[ast.Constant(value=str(text)), *_]
                ):
                    yield "warning", _PLACEHOLDER.sub("…", text)


def test_every_log_line_is_explained() -> None:
    text = (ROOT / "docs" / "operations.md").read_text()
    explained = set(re.findall(r"^\| `([^`]+)` \| (info|warning|error) \|", text, re.MULTILINE))
    assert explained == {(line, level) for level, line in log_lines()}


def test_every_series_is_explained() -> None:
    text = (ROOT / "docs" / "operations.md").read_text()
    prefix = "vllm:simple_offload_"
    rows: dict[str, tuple[set[str], str, str]] = {}
    for names, kind, row in re.findall(r"^\| (`[^|]+`) \| (\w+) \| ([^\n]*)$", text, re.MULTILINE):
        for name, labels in re.findall(r"`(\w+)(?:\{([\w, ]+)\})?`", names):
            rows[prefix + name] = (set(labels.split(", ")) - {""}, kind, row)
    assert rows.keys() >= SERIES.keys()
    for name, series in SERIES.items():
        labels, kind, row = rows[name]
        assert (kind, labels) == (series.kind, set(series.labels)), name
        values = {value for label in labels - {"direction"} for value in series.labels[label]}
        assert all(f"`{value}`" in row for value in values), name


def test_the_picture_is_that_of_the_measurements(tmp_path: Path) -> None:
    measurements = docs.MEASUREMENTS.read_text()
    docs.save_picture(tmp_path / "results.svg", measurements)
    assert (tmp_path / "results.svg").read_text() == docs.PICTURE.read_text(), "run `make docs`"


def test_the_readme_names_the_measured_hits() -> None:
    """Its headline: TTFT of a prompt of 8,192 tokens, from the table of engines."""
    hit = docs.hits_on_engines(docs.MEASUREMENTS.read_text())
    headline = docs.README.read_text().partition("![")[0]
    assert all(f"{value:.0f} ms" in headline for value in hit)
