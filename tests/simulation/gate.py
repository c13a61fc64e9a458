"""ChunkGate: makes the thread that opens host memory wait for the script."""

import threading
from collections.abc import Callable

_SECONDS = 60.0
"""Seconds after which the thread is missing."""


class ChunkGate:
    """Admits one chunk at a time. The first chunk does not wait: it is opened before the server
    starts."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._waiting = False
        self._verdict: bool | None = True

    def enter(self) -> None:
        """Wait for the script. Raises MemoryError if the script grants no memory."""
        with self._condition:
            if self._verdict is None:
                self._waiting = True
                self._condition.notify_all()
                self._wait_for(lambda: self._verdict is not None)
                self._waiting = False
            granted, self._verdict = self._verdict, None
        if not granted:
            raise MemoryError("no host memory, by script")

    def wait_until_reached(self) -> None:
        """Return when the thread waits at the gate: the chunk before is open."""
        with self._condition:
            self._wait_for(lambda: self._waiting)

    def answer(self, granted: bool) -> None:
        """Grant the waiting thread its chunk, or refuse it."""
        with self._condition:
            assert self._waiting
            self._verdict = granted
            self._waiting = False
            self._condition.notify_all()

    def _wait_for(self, predicate: Callable[[], bool]) -> None:
        assert self._condition.wait_for(predicate, _SECONDS), "no thread came to the gate"
