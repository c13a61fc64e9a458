"""Room: how much a server may write to a directory."""

import sys
import time
from collections.abc import Callable
from typing import NamedTuple

_STALE_SECONDS = 60.0
"""A scan is repeated after this time, as other servers write too."""


class Seen(NamedTuple):
    """What a scan found; by itself, nothing."""

    at: float = 0.0
    """When the scan began, in seconds since 1970."""
    write_until: int = 0
    """Bytes since the server's start. At this number it stops writing."""
    ask_at: int = 0
    """Bytes at which to request the next scan, so that it ends before the room is used up."""


class Room:
    """Counts what this server writes, and compares it with what the last scan saw."""

    def __init__(
        self,
        max_bytes: int | None,
        ask: Callable[[], None],
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """``max_bytes``: limit of the directory. ``ask``: for a scan."""
        self._max_bytes = max_bytes
        self._ask = ask
        self._clock = clock
        self._written = 0
        self._seen = Seen()
        self._is_asked = True
        """Whether a scan was asked for and has not ended. The directory's start is one."""

    def on_seen(self, seen: Seen) -> None:
        """A scan has ended. It has seen nothing if it failed."""
        self._seen = seen
        self._is_asked = False

    def on_written(self, num_bytes: int) -> None:
        """Count ``num_bytes`` that this server has written."""
        self._written += num_bytes

    def left(self) -> int:
        """Bytes that this server may still write; those of writes in flight are not yet taken off.
        ``sys.maxsize`` without a limit, 0 until the first scan has ended. Asks for a scan where one
        is due. So call it again after a 0."""
        if self._max_bytes is None:
            return sys.maxsize
        is_stale = self._clock() > self._seen.at + _STALE_SECONDS
        if not self._is_asked and (self._written >= self._seen.ask_at or is_stale):
            self._is_asked = True
            self._ask()
        return max(0, self._seen.write_until - self._written)
