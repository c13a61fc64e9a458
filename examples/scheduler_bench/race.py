"""Race: contenders that take turns at the same work."""

import traceback
from collections.abc import Callable, Sequence
from typing import TypeVar

from examples.scheduler_bench.contenders import Contender
from examples.scheduler_bench.engine import Engine, Shape
from simple_offload.config import ConfigError

T = TypeVar("T")


class Race:
    """Who is in it, and why the others are not. One that fails is out; the others go on."""

    def __init__(self, contenders: Sequence[Contender]) -> None:
        self.left_out: dict[str, str] = {}
        """Contenders that refuse their settings, and in which words."""
        self.failures: dict[str, str] = {}
        """Contenders that ended in an error, and at what with which."""
        self._contenders = list(contenders)
        self._num_rounds = 0
        for contender in contenders:
            try:
                Engine(contender, Shape(device_blocks=64, host_blocks=64)).close()
            except ConfigError as error:
                self.left_out[contender.name] = str(error)
            except Exception as error:  # noqa: BLE001 - whatever one fails with, others can run
                self._fail(contender, "start", error)

    @property
    def contenders(self) -> list[Contender]:
        """Those that are still in it."""
        out = {*self.left_out, *self.failures}
        return [contender for contender in self._contenders if contender.name not in out]

    def each(
        self,
        what: str,
        do: Callable[[Contender], T],
        which: Callable[[Contender], bool],
    ) -> dict[str, T]:
        """``do`` for one contender after another, of those ``which`` holds for, by name. Each
        call begins with another one, so that nobody is always first. ``what`` names the work
        where it fails."""
        results: dict[str, T] = {}
        contenders = [contender for contender in self.contenders if which(contender)]
        if not contenders:
            return results
        first = self._num_rounds % len(contenders)
        self._num_rounds += 1
        for contender in (*contenders[first:], *contenders[:first]):
            try:
                results[contender.name] = do(contender)
            except Exception as error:  # noqa: BLE001 - as above
                self._fail(contender, what, error)
        return results

    def _fail(self, contender: Contender, what: str, error: Exception) -> None:
        traceback.print_exception(error)
        self.failures[contender.name] = f"{what}: {type(error).__name__}: {error}"
