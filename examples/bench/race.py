"""Race: contenders that take turns at the same work."""

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, Protocol, TypeVar

from simple_offload.config import ConfigError


class Named(Protocol):
    @property
    def name(self) -> str: ...


C = TypeVar("C", bound=Named)
T = TypeVar("T")


class Race(Generic[C]):
    """Runs contenders. One that fails is out, and the others go on."""

    def __init__(self, contenders: Sequence[C], on_step: Callable[[str], None]) -> None:
        """``on_step`` gets the name of every step before it begins."""
        self._on_step = on_step
        self.step = ""
        """The work under way, which a failure is reported with."""
        self.left_out: dict[str, str] = {}
        """Contenders that refuse their settings on this machine, and their reasons."""
        self.failures: dict[str, str] = {}
        """Contenders that ended in an error: the step and the error."""
        self._all = list(contenders)
        self._num_rounds = 0

    def begin(self, step: str) -> None:
        """Go on to another step."""
        if step != self.step:
            self.step = step
            self._on_step(step)

    @contextmanager
    def attempt(self, name: str) -> Iterator[None]:
        """Put the contender out of the race if the block raises: left out for a ConfigError,
        failed for any other exception."""
        try:
            yield
        except ConfigError as error:
            self.left_out[name] = str(error)
        except Exception as error:  # noqa: BLE001 - whatever one fails with, the others can run
            traceback.print_exc()
            self.failures[name] = f"{self.step}: {type(error).__name__}: {error}"

    def run(
        self, step: str, do: Callable[[C], T], which: Callable[[C], bool] = lambda _: True
    ) -> dict[str, T]:
        """Call ``do`` with one contender after another, of those for which ``which`` is true.
        Each call begins with another contender, so that none is always first. Returns results by
        name in the contenders' order, without those that failed."""
        self.begin(step)
        results: dict[str, T] = {}
        out = self.left_out.keys() | self.failures.keys()
        contenders = [each for each in self._all if each.name not in out and which(each)]
        if not contenders:
            return results
        first = self._num_rounds % len(contenders)
        self._num_rounds += 1
        for contender in (*contenders[first:], *contenders[:first]):
            with self.attempt(contender.name):
                results[contender.name] = do(contender)
        return {each.name: results[each.name] for each in contenders if each.name in results}
