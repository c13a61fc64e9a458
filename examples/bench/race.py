"""Race: contenders that take turns at the same work, and the results of a run of them."""

import time
import traceback
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from rich.console import Console
from rich.table import Table

from examples.bench.command import BAD_RESULT, RUN_FAILED, lines, print_lines
from examples.bench.results_file import NUMBERS, save_numbers

WIDTH = 200
"""Columns for the tables of all contenders. A narrower terminal wraps them; nothing is cut off."""


class Named(Protocol):
    @property
    def name(self) -> str: ...


C = TypeVar("C", bound=Named)
T = TypeVar("T")


@dataclass(kw_only=True)
class RaceResults:
    """The measurements of a run so far."""

    machine: dict[str, Any]
    """Processor or device, versions, date."""
    failures: dict[str, str] = field(default_factory=dict)
    """Contenders that ended in an error: the step and the error."""
    problems: dict[str, str] = field(default_factory=dict)
    """Measurements that prove nothing: contender and place, and the reason."""
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """What is saved."""
        return vars(self)

    def tables(self) -> Iterable[Table]:
        """Of what there is."""
        raise NotImplementedError


class Race(Generic[C]):
    """Runs contenders. One that fails is out, and the others go on."""

    def __init__(
        self, contenders: Sequence[C], results: RaceResults, on_step: Callable[[str], None]
    ) -> None:
        """``on_step`` gets the name of every step before it begins."""
        self._on_step = on_step
        self._step = ""
        self.failures = results.failures
        self._all = list(contenders)
        self._num_rounds = 0

    def begin(self, step: str) -> None:
        """Go on to another step."""
        if step != self._step:
            self._step = step
            self._on_step(step)

    def run(
        self, step: str, do: Callable[[C], T], names: Collection[str] | None = None
    ) -> dict[str, T]:
        """Call ``do`` with one contender after another, all or those with these ``names``. Each
        call begins with another contender, so that none is always first. Returns results by name in
        the contenders' order, without those that failed."""
        self.begin(step)
        results: dict[str, T] = {}
        left = [each for each in self._all if each.name not in self.failures]
        contenders = [each for each in left if names is None or each.name in names]
        if not contenders:
            return results
        first = self._num_rounds % len(contenders)
        self._num_rounds += 1
        for contender in (*contenders[first:], *contenders[:first]):
            try:
                results[contender.name] = do(contender)
            except Exception as error:  # noqa: BLE001 - whatever it fails with, the others can run
                traceback.print_exc()
                self.failures[contender.name] = f"{step}: {type(error).__name__}: {error}"
        return {each.name: results[each.name] for each in contenders if each.name in results}


def run_race(
    name: str, results: RaceResults, output: Path, run: Callable[[Callable[[str], None]], None]
) -> int:
    """Call ``run`` with a function that gets the name of every step before it begins: ``results``,
    which then has all measurements so far, is saved. Prints the results. Returns the exit code."""
    start, show = time.monotonic(), lines()

    def on_step(step: str) -> None:
        # A driver that takes the process down takes no numbers with it.
        results.seconds = time.monotonic() - start
        save_numbers(output, results.to_json())
        show(name, step)

    run(on_step)
    on_step("done")
    console = Console(width=WIDTH)
    print_lines(console, *(f"{fact}: {value}" for fact, value in results.machine.items()))
    console.print(*results.tables())
    print_lines(console, f"Numbers: {output / NUMBERS}")
    bad = [f"Proves nothing: {where}: {why}" for where, why in results.problems.items()]
    bad += [f"{each} failed: {failure}" for each, failure in results.failures.items()]
    print_lines(console, *bad, style="bold red")
    if results.problems:
        return BAD_RESULT
    return RUN_FAILED if results.failures else 0
