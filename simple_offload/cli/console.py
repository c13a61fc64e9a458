"""The console that commands print to."""

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
    """One for standard output: without colours in a pipe, whatever FORCE_COLOR asks for."""
    console = _Console()
    if console.file.isatty():
        return console
    return _Console(width=_PIPE_WIDTH, force_terminal=False, no_color=True)


def print_text(console: Console, text: str, style: str | None = None) -> None:
    """Print ``text`` as it is: it is no markup, and its lines are not broken."""
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)
