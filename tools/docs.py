"""Generates parts of the documentation: ``python -m tools.docs``.

Rewrites the configuration table in docs/configuration.md from OffloadConfig, the table of
invariants in docs/coverage.md from the marks of tests, and docs/results.svg from the figures in
docs/measurements.md. Tests fail where one of them is not what this would write.
"""

import ast
import json
import re
import tempfile
import types
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

from annotated_types import Ge, Gt
from pydantic import BeforeValidator
from pydantic.fields import FieldInfo

from simple_offload.config import GIB, OffloadConfig, SecondTierConfig, parse_memory

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
CONFIGURATION = ROOT / "docs" / "configuration.md"
ARCHITECTURE = ROOT / "docs" / "architecture.md"
COVERAGE = ROOT / "docs" / "coverage.md"
MEASUREMENTS = ROOT / "docs" / "measurements.md"
PICTURE = ROOT / "docs" / "results.svg"


# The configuration table


def config_table() -> str:
    """A Markdown table with a row for every key of kv_connector_extra_config."""
    rows = ["| key | default | allowed | meaning |", "|---|---|---|---|"]
    for key, field in OffloadConfig.model_fields.items():
        assert field.description, f"{key} has no docstring"
        cells = (f"`{key}`", _default(field), _allowed(field.annotation, field.metadata))
        meaning = " ".join(field.description.replace("``", "`").split())
        rows.append(f"| {' | '.join((*cells, meaning))} |")
    return "\n".join(rows)


def _default(field: FieldInfo) -> str:
    value = field.get_default()
    if value is None:
        return "\N{EN DASH}"
    if _is_size(field.metadata) and value % GIB == 0:
        return f'`"{value // GIB}GiB"`'
    return f"`{json.dumps(int(value) if isinstance(value, float) and value % 1 == 0 else value)}`"


