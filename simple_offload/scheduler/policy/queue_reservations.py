"""QueueReservations: what the requests in vLLM's queue will hit."""

from bisect import bisect_left, insort
from itertools import count
from math import inf
from typing import NamedTuple

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId
from vllm.v1.request import Request

from simple_offload.scheduler.tier import block_pool
from simple_offload.scheduler.tier.cpu_tier import CpuTier
from simple_offload.scheduler.tier.groups import Groups

RESERVED_SHARE = 0.75
"""Share of the tier that may be reserved. The rest is for new contents."""


class _Waiting(NamedTuple):
    """A request in vLLM's queue. Tuples are in vLLM's order (``Request.__lt__``)."""

    priority: int
    """The lowest number is served first. 0 without priorities."""
    arrival: float
    number: int
    """Of requests that came before: without priorities, their order."""
    request: Request
    keys: list[BlockHashWithGroupId]
    """Reserved for it."""


class QueueReservations:
    """Reserves what the first requests of vLLM's queue will hit.

    They want it soon, and in the order of the queue. By last use, the tier would lose the contents
    of the first request first, which has waited longest. So where requests come faster than the
    engine serves them, each would lose its contents before its turn. Knowledge of the future goes
    before last use (Patterson et al., "Informed prefetching and caching", SOSP 1995).

    With vLLM's priorities, some requests may wait for ever. Their reservations would take the tier
    from requests that are served. So a request that gets blocks before others of a lower priority
    takes room: fewer blocks are reserved for the last of these. Each other request returns as much.
    """

    def __init__(
        self, tier: CpuTier, groups: Groups, device_pool: BlockPool, *, by_priority: bool
    ) -> None:
        self._tier = tier
        self._groups = groups
        self._device_pool = device_pool
        self._by_priority = by_priority
        self._numbers = count()
        self._waiting: dict[str, _Waiting] = {}
        """Requests of the two lists, by id."""
        self._served: list[_Waiting] = []
        """Requests with reservations, in vLLM's order."""
        self._later: list[_Waiting] = []
        """Requests without, in vLLM's order."""
        self._num_taken = 0
        """Blocks of the share that requests of higher priorities have taken."""

    def add(self, request: Request) -> None:
        """A request has joined vLLM's queue."""
        waiting = _Waiting(*self._order(request), next(self._numbers), request, [])
        self._waiting[request.request_id] = waiting
        insort(self._later, waiting)

    def on_allocated(self, request: Request) -> None:
        """A request gets its blocks, before it is removed from the queue."""
        sizes = self._groups.block_sizes
        size = sum(request.num_tokens // sizes[group] for group in self._groups.ids)
        priority, _ = self._order(request)
        if self._served and self._served[-1].priority > priority:
            self._num_taken += self._give_up(size, (priority, inf))
        else:
            self._num_taken = max(0, self._num_taken - size)

    def remove(self, request_id: str) -> None:
        """A request has left the queue."""
        waiting = self._waiting.pop(request_id, None)
        if waiting is None:
            return
        requests = self._served if waiting.keys else self._later
        del requests[bisect_left(requests, waiting)]
        if waiting.keys:
            self._tier.unreserve(waiting.keys)

    def on_step(self) -> None:
        """A step has been scheduled. Requests that are still in the queue wait."""
        tier, later, served = self._tier, self._later, self._served
        if not later:
            return
        share = int(RESERVED_SHARE * tier.max_contents) - self._num_taken
        room = share - tier.num_reserved
        while later:
            waiting = later[0]
            limit = share if served and waiting < served[-1] else room
            if limit <= 0:
                return
            del later[0]
            keys = self._keys_of(waiting.request, limit)
            room += self._give_up(len(keys) - room, waiting)
            waiting.keys.extend(keys[: max(0, room)])
            room -= len(waiting.keys)
            if waiting.keys:
                tier.reserve(waiting.keys)
                insort(served, waiting)
            else:
                del self._waiting[waiting.request.request_id]

    def _order(self, request: Request) -> tuple[int, float]:
        return (request.priority, request.arrival_time) if self._by_priority else (0, 0.0)

    def _give_up(self, limit: int, after: tuple[object, ...]) -> int:
        """Call off up to ``limit`` reservations of requests behind ``after`` in vLLM's order, from
        the last one's last on. Returns how many contents are reserved no more."""
        num_before = self._tier.num_reserved
        while limit > 0 and self._served and self._served[-1] > after:
            last = self._served[-1]
            keys = last.keys[-limit:]
            del last.keys[-limit:]
            self._tier.unreserve(keys)
            limit -= len(keys)
            if not last.keys:
                insort(self._later, self._served.pop())
        return num_before - self._tier.num_reserved

    def _keys_of(self, request: Request, limit: int) -> list[BlockHashWithGroupId]:
        """The first ``limit`` keys that the request would hit now, in the tier and on the
        device."""
        if request.skip_reading_prefix_cache:
            return []
        if not self._tier.is_exclusive:  # it has the device's contents too
            hit = self._tier.lookup(request.block_hashes, 0, request.num_tokens - 1)
            keys = [key for key in block_pool.keys_of(hit.pins) if key is not None]
            return keys[:limit]
        (group,) = self._groups.ids
        keys = self._groups.keys(request.block_hashes, group, 0, limit)
        on_device = block_pool.cached(self._device_pool)
        has = self._tier.has
        stop = next(
            (i for i, key in enumerate(keys) if not has(key) and key not in on_device), None
        )
        return keys[:stop]
