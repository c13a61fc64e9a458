"""Mutation: a bug that can be planted, and the scripts that show it."""

import ast
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import getsource, unwrap
from textwrap import dedent
from types import CodeType, FunctionType
from typing import Any

from tests.simulation.mutations.situations import ORDINARY, Situation


@dataclass(frozen=True)
class Mutation:
    """A bug and the situation in which it shows."""

    sources: dict[FunctionType, str]
    """By function, its source with the bug."""
    shown_by: Situation

    def also(self, function: Callable[..., Any], old: str, new: str) -> "Mutation":
        """Let the bug have ``new`` in the place of ``old`` too. Without ``old``, ``new`` is run
        before the function's first statement. AssertionError if ``old`` is not there once."""
        original = unwrap(getattr(function, "__func__", function))
        assert isinstance(original, FunctionType)
        source = self.sources.get(original) or dedent(getsource(original))
        self.sources[original] = _edited(source, old, new)
        _code(original.__name__, self.sources[original])
        return self

    @contextmanager
    def planted(self) -> Iterator[None]:
        """The bug is present until the end of the ``with`` block."""
        right = {function: function.__code__ for function in self.sources}
        try:
            for function, source in self.sources.items():
                function.__code__ = _code(function.__name__, source)
            yield
        finally:
            for function, code in right.items():
                function.__code__ = code


def mutation(
    function: Callable[..., Any], old: str, new: str, shown_by: Situation = ORDINARY
) -> Mutation:
    """The bug that a function has ``new`` in the place of ``old``, as ``Mutation.also``."""
    return Mutation({}, shown_by).also(function, old, new)


def always(
    function: Callable[..., Any], answer: object, shown_by: Situation = ORDINARY
) -> Mutation:
    """The bug that a function has no effect and always gives the same answer."""
    return mutation(function, "", f"return {answer!r}", shown_by)


def _edited(source: str, old: str, new: str) -> str:
    """Further lines of ``new`` are indented as the first."""
    if old:
        assert source.count(old) == 1, f"{old!r} is not there once:\n{source}"
        start = source.index(old)
    else:
        (function,) = ast.parse(source).body
        assert isinstance(function, ast.FunctionDef)
        first = function.body[ast.get_docstring(function) is not None]
        before = source.splitlines(keepends=True)[: first.lineno - 1]
        start, new = sum(map(len, before)) + first.col_offset, f"{new}\n"
    line = source[source.rfind("\n", 0, start) + 1 :]
    indent = line[: len(line) - len(line.lstrip())]
    return source[:start] + new.replace("\n", f"\n{indent}") + source[start + len(old) :]


def _code(name: str, source: str) -> CodeType:
    module = compile(source, f"<{name} with a bug>", "exec")
    (code,) = [c for c in module.co_consts if isinstance(c, CodeType) and c.co_name == name]
    return code
