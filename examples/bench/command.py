"""How a benchmark ends: its exit code, and the words about a failure."""

import signal
import sys
from collections.abc import Callable
from typing import NoReturn

from rich.console import Console

BAD_RESULT = 1
"""The run came to its end, and its numbers prove nothing or the wrong thing."""
CANNOT_START = 2
RUN_FAILED = 3
INTERRUPTED = 128 + signal.SIGINT


class CannotStart(Exception):
    """The machine lacks what the benchmark needs. The text says what."""


class RunFailed(Exception):
    """A process that the benchmark needs has failed. The text says how, with the end of its log."""


def exit_code_of(run: Callable[[], int]) -> int:
    """Call ``run`` and return its exit code, or that of a failure or of an interrupt."""
    try:
        return run()
    except CannotStart as error:
        complain(str(error))
        return CANNOT_START
    except RunFailed as error:
        complain(str(error))
        return RUN_FAILED
    except KeyboardInterrupt:
        complain("Interrupted.")
        return INTERRUPTED


def complain(text: str) -> None:
    """Print to stderr."""
    print_lines(Console(stderr=True), text)


def print_lines(console: Console, *lines: str, style: str | None = None) -> None:
    """Print lines as they are: no markup, no colours of numbers, no wrapping."""
    for line in lines:
        console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)


def run_program(main: Callable[[], int]) -> NoReturn:
    """Run ``main`` and exit. SIGTERM and SIGHUP act as Ctrl-C does: the program leaves through the
    ``finally`` blocks that stop processes and remove files, and asyncio ends its tasks in order
    (it does so for SIGINT only)."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: signal.raise_signal(signal.SIGINT))
    sys.exit(main())
