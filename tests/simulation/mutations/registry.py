"""Mutation: a bug that can be planted, and the scripts that show it."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from tests.simulation.mutations.scripts import Situation, ordinary
from tests.simulation.script import Script


@dataclass(frozen=True)
class Mutation:
    """A bug and the situation in which it shows."""

    patch_in: Callable[[ExitStack], None]
    """Patches the bug in for as long as the stack is open."""
    shown_by: Situation

    @contextmanager
    def planted(self) -> Iterator[None]:
        """The bug is present until the end of the ``with`` block."""
        with ExitStack() as stack:
            self.patch_in(stack)
            yield

    def script(self, seed: int) -> Script:
        """The script of ``seed``, adapted so that the bug can show."""
        return self.shown_by(Script.draw(seed).with_sub_blocks(1))


def mutation(shown_by: Situation = ordinary) -> Callable[[Callable[[ExitStack], None]], Mutation]:
    """Make a Mutation from the function that patches the bug in. Its name is the function's
    name."""

    def make(patch_in: Callable[[ExitStack], None]) -> Mutation:
        return Mutation(patch_in, shown_by)

    return make


def substitute(stack: ExitStack, owner: type, name: str, replacement: Callable[..., Any]) -> None:
    """Replace attribute ``name`` of ``owner`` by ``replacement`` while the stack is open."""
    stack.enter_context(patch.object(owner, name, replacement))
