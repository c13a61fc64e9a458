"""What the user sees meanwhile: a bar on a terminal, lines elsewhere."""

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
    """Of contenders, one after another, each with ``requests`` requests a round."""

    def __init__(self, console: Console, requests: int) -> None:
        self._console = console
        self._requests = requests
        self._last = ""
        self._tasks: dict[str, TaskID] = {}
        self._bars: Bars | None = None
        if console.is_terminal:
            self._bars = Bars(
                SpinnerColumn(),
                TextColumn("{task.fields[who]}"),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.description}"),
                console=console,
            )

    def __enter__(self) -> Self:
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bars is not None:
            self._bars.stop()

    def show(self, who: str, what: str, done: int) -> None:
        """``who`` is at work on ``what`` and has ``done`` requests behind it."""
        if self._bars is not None:
            if who not in self._tasks:
                for earlier in self._tasks.values():
                    self._bars.stop_task(earlier)
                self._tasks[who] = self._bars.add_task("", total=self._requests, who=who)
            self._bars.update(self._tasks[who], description=what, completed=done)
        elif f"{who}: {what}" != self._last:
            self._last = f"{who}: {what}"
            self._console.print(self._last, markup=False, highlight=False, soft_wrap=True)
