"""Watch: let a test see the calls of a method."""

from collections.abc import Callable
from functools import partial
from typing import Any


def watch(owner: Any, name: str, watcher: Callable[..., Any]) -> None:
    """Let ``watcher`` replace the method ``name`` of one object. Its first argument is the
    original."""
    setattr(owner, name, partial(watcher, getattr(owner, name)))
