"""Calls that change the process they run in."""

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import TypeVar

Result = TypeVar("Result")


def in_child(call: Callable[..., Result], *arguments: object) -> Result:
    """Call a function in a process that is forked from this one, and so has imported the same."""
    with ProcessPoolExecutor(1, get_context("fork")) as executor:
        return executor.submit(call, *arguments).result()
