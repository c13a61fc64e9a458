"""The rooms of docs/architecture.md: imports run one way, and insides stay inside."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
PACKAGE = TESTS.parent / "simple_offload"
ROOMS = ("simple_offload.scheduler", "simple_offload.second_tier", "simple_offload.worker")
TIER = "simple_offload.scheduler.tier"
LINKS = {
    "next_free_block",
    "prev_free_block",
    "fake_free_list_head",
    "fake_free_list_tail",
}
"""Members that link vLLM's free queue."""
OF_NAMED_TUPLES = {"_replace"}
"""Public, in spite of their names."""


def imports(path: Path) -> Iterator[str]:
    """Modules that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and name not in OF_NAMED_TUPLES


def insides(source: str) -> set[str]:
    """Private members of other objects and modules, and links of the free queue, that code uses."""
    nodes = [*ast.walk(ast.parse(source))]
    members = {
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute)
        and ast.unparse(node.value) not in ("self", "cls", "super()")
    }
    members |= {
        each.name for node in nodes if isinstance(node, ast.ImportFrom) for each in node.names
    }
    for node in nodes:
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("setattr"):
            names = [each for each in node.args[1:2] if isinstance(each, ast.Constant)]
            members |= {str(each.value) for each in names}
    return {name for name in members if name in LINKS or is_private(name)}


def own_names(path: Path) -> Iterator[str]:
    """Names that a file defines."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


@pytest.mark.parametrize(
    ("room", "forbidden"),
    [
        ("scheduler", ("torch", "simple_offload.worker", "simple_offload.backends")),
        ("second_tier", ("torch", "simple_offload.worker", "simple_offload.backends")),
        ("worker", ("simple_offload.scheduler", "simple_offload.second_tier")),
        ("backends", ROOMS),
        ("sizing", ("simple_offload.cli", *ROOMS)),
        ("metadata.py", ROOMS),
        ("transfer.py", ("vllm", "simple_offload")),
        ("shared_memory.py", ROOMS),
    ],
)
def test_imports_run_one_way(room: str, forbidden: tuple[str, ...]) -> None:
    place = PACKAGE / room
    for path in place.rglob("*.py") if place.is_dir() else [place]:
        for module in imports(path):
            assert not any(f"{module}.".startswith(f"{name}.") for name in forbidden), path


def test_backends_and_host_memory_need_no_vllm() -> None:
    """``select.py`` asks vLLM which platform this is, to choose a backend."""
    backends = {*(PACKAGE / "backends").rglob("*.py")} - {PACKAGE / "backends" / "select.py"}
    for path in (*backends, PACKAGE / "worker" / "host_pool.py", PACKAGE / "shared_memory.py"):
        for module in imports(path):
            # ``metadata.py`` has vLLM's base classes of messages.
            assert module.partition(".")[0] != "vllm", path
            assert module != "simple_offload.metadata", path


def test_the_tier_imports_no_room_above_it() -> None:
    for path in (PACKAGE / "scheduler" / "tier").glob("*.py"):
        for module in imports(path):
            assert not module.startswith(ROOMS) or module.startswith(TIER), path


def test_the_second_tier_knows_the_host_tier_only() -> None:
    """And the scheduler side knows its interface only, but for the one file that opens it."""
    for path in (PACKAGE / "second_tier").glob("*.py"):
        for module in imports(path):
            assert not module.startswith("simple_offload.scheduler") or module.startswith(TIER), (
                path
            )
    for path in (PACKAGE / "scheduler").rglob("*.py"):
        files = ("interface", "opening") if path.name == "setup.py" else ("interface",)
        allowed = tuple(f"simple_offload.second_tier.{file}" for file in files)
        for module in imports(path):
            assert not module.startswith("simple_offload.second_tier") or module.startswith(allowed)


def test_the_insides_of_vllm_and_of_the_tier_are_used_in_their_own_files_only() -> None:
    block_pool = PACKAGE / "scheduler" / "tier" / "block_pool.py"
    assert {"_block_hash", "_cache", *LINKS} <= insides(block_pool.read_text())
    for room in ("scheduler", "second_tier"):
        for path in (PACKAGE / room).rglob("*.py"):
            if path != block_pool:
                assert not insides(path.read_text()), path


def test_tests_look_inside_in_one_place() -> None:
    """``integrity.py`` checks what no public member shows, and bugs are planted inside."""
    private = {name for path in PACKAGE.rglob("*.py") for name in own_names(path)}
    private = set(filter(is_private, private))
    assert {"_order", "_touch", "_Load", "_MOST_CHUNKS"} <= private
    simulation = TESTS / "simulation"
    for path in TESTS.rglob("*.py"):
        if path != simulation / "integrity.py" and path.parent != simulation / "mutations":
            assert not insides(path.read_text()) & private, path


def test_the_check_sees_what_it_forbids() -> None:
    source = "tier._order.early; block.next_free_block; self._order.early; row._replace()"
    assert insides(source) == {"_order", "next_free_block"}
    assert insides("from simple_offload.memory import GIB, _touch") == {"_touch"}
    assert insides("monkeypatch.setattr(tier, '_order', None)") == {"_order"}
