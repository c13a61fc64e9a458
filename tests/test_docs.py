"""The documentation: its names exist, and its tables are up to date. tests/docs/ runs its
commands."""

import argparse
import importlib.util
import json
import re
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from simple_offload.cli.main import make_parser
from simple_offload.config import OffloadConfig
from simple_offload.metrics import SERIES
from tests.docs.pages import COMMANDS, PAGES, Command, blocks
from tests.log_lines import log_lines
from tools import docs
from tools.set_up import ROOT

_ids = [str(page.relative_to(ROOT)) for page in PAGES]

every_page = pytest.mark.parametrize("page", PAGES, ids=_ids)


def of(*names: str) -> list[Command]:
    """Commands that begin with one of ``names``, without the variables set before it."""
    found = []
    for page, words, whole in COMMANDS:
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words = words[1:]  # noqa: PLW2901
        if words and words[0] in names:
            found.append(Command(page, words, whole))
    return found


def _shown(command: Command) -> str:
    return f"{command.page}: {' '.join(command.words)[:60]}"


PYTHONS = ("python", "python3", ".venv/bin/python")


# make


@cache
def make_targets() -> dict[str, str]:
    """Targets and their recipes."""
    text = (ROOT / "Makefile").read_text()
    return dict(re.findall(r"^([a-z-]+):[^\n]*\n((?:\t[^\n]*\n)*)", text, re.MULTILINE))


@pytest.mark.parametrize("command", of("make"), ids=_shown)
def test_make_targets_exist(command: Command) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for word in command.words[1:]:
        name, equals, value = word.partition("=")
        if not equals:
            assert name in make_targets()
            continue
        assert re.search(rf"^{name} \?=", makefile, re.MULTILINE), f"no variable {name}"
        if command.words[1] in ("test", "test-gpu") and name == "ARGS":
            paths = [part for part in shlex.split(value) if part.startswith("tests/")]
            assert all((ROOT / path).exists() for path in paths)


# python -m, simple-offload, vllm


def _source_of(module: str) -> str:
    """By program: the module that parses its arguments. Importing the program itself may need a
    device."""
    spec = importlib.util.find_spec(module)
    assert spec is not None, f"no module {module}"
    assert spec.origin is not None
    origin = Path(spec.origin)
    if origin.name != "__init__.py":
        return origin.read_text()
    arguments = origin.with_name("arguments.py")
    return (arguments if arguments.exists() else origin.with_name("__main__.py")).read_text()


@pytest.mark.parametrize("command", of(*PYTHONS), ids=_shown)
def test_python_modules_and_their_options_exist(command: Command) -> None:
    assert command.words[1] == "-m"
    module, *arguments = command.words[2:]
    if module in ("pip", "pytest"):
        return
    source = _source_of(module)
    if module.endswith("vllm_command"):
        return  # the arguments after it are vLLM's
    for argument in arguments:
        if argument.startswith("--"):
            assert f'"{argument}"' in source, f"{module} has no option {argument}"


@pytest.mark.parametrize("command", of("simple-offload"), ids=_shown)
def test_arguments_of_the_command_are_taken(
    command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    if not command.whole and command.words[1] != "bench":
        parser = make_parser()
        with pytest.raises(SystemExit):
            parser.parse_args([command.words[1], "--help"])
        options = capsys.readouterr().out
        assert all(word in options for word in command.words if word.startswith("--"))
        return
    arguments = make_parser().parse_args(command.words[1:])
    if arguments.command == "doctor" and arguments.config:
        _validate(json.loads(arguments.config))
    if arguments.command == "bench":
        _, bench, *rest = command.words[1:]
        from simple_offload.cli.bench import BENCHES

        source = _source_of(BENCHES[bench].module) if rest else ""
        assert all(f'"{word}"' in source for word in rest if word.startswith("--"))


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


@cache
def _serve_parser() -> Any:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    untyped: Any = FlexibleArgumentParser
    return make_arg_parser(untyped())


@pytest.mark.parametrize("command", of("vllm"), ids=_shown)
def test_vllm_takes_its_arguments(command: Command) -> None:
    if command.words[1] == "bench":
        from vllm.benchmarks.serve import add_cli_args

        parser: Any = argparse.ArgumentParser()
        add_cli_args(parser)
        parser.parse_args(command.words[3:])
        return
    assert command.words[1] == "serve"
    options = {option for action in _serve_parser()._actions for option in action.option_strings}
    named = [word for word in command.words if word.startswith("--")]
    assert set(named) <= options
    configs = [word for word in command.words if word.startswith("{")]
    assert len(configs) == named.count("--kv-transfer-config")
    for config in configs:
        _validate(json.loads(config))


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
    named = [
        found
        for page in PAGES
        for found in re.findall(r"`(tests/[\w/.]+\.py)::(\w+)", page.read_text())
    ]
    assert len(named) > 60
    for path, name in named:
        assert f"\ndef {name}(" in (ROOT / path).read_text(), f"{path}::{name}"


def test_every_invariant_has_a_test() -> None:
    names = [f"I{number}" for number in range(1, len(docs.invariants()) + 1)]
    assert list(docs.invariants()) == names
    assert len(names) >= 9
    assert sorted(docs.proofs()) == names


def test_every_module_has_its_place_in_the_picture() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    for room in ("scheduler", "worker", "."):
        for module in (ROOT / "simple_offload" / room).glob("*.py"):
            if module.stem not in ("__init__", "ascend_regions", "logs"):
                assert module.name in text, module


# Tables from the code


def test_tables_are_up_to_date() -> None:
    for page, text in docs.pages_with_tables().items():
        assert page.read_text() == text, f"{page.name}: run `make docs`"


def test_the_configuration_table_has_every_key() -> None:
    table = docs.config_table()
    assert all(f"| `{key}` |" in table for key in OffloadConfig.model_fields)


def test_the_table_has_defaults_and_allowed_values() -> None:
    rows = {row.split("`")[1]: row for row in docs.config_table().splitlines()[2:]}
    assert '| `"8GiB"` | bytes, or a size such as `"64GiB"` |' in rows["cpu_bytes_to_use"]
    assert "| \N{EN DASH} | bytes, or a size" in rows["cpu_bytes_to_use_per_rank"]
    assert "| \N{EN DASH} | a whole number, ≥ 2 |" in rows["num_cpu_blocks"]
    assert "| `false` | `true`, `false` |" in rows["lazy_offload"]
    assert '| `"auto"` | `"auto"`, `"keep"` |' in rows["kv_layout"]
    assert "| `20` | a number, ≥ 0 |" in rows["sync_load_ms"]


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


def test_a_row_that_is_missing_is_named() -> None:
    with pytest.raises(AssertionError, match="no row 'TTFT, cold'"):
        docs.hits_on_engines("\n## Engines\n\n| TTFT | 1 ms |\n")
