"""The console that commands print to."""

from functools import partial
from typing import NoReturn

from rich.console import Console

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
