"""Where the command prints to."""

from rich.console import Console

_PIPE_WIDTH = 160


def make_console() -> Console:
    """Of the terminal's width and with colours there; wide and without any in a pipe, whatever
    the environment asks for."""
    console = Console(soft_wrap=False)
    if console.file.isatty():
        return console
    return Console(width=_PIPE_WIDTH, force_terminal=False, no_color=True)