def _allowed(annotation: Any, metadata: Iterable[Any] = ()) -> str:
    """The allowed values of a field of this type, in words."""
    if get_origin(annotation) in (Union, types.UnionType):
        (annotation,) = (each for each in get_args(annotation) if each is not type(None))
    if hasattr(annotation, "__metadata__"):
        annotation, metadata = get_args(annotation)[0], annotation.__metadata__
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{json.dumps(value)}`" for value in get_args(annotation))
    if annotation is SecondTierConfig:
        return "an object: [second tier](second-tier.md)"
    if annotation is bool:
        return "`true`, `false`"
    if _is_size(metadata):
        return 'bytes, a size such as `"64GiB"`, or a share such as `"80%"`'
    bounds = "".join(
        f", ≥ {bound.ge}" if isinstance(bound, Ge) else f", > {bound.gt}"
        for bound in _constraints(metadata)
        if isinstance(bound, Ge | Gt)
    )
    return {int: "a whole number", float: "a number"}[annotation] + bounds


def _constraints(metadata: Iterable[Any]) -> Iterable[Any]:
    for each in metadata:
        yield from each.metadata if isinstance(each, FieldInfo) else (each,)


def _is_size(metadata: Iterable[Any]) -> bool:
    return any(isinstance(each, BeforeValidator) and each.func is parse_memory for each in metadata)


# The table of invariants


def invariants() -> dict[str, str]:
    """Name ("I1", ...) -> text, from the list in docs/architecture.md."""
    text = ARCHITECTURE.read_text().replace("\n  ", " ")
    return dict(re.findall(r"^- \*\*(I\d+)\*\* (.*)$", text, re.MULTILINE))


def proofs() -> dict[str, list[str]]:
    """Invariant -> "file::test" of the tests marked with ``pytest.mark.proves``, sorted."""
    found: dict[str, list[str]] = {}
    for file in sorted((ROOT / "tests").rglob("*.py")):
        for name, test in _marked_tests(ast.parse(file.read_text())):
            found.setdefault(name, []).append(f"{file.relative_to(ROOT)}::{test}")
    return found


def invariant_table() -> str:
    """Markdown: a row for every invariant, with the tests that prove it."""
    tests = proofs()
    rows = ["| | invariant | tests |", "|---|---|---|"]
    for name, text in invariants().items():
        cells = (name, text, ", ".join(f"`{test}`" for test in tests.get(name, [])))
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def _marked_tests(module: ast.Module) -> Iterator[tuple[str, str]]:
    """(invariant, function) of every ``@pytest.mark.proves(...)``."""
    for function in module.body:
        if not isinstance(function, ast.FunctionDef):
            continue
        for decorator in function.decorator_list:
            if isinstance(decorator, ast.Call) and ast.unparse(decorator.func).endswith("proves"):
                yield from ((ast.literal_eval(name), function.name) for name in decorator.args)


# The pages


def pages_with_tables() -> dict[Path, str]:
    """Page -> its text with an up-to-date table."""
    return {
        CONFIGURATION: _with_table(CONFIGURATION, "configuration", config_table()),
        COVERAGE: _with_table(COVERAGE, "invariants", invariant_table()),
    }


def _with_table(page: Path, name: str, table: str) -> str:
    """The text of ``page`` with ``table`` between the marks of that name."""
    begin, end = f"<!-- {name}: make docs -->", f"<!-- end of {name} -->"
    before, _, rest = page.read_text().partition(begin)
    _, _, after = rest.partition(end)
    assert after, f"{page.name} lacks {begin} or {end}"
    return f"{before}{begin}\n{table}\n{end}{after}"


# The picture


class Hit(NamedTuple):
    """Time to first token of the prompts of 8,192 tokens, ms."""

    cold: float
    ours: float
    builtin: float


def hits_on_engines(measurements: str) -> Hit:
    """The rows of the first table under "Engines"."""
    section = measurements.partition("\n## Engines\n")[2]
    cold, _, _ = _numbers(section, "TTFT, cold")
    ours, builtin = _numbers(section, "TTFT, hit in the host tier")
    return Hit(cold[0], ours[0], builtin[0])


def throughput_by_agents(measurements: str) -> tuple[list[int], dict[str, list[float]]]:
    """Numbers of agents, and by contender the thousands of tokens a second with each."""
    section = measurements.partition("\n## Agents, by their number\n")[2]
    agents = [int(number) for (number,) in _numbers(section, "agents")]
    unit = "thousands of tokens/s: "
    rows = {"none": f"{unit}none", "built-in, lazy": "", "built-in": "", "ours": ""}
    found = {name: _numbers(section, row or name) for name, row in rows.items()}
    return agents, {name: [number for (number,) in cells] for name, cells in found.items()}


def _numbers(text: str, row: str) -> list[list[float]]:
    """The numbers in each cell of the first such row; cells without any are left out."""
    found = re.search(rf"^\| {re.escape(row)} \|(.*)\|$", text, re.MULTILINE)
    assert found, f"no row {row!r}"
    cells = (re.findall(r"\d+(?:\.\d+)?", cell) for cell in found[1].split("|"))
    return [[float(number) for number in cell] for cell in cells if cell]


def save_picture(path: Path, measurements: str) -> None:
    """Plot both tables to an SVG; the same bytes for the same figures."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    looks = {  # contender -> label, colour, marker
        "none": ("no connector", "tab:gray", "x"),
        "built-in, lazy": ("SimpleCPUOffloadConnector, lazy", "tab:orange", "s"),
        "built-in": ("SimpleCPUOffloadConnector", "tab:green", "^"),
        "ours": ("simple_offload", "tab:blue", "o"),
    }
    with mpl.rc_context({"svg.hashsalt": "simple_offload", "svg.fonttype": "none"}):
        figure = Figure(figsize=(9.6, 3.2), layout="constrained")
        left, right = figure.subplots(1, 2)
        hit = hits_on_engines(measurements)
        bars = {
            "none": ("computed", hit.cold),
            "built-in": ("SimpleCPUOffload-\nConnector", hit.builtin),
            "ours": ("simple_offload", hit.ours),
        }
        for place, (contender, (label, value)) in enumerate(reversed(bars.items())):
            left.barh(place, value, 0.6, color=looks[contender][1])
            left.text(value + 3, place, f"{value:.0f} ms", va="center")
            left.text(-3, place, label, va="center", ha="right")
        left.set_yticks([])
        left.set_xlim(0, hit.cold * 1.2)
        left.set_title("8B, prompt of 8,192 tokens: TTFT, ms")
        agents, speeds = throughput_by_agents(measurements)
        for contender, (label, colour, marker) in looks.items():
            right.plot(agents, speeds[contender], f"{marker}-", color=colour, label=label)
        right.set_xticks(agents)
        right.set_ylim(bottom=0)
        right.set_xlabel("agents")
        right.set_title("8B, recorded agents: thousands of tokens/s")
        right.legend(frameon=False, fontsize="small")
        for axes in (left, right):
            axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})
    path.write_text("\n".join(map(str.rstrip, path.read_text().splitlines())) + "\n")


def main() -> None:
    """Write all three, where they are not so already."""
    with tempfile.TemporaryDirectory() as scratch:
        picture = Path(scratch) / PICTURE.name
        save_picture(picture, MEASUREMENTS.read_text())
        for page, text in (
            *pages_with_tables().items(),
            (PICTURE, picture.read_text()),
        ):
            if not page.exists() or page.read_text() != text:
                page.write_text(text)


if __name__ == "__main__":
    main()
