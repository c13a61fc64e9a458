"""The documentation: its names exist, and its tables are up to date. tests/docs/ runs its
commands."""

import ast
import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from simple_offload.config import OffloadConfig
from simple_offload.metrics import SERIES
from tests.docs.pages import COMMANDS, PAGES, Command, blocks
from tools import docs
from tools.set_up import ROOT

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


@pytest.mark.parametrize(
    "command",
    [command for command in COMMANDS if "-m" in command.words],
    ids=lambda command: f"{command.page}: {command.text[:60]}",
)
def test_python_modules_and_their_options_exist(command: Command) -> None:
    """The module that parses the program's arguments names each option. Importing the program
    itself may need a device."""
    _, module, *arguments = command.words[command.words.index("-m") :]
    if module in ("pip", "pytest", "examples.vllm_command"):
        return  # their arguments are not of this project
    spec = importlib.util.find_spec(module)
    assert spec is not None, f"no module {module}"
    assert spec.origin is not None
    origin = Path(spec.origin)
    if origin.name == "__init__.py":
        parser = origin.with_name("arguments.py")
        origin = parser if parser.exists() else origin.with_name("__main__.py")
    source = origin.read_text()
    for argument in arguments:
        if argument.startswith("--"):
            assert f'"{argument}"' in source, f"{module} has no option {argument}"


def _validate(config: dict[str, Any]) -> None:
    """Whether this is a complete configuration for vLLM, or the connector's section of one."""
    from vllm.config import KVTransferConfig

    extra = config
    if "kv_connector" in config:
        KVTransferConfig(**config)
        assert config["kv_connector"] == "SimpleCPUOffloadConnector"
        assert config["kv_connector_module_path"] == "simple_offload"
        extra = config.get("kv_connector_extra_config", {})
    OffloadConfig.model_validate(extra)


@every_page
def test_json_is_a_configuration(page: Path) -> None:
    for block in blocks(page.read_text(), "json"):
        _validate(json.loads(block))


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
