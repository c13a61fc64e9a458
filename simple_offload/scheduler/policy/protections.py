"""Protections: what requests want protected for some time."""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import inf

from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId

from simple_offload.scheduler.tier.cpu_tier import CpuTier

PROTECTIONS_SHARE = 0.25
"""Share of the tier that may be protected so: more would take it from what requests hit."""


@dataclass(slots=True)
class _Protection:
    until: float
    keys: dict[BlockHashWithGroupId, None]


class Protections:
    """Reservations that end with their time. Wishes of one session add up, and end together with
    the last. Beyond the share, the session ends first that has wished nothing for longest."""

    clock: Callable[[], float] = staticmethod(time.monotonic)

    def __init__(self, tier: CpuTier) -> None:
        self._tier = tier
        self._by_session: OrderedDict[bytes, _Protection] = OrderedDict()
        """The session that has wished last comes last."""
        self._num_keys = 0
        self._next_end = inf
        """No session ends before."""

    def add(self, session: bytes, seconds: float, keys: Iterable[BlockHashWithGroupId]) -> None:
        """A request of ``session`` wants contents with ``keys``, parents before children, protected
        from now on."""
        until = self.clock() + seconds
        known = self._by_session.setdefault(session, _Protection(until, {}))
        self._by_session.move_to_end(session)
        known.until = max(known.until, until)
        self._next_end = min(self._next_end, until)
        limit = int(PROTECTIONS_SHARE * self._tier.max_contents)
        wanted = dict.fromkeys(key for key in keys if key not in known.keys)
        new = list(wanted)[: max(0, limit - len(known.keys))]
        known.keys.update(dict.fromkeys(new))
        self._num_keys += len(new)
        self._tier.reserve(new)
        while self._num_keys > limit:
            self.end(next(iter(self._by_session)))
        if not known.keys:
            self.end(session)  # the share bounds the others only

    def end(self, session: bytes) -> None:
        """The wishes of ``session`` count no more."""
        known = self._by_session.pop(session, None)
        if known is not None:
            self._num_keys -= len(known.keys)
            self._tier.unreserve(known.keys)

    def on_step(self) -> None:
        if self._by_session and self.clock() >= self._next_end:
            now = self.clock()
            for session in [s for s, each in self._by_session.items() if each.until <= now]:
                self.end(session)
            self._next_end = min((each.until for each in self._by_session.values()), default=inf)

    def clear(self) -> None:
        for session in [*self._by_session]:
            self.end(session)
