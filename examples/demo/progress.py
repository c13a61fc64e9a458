"""What the user sees while the runs work: a bar on a terminal, plain lines elsewhere."""

from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.progress import Progress as RichProgress

from examples.demo.results import Answer


class Progress:
    """Progress of several runs, one after the other, each of ``requests`` answers."""

    def __init__(self, console: Console, requests: int) -> None:
        self._console = console
        self._requests = requests
        self._name = ""
        self._done = 0
        self._task: TaskID | None = None
        self._bars: RichProgress | None = None
        if console.is_terminal:
            self._bars = RichProgress(
                SpinnerColumn(),
                TextColumn("{task.fields[run]}"),
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bars is not None:
            self._bars.stop()

    def start_run(self, name: str) -> None:
        """Everything shown from now on belongs to the run ``name``."""
        self._name = name
        self._done = 0
        if self._bars is not None:
            self._task = self._bars.add_task("", total=self._requests, run=name)
        self._show("starting Python")

    def end_run(self) -> None:
        self._show("done")

    def event(self, event: dict[str, Any]) -> None:
        """Show an event that ``engine_run`` reported."""
        if "phase" in event:
            self._show(event["phase"])
            return
        answer = Answer.from_json(event["answer"])
        self._done += 1
        self._show(
            f"turn {answer.turn + 1}, user {answer.user + 1}: "
            f"{answer.prompt_tokens} tokens, first token after {answer.ttft:.2f} s"
        )

    def _show(self, text: str) -> None:
        if self._bars is not None and self._task is not None:
            self._bars.update(self._task, completed=self._done, description=text)
        else:
            count = f"{self._done}/{self._requests}"
            self._console.print(f"{self._name} {count} {text}", highlight=False, soft_wrap=True)
