"""ChunkGate: where the thread that opens host memory waits for the script."""

import threading
from collections.abc import Callable

_SECONDS = 60.0
"""After so long the thread will not come any more."""


class ChunkGate:
    """Lets one chunk through at a time. The first one, which is opened before the server starts,
    does not wait."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._waiting = False
        self._verdict: bool | None = True

    def enter(self) -> None:
        """Wait for the script's word. MemoryError when that is that there is no memory."""
        with self._condition:
            if self._verdict is None:
                self._waiting = True
                self._condition.notify_all()
                self._wait_for(lambda: self._verdict is not None)
                self._waiting = False
            granted, self._verdict = self._verdict, None
        if not granted:
            raise MemoryError("no host memory, says the script")

    def wait_until_reached(self) -> None:
        """Return when the thread stands at the gate: what it was let through for is open."""
        with self._condition:
            self._wait_for(lambda: self._waiting)

    def answer(self, granted: bool) -> None:
        """Let the thread, which stands at the gate, have its chunk or not."""
        with self._condition:
            assert self._waiting
            self._verdict = granted
            self._waiting = False
            self._condition.notify_all()

    def _wait_for(self, predicate: Callable[[], bool]) -> None:
        assert self._condition.wait_for(predicate, _SECONDS), "nobody came to the gate"
