"""Release: the Python files of one version of vLLM, read and not imported."""

import ast
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Class(NamedTuple):
    """A class of vLLM, by the module that defines it."""

    module: str
    name: str


class Member(NamedTuple):
    """A member of a module, by its full name, or of a class."""

    owner: str | Class
    name: str

    def __str__(self) -> str:
        owner = self.owner if isinstance(self.owner, str) else ".".join(self.owner)
        return f"{owner}.{self.name}"


class Release:
    """Looks up definitions."""

    def __init__(self, folder: Path) -> None:
        """``folder`` has ``vllm/``."""
        self._folder = folder
        self.module = cache(self._module)
        self.members = cache(self._members)

    def _module(self, name: str) -> dict[str, ast.AST] | None:
        """What a module defines or imports, by name; None if there is no such module."""
        path = self._folder.joinpath(*name.split("."))
        files = [path / "__init__.py", path.with_suffix(".py")]
        file = next((file for file in files if file.is_file()), None)
        if file is None:
            return None
        package = name if file == files[0] else name.rpartition(".")[0]
        found: dict[str, ast.AST] = {}
        for statement in _statements(ast.parse(file.read_text(encoding="utf-8")).body):
            if isinstance(statement, ast.ImportFrom):
                for alias in statement.names:
                    imported = ast.ImportFrom(_source_of(statement, package), [alias], 0)
                    found.setdefault(alias.asname or alias.name, imported)
            else:
                found |= dict.fromkeys(_names(statement), statement)
        return found

    def find(self, module: str, name: str) -> tuple[str, ast.AST] | None:
        """The definition of a module's member, and the module that has it. A module is a member of
        its package."""
        node = (self.module(module) or {}).get(name)
        if isinstance(node, ast.ImportFrom):
            return self.find(node.module or "", node.names[0].name)
        if node is not None:
            return module, node
        below = f"{module}.{name}"
        return (below, ast.Module([], [])) if self.module(below) is not None else None

    def find_class(self, module: str, name: str) -> Class | None:
        """The class that a module has under this name."""
        found = self.find(module, name)
        if found is None or not isinstance(found[1], ast.ClassDef):
            return None
        return Class(found[0], found[1].name)

    def bases(self, owner: Class) -> list[Class]:
        """The class and its bases within vLLM, nearest first."""
        found = self.find(*owner)
        if found is None or not isinstance(found[1], ast.ClassDef):
            return []
        names = [base.id for base in found[1].bases if isinstance(base, ast.Name)]
        above = [self.find_class(found[0], name) for name in names]
        return [owner, *(each for base in above if base for each in self.bases(base))]

    def _members(self, owner: Class) -> dict[str, ast.AST]:
        """Members of a class, its bases' too: methods, fields, and what methods assign to self."""
        found: dict[str, ast.AST] = {}
        for module, name in reversed(self.bases(owner)):
            node = (self.module(module) or {})[name]
            assert isinstance(node, ast.ClassDef)
            for method in (m for m in node.body if isinstance(m, Function)):
                for statement in ast.walk(method):
                    found |= dict.fromkeys(_names(statement, of_self=True), statement)
            for statement in node.body:
                found |= dict.fromkeys(_names(statement), statement)
        return found

    def definition(self, member: Member) -> ast.AST | None:
        """A member of a module or class, or of a class derived from it in the same module: code
        narrows types (``isinstance``)."""
        owner = member.owner
        if isinstance(owner, str):
            found = self.find(owner, member.name)
            return found and found[1]
        for each in (owner, *self._derived(owner)):
            if (node := self.members(each).get(member.name)) is not None:
                return node
        return None

    def _derived(self, owner: Class) -> Iterator[Class]:
        for name, node in (self.module(owner.module) or {}).items():
            each = Class(owner.module, name)
            if isinstance(node, ast.ClassDef) and owner in self.bases(each):
                yield each

    def parameters(self, member: Member) -> str | None:
        """The parameters of a function, a method or a class's constructor, in one line without
        annotations; None for anything else."""
        node = self.definition(member)
        if isinstance(node, ast.ClassDef):
            owner = self.find_class(str(member.owner), member.name)
            members = self.members(owner) if owner else {}
            node = members.get("__init__")
            if node is None:  # a dataclass, or a tuple with names
                return ", ".join(n for n, m in members.items() if isinstance(m, ast.AnnAssign))
        if not isinstance(node, Function) or any(
            "property" in ast.unparse(each) for each in node.decorator_list
        ):
            return None
        bare = ast.parse(f"def f({ast.unparse(node.args)}): pass")
        for each in ast.walk(bare):
            if isinstance(each, ast.arg):
                each.annotation = None
        (function,) = bare.body
        assert isinstance(function, ast.FunctionDef)
        return ast.unparse(function.args)


def names_in(annotation: ast.AST | None) -> list[str]:
    """Names in an annotation, quoted or not."""
    found: list[str] = []
    for node in ast.walk(annotation) if annotation is not None else ():
        if isinstance(node, ast.Name):
            found.append(node.id)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found += names_in(ast.parse(node.value, mode="eval"))
    return found


def _source_of(statement: ast.ImportFrom, package: str) -> str:
    """The full name of the module that a statement of a module in ``package`` imports from."""
    if not statement.level:
        return statement.module or ""
    parts = package.split(".")
    parts = parts[: len(parts) + 1 - statement.level]
    return ".".join([*parts, *([statement.module] if statement.module else [])])


def _statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements at the top of a module, those in ``if`` and ``try`` too."""
    for statement in body:
        yield statement
        if isinstance(statement, ast.If | ast.Try):
            below = ast.iter_child_nodes(statement)
            yield from _statements(each for each in below if isinstance(each, ast.stmt))


def _names(statement: ast.AST, *, of_self: bool = False) -> list[str]:
    """Names that a statement defines, or the attributes of self."""
    if isinstance(statement, ast.ClassDef | Function):
        return [] if of_self else [statement.name]
    targets: Sequence[ast.expr] = ()
    if isinstance(statement, ast.Assign):
        targets = statement.targets
    elif isinstance(statement, ast.AnnAssign):
        targets = (statement.target,)
    found = [each for target in targets for each in ast.walk(target)]
    if of_self:
        members = [each for each in found if isinstance(each, ast.Attribute)]
        return [each.attr for each in members if ast.unparse(each.value) == "self"]
    return [target.id for target in targets if isinstance(target, ast.Name)]
