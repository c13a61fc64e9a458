"""How a benchmark ends: its exit code, and the words about a failure."""

import signal
import sys
import time
from collections.abc import Callable
from typing import NoReturn

from rich.console import Console

from simple_offload.config import ConfigError

BAD_RESULT = 1
"""The run came to its end, and its numbers prove nothing or the wrong thing."""
CANNOT_START = 2
RUN_FAILED = 3
INTERRUPTED = 128 + signal.SIGINT

Show = Callable[[str, str], None]
"""Gets who is at work, and the work."""


class CannotStart(Exception):
    """The machine lacks what the benchmark needs. The text says what."""


class RunFailed(Exception):
    """A process that the benchmark needs has failed. The text says how, with the end of its log."""


def exit_code_of(run: Callable[[], int]) -> int:
    """Call ``run`` and return its exit code, or that of a failure or of an interrupt."""
    try:
        return run()
    except (CannotStart, ConfigError) as error:
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


def lines() -> Show:
    """Prints a line a step to stderr, with the seconds since now."""
    start, last = time.monotonic(), ""

    def show(who: str, what: str) -> None:
        nonlocal last
        if last != (line := f"{who}: {what}"):
            last = line
            complain(f"{time.monotonic() - start:5.1f} s  {line}")

    return show


def run_program(main: Callable[[], int]) -> NoReturn:
    """Run ``main`` and exit. SIGTERM and SIGHUP act as Ctrl-C does: the program leaves through the
    ``finally`` blocks that stop processes and remove files, and asyncio ends its tasks in order
    (it does so for SIGINT only)."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: signal.raise_signal(signal.SIGINT))
    sys.exit(main())
