"""Helper: does in another process what would take Python's lock once an object."""

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar, TypeVarTuple

from simple_offload.logs import get_logger
from simple_offload.second_tier import helper_main
from simple_offload.second_tier.directory import Directory
from simple_offload.second_tier.process import Message, Process
from simple_offload.second_tier.rows import Rows
from simple_offload.second_tier.seals import Seals
from simple_offload.shared_memory import SEAL_BYTES

logger = get_logger(__name__)

_START_SECONDS = 60.0
T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")


class Helper:
    """Seals of rows, and the directory of vLLM's ``fs`` tier, if that is the one.

    Threads of the engine's process took Python's lock once an object, and vLLM's steps waited for
    it (docs/measurements.md).

    Nothing here waits for the process but ``wait`` and ``close``. One thread calls all of it.
    """

    def __init__(self, connect: Callable[[], Process]) -> None:
        """``connect``: start a process, and tell it what to work on. Raises OSError where that
        does."""
        self.clock: Callable[[], float] = time.monotonic
        """For ``waiting_since``."""
        self.error: Exception | None = None
        """Why the process can be used no more."""
        self.write_until = 0
        """Bytes since the process's start at which to stop writing. To a directory none are written
        before its first scan, or after one that failed."""
        self._written = 0
        self._connect = connect
        self._connection = connect()
        self._unanswered: dict[int, tuple[float, Future[Any]]] = {}
        self._last_id = 0

    def restart(self) -> None:
        """Start another process in the place of one that has failed, and is killed if it has not
        ended. The new one answers once it is ready."""
        self._connection.close(0.0)
        try:
            self._connection = self._connect()
        except OSError as error:
            self.error = error
            return
        self.error = None
        self.write_until = self._written = 0

    # What it is to do

    def ask(self, method: Callable[[Seals, *Arguments], T], *arguments: *Arguments) -> "Future[T]":
        """Have the process call a method of its ``Seals``. Cancelled if it has failed."""
        future: Future[T] = Future()
        if self.error is not None:
            future.cancel()
            return future
        self._last_id += 1
        self._unanswered[self._last_id] = self.clock(), future
        self._send((self._last_id, method.__name__, *arguments))
        return future

    def tell(
        self,
        method: Callable[[Directory, Sequence[str], *Arguments], None],
        paths: Sequence[str],
        *arguments: *Arguments,
    ) -> None:
        """Have it call a method of its ``Directory``, if there are ``paths``."""
        if paths:
            self._send((0, method.__name__, paths, *arguments))

    @property
    def room(self) -> int:
        """Bytes that may still be written; those of writes in flight are not yet taken off."""
        return max(0, self.write_until - self._written)

    def on_written(self, paths: Sequence[str], num_bytes: int) -> None:
        """As ``Directory.on_written``."""
        self._written += num_bytes
        self.tell(Directory.on_written, paths, num_bytes)

    # The process

    @property
    def waiting_since(self) -> float | None:
        """When the oldest question without an answer was asked."""
        return next((since for since, _ in self._unanswered.values()), None)

    def poll(self, seconds: float = 0.0) -> None:
        """Take note of what has come."""
        if self.error is not None:
            return
        try:
            for what, *arguments in self._connection.receive(seconds):
                if what == "answer":
                    number, answer = arguments
                    _, future = self._unanswered.pop(number)
                    future.set_result(answer)
                elif what == "seen":
                    [self.write_until] = arguments
                elif what == "trouble":
                    logger.warning(*arguments)
                else:
                    raise OSError(*arguments)
        except (EOFError, OSError) as error:
            self._fail(error)

    def wait(self, seconds: float = math.inf) -> None:
        """Wait until all questions have answers, or the process has failed. It fails if it does not
        answer within ``seconds``."""
        deadline = time.monotonic() + seconds
        while self._unanswered and self.error is None:
            self.poll(min(1.0, seconds))
            if time.monotonic() > deadline:
                self._fail(TimeoutError(f"it did not answer within {seconds:.0f} s"))

    def close(self, seconds: float = 10.0) -> None:
        """Let the process do what it was told, and end. As ``Process.close``."""
        self._connection.close(seconds)

    def _send(self, message: Message) -> None:
        if self.error is None:
            try:
                self._connection.send(message)
            except OSError as error:
                self._fail(error)

    def _fail(self, error: Exception) -> None:
        self.error = error
        logger.error("The second tier's process has failed: %s", error)
        for _, future in self._unanswered.values():
            future.cancel()
        self._unanswered.clear()


def start_helper(rows: Rows, root: Path | None, max_bytes: int | None) -> Helper:
    """A helper for ``rows`` and the directory ``root``, if there is one, with its process. Raises
    OSError if that does not start, or if the directory cannot be used (``Directory``)."""
    descriptor, offset = rows.memory.file
    place = (descriptor, offset, *rows.array.shape, SEAL_BYTES)

    def connect() -> Process:
        process = Process(helper_main.__name__, [descriptor])
        process.send((place, None if root is None else (str(root), max_bytes)))
        return process

    helper = Helper(connect)
    helper.ask(Seals.make, (), ())  # it answers once it has opened the directory
    helper.wait(_START_SECONDS)
    if helper.error is not None:
        helper.close()
        raise OSError(str(helper.error)) from helper.error
    return helper
