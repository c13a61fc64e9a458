"""Generates parts of the documentation: ``python -m tools.docs``.

Rewrites the configuration table in README.md from OffloadConfig, the table of invariants in
docs/coverage.md from the marks of tests, and docs/results.svg from the figures in
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

from simple_offload.config import GIB, OffloadConfig, parse_size

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
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
    if annotation is bool:
        return "`true`, `false`"
    if _is_size(metadata):
        return 'bytes, or a size such as `"64GiB"`'
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
    return any(isinstance(each, BeforeValidator) and each.func is parse_size for each in metadata)


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
        README: _with_table(README, "configuration", config_table()),
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

BLUE, GRAY = "tab:blue", "tab:gray"


class Turn(NamedTuple):
    """A row of the demo's table; times in seconds."""

    turn: int
    without: float
    with_host: float


class Copies(NamedTuple):
    """A row of the copy benchmark's table of loads, in GB/s."""

    kib: int
    peak: float
    torch: float
    auto: float


def demo_turns(measurements: str) -> list[Turn]:
    """The rows of the demo's table."""
    rows = re.findall(
        r"^ +(\d) +\d+ .* ([\d.]+) s +([\d.]+) s +[\d.]+x$", measurements, re.MULTILINE
    )
    return [Turn(int(turn), float(a), float(b)) for turn, a, b in rows]


def loads_by_size(measurements: str) -> list[Copies]:
    """The copy benchmark's rows of loads, by ascending size."""
    rows = re.findall(
        r"^ load +(\d+) (KiB|MiB) +\d+ +([\d.]+) +([\d.]+) +[\d.]+ +[\d.]+ +([\d.]+) ",
        measurements,
        re.MULTILINE,
    )
    return [
        Copies(int(n) << (10 if unit == "MiB" else 0), float(p), float(t), float(a))
        for n, unit, p, t, a in rows
    ]


def save_picture(path: Path, measurements: str) -> None:
    """Plot both tables to an SVG; the same bytes for the same figures."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({"svg.hashsalt": "simple_offload", "svg.fonttype": "none"}):
        figure = Figure(figsize=(9.6, 3.6), layout="constrained")
        left, right = figure.subplots(1, 2)
        turns = demo_turns(measurements)
        where = [turn.turn for turn in turns]
        left.bar(
            [x - 0.2 for x in where], [t.without for t in turns], 0.4, color=GRAY, label="without"
        )
        left.bar(
            [x + 0.2 for x in where], [t.with_host for t in turns], 0.4, color=BLUE, label="with"
        )
        left.set_title("Demo (CPU): time to first token, s")
        left.set_xlabel("turn of a conversation")
        left.legend(frameon=False)
        loads = loads_by_size(measurements)
        sizes = [load.kib for load in loads]
        right.plot(sizes, [load.peak for load in loads], "k--", label="bus (one contiguous copy)")
        right.plot(sizes, [load.auto for load in loads], "o-", color=BLUE, label="simple_offload")
        right.plot(sizes, [load.torch for load in loads], "s-", color=GRAY, label="plain PyTorch")
        right.set_xscale("log", base=2)
        right.set_xticks(sizes, [f"{s}K" if s < 1024 else f"{s >> 10}M" for s in sizes])
        right.set_ylim(bottom=0)
        right.set_title("H200: loads of scattered blocks, GB/s")
        right.set_xlabel("bytes of a block")
        right.legend(frameon=False)
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
