"""EarlyAnnouncement: when to announce a load, which is before its copy has ended."""

import time
from collections.abc import Iterable

_LAG_LIMIT = 2
"""Lags beyond this multiple of ``wait_seconds`` are cut: the request was queued, not delayed."""


class EarlyAnnouncement:
    """Decides how long before its end a load may be announced, and which loads have been.

    vLLM needs time between the announcement of a load and the compute that reads its blocks: it
    receives the announcement, schedules the request, and ends the steps queued before. This lag is
    measured. A load is announced early by the lag plus the time that compute may wait for the rest
    of the copy. That time is ``wait_seconds`` while nothing else runs. Otherwise it is at most the
    length of a step, since other requests wait as well; the device needs about as long anyway until
    the step is queued.

    If ``wait_seconds`` is 0, no load is announced before its end.
    """

    def __init__(self, wait_seconds: float) -> None:
        self.wait_seconds = wait_seconds
        self.lead_seconds = 0.0
        """A load may be announced if this much of its copy is left."""
        self.lag_seconds = 0.0
        """From an announcement to the compute that reads the load's blocks."""
        self._step_seconds = 0.0
        self._began_at = 0.0
        self._computed = False
        self._under_way: dict[int, float | None] = {}
        """Announced loads that have not ended: time of the announcement; None once admitted."""

    def on_step(self, computes: bool, admitted: Iterable[int]) -> None:
        """A step begins: ``computes`` if it has compute, which may read the blocks of the
        ``admitted`` loads. Updates the lag and ``lead_seconds``."""
        now = time.monotonic()
        if self._computed:
            took = min(now - self._began_at, self.wait_seconds)
            self._step_seconds += (took - self._step_seconds) / 4
        self._began_at, self._computed = now, computes
        for load_id in admitted:
            since = self._under_way.get(load_id)
            if since is not None:
                self._under_way[load_id] = None
                self._learn(now - since)
        if self.wait_seconds > 0:
            wait = min(self.wait_seconds, self._step_seconds) if computes else self.wait_seconds
            self.lead_seconds = self.lag_seconds + wait

    def announce(self, load_id: int) -> bool:
        """Note the load's announcement; False if it has been announced before."""
        if load_id in self._under_way:
            return False
        self._under_way[load_id] = time.monotonic()
        return True

    def on_load_ended(self, load_id: int) -> bool:
        """Whether the load that has ended was announced before."""
        if load_id not in self._under_way:
            return False
        since = self._under_way.pop(load_id)
        if since is not None and (passed := time.monotonic() - since) > self.lag_seconds:
            self._learn(passed)  # the request is not admitted yet, so the lag is longer
        return True

    def _learn(self, seconds: float) -> None:
        limit = _LAG_LIMIT * self.wait_seconds
        self.lag_seconds += (min(seconds, limit) - self.lag_seconds) / 2
