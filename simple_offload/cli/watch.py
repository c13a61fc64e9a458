"""``simple-offload watch``: follows a running server's /metrics."""

import argparse
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from rich.console import Console
from rich.live import Live

from simple_offload.cli.arguments import Parser, number
from simple_offload.cli.console import make_console
from simple_offload.cli.scrape import ScrapeError, metrics_url, scrape
from simple_offload.cli.screen import View, lines, page

NO_SERVER = 1
_SHORTEST, _LONGEST = 0.1, 86_400.0
_MINUTE, _HOUR = 60.0, 3600.0
_ENDING = {signal.SIGINT, signal.SIGTERM}


def add_arguments(parser: Parser) -> None:
    """Those of ``simple-offload watch``, and its help."""
    parser.description = (
        "watch shows what a running server finds: where prompt tokens came from, why others were "
        "computed, how full the tiers are, how fast copies are, and what other sizes of host "
        "memory would find. In a pipe it prints plain lines. Ctrl-C ends it."
    )
    parser.epilog = (
        "exit codes: 0 ended by the user, or after --once; 1 the server cannot be reached, or does "
        "not use this connector; 2 wrong usage"
    )
    parser.add_argument("url", metavar="URL", help="of the server, such as localhost:8000")
    parser.add_argument(
        "--interval",
        type=number(
            f"of seconds from {_SHORTEST} to {_LONGEST:.0f}",
            lambda seconds: _SHORTEST <= seconds <= _LONGEST,
        ),
        default=5.0,
        metavar="SECONDS",
        help="time between two pages (default: 5)",
    )
    parser.add_argument("--once", action="store_true", help="print one page")


def run(arguments: argparse.Namespace) -> int:
    """Show the server until the user ends it; return the exit code. Raises ConfigError for a wrong
    URL."""
    url = metrics_url(arguments.url)
    try:
        watch(url, make_console(), arguments.interval, arguments.once)
    except ScrapeError as problem:
        print(f"simple-offload watch: {problem}", file=sys.stderr)
        return NO_SERVER
    except KeyboardInterrupt:
        pass
    return 0


def watch(url: str, console: Console, interval: float, once: bool) -> None:
    """Show one page, or a page each ``interval`` seconds until KeyboardInterrupt. Raises
    ScrapeError if the first scrape fails. Later ones may, as while the server restarts."""
    views = follow(url, interval)
    view = next(views)
    if not console.is_terminal or console.is_dumb_terminal:
        while True:
            console.out("\n".join([*lines(view), ""]))
            if once:
                return
            view = next(views)
    if once:
        console.print(page(view))
        return
    # They end a pause or a scrape, and interrupt nothing else: the cursor must not stay hidden.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    at_end = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                live.update(page(view), refresh=True)
                view = next(views)
    finally:
        console.print(page(view))  # it stays when the screen of Live is gone
        signal.signal(signal.SIGTERM, at_end)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _pause(seconds: float) -> None:
    """Raises KeyboardInterrupt at a signal that ends the program, also one that came before."""
    if signal.sigtimedwait(_ENDING, seconds) is not None:
        raise KeyboardInterrupt


@contextmanager
def _interruptible() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def follow(
    url: str, interval: float, clock: Callable[[], float] = time.monotonic
) -> Iterator[View]:
    """A view each ``interval`` seconds; ``clock`` counts seconds. The first raises ScrapeError if
    the scrape fails."""
    now, taken = scrape(url), clock()
    view = View(url, now)
    marks = deque([(taken, now)])  # at most one a minute
    while True:
        yield view
        _pause(interval)
        try:
            with _interruptible():
                now = scrape(url)
        except ScrapeError as problem:
            view = replace(view, problem=str(problem))
            continue
        before, taken = taken, clock()
        recent = now.since(view.now)
        if recent is None:
            marks.clear()
        if not marks or taken - marks[-1][0] >= _MINUTE:
            marks.append((taken, now))
        while len(marks) > 1 and taken - marks[1][0] >= _HOUR:
            marks.popleft()
        hour = now.since(marks[0][1]) if taken - marks[0][0] >= _HOUR else None
        view = View(url, now, recent, taken - before, hour)
