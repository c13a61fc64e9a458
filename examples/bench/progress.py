"""What the user sees during a run: bars on a terminal, lines elsewhere. Both go to stderr."""

import time
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.progress import Progress as Bars


class Progress:
    """A bar for each of those at work, one after another."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._start = time.monotonic()
        self._last = ""
        self._tasks: dict[str, TaskID] = {}
        self._bars = Bars(
            SpinnerColumn(),
            TextColumn("{task.fields[who]}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
            console=self._console,
            disable=not self._console.is_terminal,
        )

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def show(self, who: str, what: str, done: int = 0, total: int | None = None) -> None:
        """``who`` is at work on ``what`` and has ``done`` of ``total`` requests behind it. Lines
        have no counts: there is one for each ``what``."""
        if self._console.is_terminal:
            if who not in self._tasks:
                for earlier in self._tasks.values():
                    self._bars.stop_task(earlier)
                self._tasks[who] = self._bars.add_task("", total=None, who=who)
            self._bars.update(self._tasks[who], description=what, completed=done, total=total)
        elif self._last != (line := f"{who}: {what}"):
            self._last = line
            seconds = time.monotonic() - self._start
            self._console.print(
                f"{seconds:5.1f} s  {line}", markup=False, highlight=False, soft_wrap=True
            )
