"""EarlyAnnouncement: loads that vLLM hears of before they have ended."""

import time
from collections.abc import Iterable

_LAG_LIMIT = 2
"""In ``wait_seconds``: what vLLM takes longer for is no lag, but a request that is kept waiting."""


class EarlyAnnouncement:
    """Which loads have been announced, and how long before its end the next one may be.

    Between the announcement of a load and the compute that reads its blocks vLLM hears of it,
    schedules the request, and ends the steps that it has queued before. That lag is measured. A
    load is announced so long before its end, plus as long as compute may wait for what is then
    left: ``wait_seconds`` while nothing else runs, otherwise no more than a step takes, since
    others wait as well. To queue the step takes about as long, and the device waits for that too.

    With ``wait_seconds`` of 0 no load is announced before its end.
    """

    def __init__(self, wait_seconds: float) -> None:
        self.wait_seconds = wait_seconds
        self.lead_seconds = 0.0
        """How long before its end a load may be announced now."""
        self._lag = 0.0
        self._step_seconds = 0.0
        self._began_at = 0.0
        self._computed = False
        self._under_way: dict[int, float | None] = {}
        """Announced and not ended: since when, until its request is admitted."""

    def begin_step(self, computes: bool, admitted: Iterable[int]) -> None:
        """A step begins, with compute or without, the first that may read what the ``admitted``
        loads fill."""
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
            self.lead_seconds = self._lag + wait

    def announce(self, load_id: int) -> bool:
        """Announce this load; False when it has been."""
        if load_id in self._under_way:
            return False
        self._under_way[load_id] = time.monotonic()
        return True

    def end(self, load_id: int) -> bool:
        """This load has ended; whether it had been announced before."""
        if load_id not in self._under_way:
            return False
        since = self._under_way.pop(load_id)
        if since is not None and (passed := time.monotonic() - since) > self._lag:
            self._learn(passed)  # its request has not been admitted yet: the lag is longer
        return True

    def _learn(self, seconds: float) -> None:
        limit = _LAG_LIMIT * self.wait_seconds
        self._lag += (min(seconds, limit) - self._lag) / 2
