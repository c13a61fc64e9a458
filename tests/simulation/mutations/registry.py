"""Mutation: a bug that can be planted, and the scripts that show it."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any
from unittest.mock import patch

from tests.simulation.mutations.situations import ORDINARY, Situation

Replacement = Callable[..., Any]
"""A function that gets the original as its first argument, before the original's arguments."""


@dataclass(frozen=True)
class Mutation:
    """A bug and the situation in which it shows."""

    patches: list[tuple[Any, str, Replacement]]
    """Owner and name of each function that the bug replaces."""
    shown_by: Situation

    def also(self, owner: Any, name: str) -> Callable[[Replacement], Replacement]:
        """Let the bug replace a second function, by the decorated one."""

        def add(replacement: Replacement) -> Replacement:
            self.patches.append((owner, name, replacement))
            return replacement

        return add

    @contextmanager
    def planted(self) -> Iterator[None]:
        """The bug is present until the end of the ``with`` block."""
        with ExitStack() as stack:
            for owner, name, replacement in self.patches:
                patched = _around(getattr(owner, name), replacement)
                stack.enter_context(patch.object(owner, name, patched))
            yield


def mutation(
    owner: Any, name: str, shown_by: Situation = ORDINARY
) -> Callable[[Replacement], Mutation]:
    """Make a Mutation from the function that replaces ``name`` of a class or module."""
    return lambda replacement: Mutation([(owner, name, replacement)], shown_by)


def always(owner: Any, name: str, answer: Any, shown_by: Situation = ORDINARY) -> Mutation:
    """The bug that a function has no effect and always gives the same answer."""
    return mutation(owner, name, shown_by)(lambda *arguments, **keywords: answer)


def _around(original: Callable[..., Any], replacement: Replacement) -> Callable[..., Any]:
    @wraps(original)
    def patched(*arguments: Any, **keywords: Any) -> Any:
        return replacement(original, *arguments, **keywords)

    return patched
