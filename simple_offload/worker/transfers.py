"""TransferEngine: both directions of copies, each in a lane of its own."""

import sys
import threading
from collections.abc import Collection

from simple_offload.backends.base import Barrier, CopyBackend, Direction
from simple_offload.metadata import Transfer
from simple_offload.worker.lane import Completion, Lane

_SWITCH_SECONDS = 1e-3
"""After how long a thread that waits for Python's interpreter lock asks its holder to let go.
vLLM's thread that takes in requests holds it for a millisecond a prompt; the thread that runs the
model gives it up with most calls to the device, and by Python's default waits 5 ms to get it back:
as long as it takes to copy 256 MiB."""


class _ShortTurns:
    """Lets Python's threads take turns more often while some engine of this process is open."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_open = 0
        self._usual_seconds = 0.0

    def begin(self) -> None:
        with self._lock:
            if self._num_open == 0:
                self._usual_seconds = sys.getswitchinterval()
                sys.setswitchinterval(min(self._usual_seconds, _SWITCH_SECONDS))
            self._num_open += 1

    def end(self) -> None:
        with self._lock:
            self._num_open -= 1
            if self._num_open == 0:
                sys.setswitchinterval(self._usual_seconds)


_short_turns = _ShortTurns()


class TransferEngine:
    """Hands transfers to a backend, loads and stores on a thread of their own each, or on the
    engine's: to submit a large store may take its thread milliseconds, and a load must not wait
    for that.

    All methods are called by the engine's thread. Every transfer that was submitted is
    returned by ``poll`` (or ``close``) exactly once. Until the last engine of a process is closed,
    Python's threads take turns every millisecond (``sys.setswitchinterval``).
    """

    def __init__(self, backend: CopyBackend) -> None:
        self._backend = backend
        self._lanes = {direction: Lane(backend, direction) for direction in Direction}
        self._closed = False
        _short_turns.begin()

    @property
    def broken(self) -> bool:
        """Whether a copy thread has died once too often. What is submitted now fails."""
        return any(lane.broken for lane in self._lanes.values())

    @property
    def stuck(self) -> bool:
        """Whether a thread goes on although the engine has been closed."""
        return any(lane.stuck for lane in self._lanes.values())

    def submit(self, direction: Direction, transfer: Transfer, barrier: Barrier | None) -> None:
        """Queue ``transfer``; it starts after ``barrier`` and after earlier ones of its
        direction."""
        if self._closed:
            raise RuntimeError("the transfer engine is closed")
        self._lanes[direction].submit(transfer, barrier)

    def poll(self, direction: Direction) -> list[Completion]:
        """Transfers of ``direction`` that have ended since the last call. Never waits."""
        return self._lanes[direction].poll()

    def nearly_done(self, direction: Direction, seconds: float) -> list[Transfer]:
        """Transfers of ``direction`` that have been handed to the device without error, that
        the last ``poll`` did not return, and that should end within ``seconds``. Never waits."""
        return self._lanes[direction].nearly_done(seconds)

    def hold_compute(self, direction: Direction, transfer_ids: Collection[int]) -> None:
        """Let compute that is queued from now on wait for the copies of these transfers, as far
        as they are under way. Does not wait itself."""
        self._lanes[direction].hold_compute(transfer_ids)

    def settle(self) -> None:
        """Wait until the threads have handed everything that was submitted to the device. The
        copies themselves may still be under way."""
        for lane in self._lanes.values():
            lane.settle()

    def drain(self) -> None:
        """Wait until everything that was submitted has ended. ``poll`` still returns it."""
        for lane in self._lanes.values():
            lane.drain()

    def close(self) -> list[Completion]:
        """Finish what was submitted, join the threads, close the backend. Returns what ``poll``
        had not. Calling it again does nothing.

        A thread that does not end within a minute is left behind, and the backend, whose memory
        it may be writing to, is left open."""
        if self._closed:
            return []
        self._closed = True
        _short_turns.end()
        completions = [end for lane in self._lanes.values() for end in lane.close()]
        if not self.stuck:
            self._backend.close()
        return completions
