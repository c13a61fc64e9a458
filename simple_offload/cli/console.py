"""The console that commands print to, and how they write bytes."""

from functools import partial
from typing import NoReturn

from rich.console import Console

from simple_offload.memory import GIB

_PIPE_WIDTH = 160


class _Console(Console):
    def on_broken_pipe(self) -> NoReturn:
        """End well: the reader of a pipe has seen enough, as ``head`` does."""
        try:
            super().on_broken_pipe()
        finally:
            raise SystemExit(0)


def make_console() -> Console:
    """One for standard output, which prints text as it is: without colours in a pipe, whatever
    FORCE_COLOR asks for."""
    make = partial(_Console, markup=False, emoji=False, highlight=False)
    console = make()
    if console.file.isatty():
        return console
    return make(width=_PIPE_WIDTH, force_terminal=False, no_color=True)


def size_text(num_bytes: float) -> str:
    """Bytes as GiB, or MiB if they are few."""
    if num_bytes < GIB:
        return f"{num_bytes / 2**20:.0f} MiB"
    return f"{num_bytes / GIB:,.1f}".removesuffix(".0") + " GiB"
