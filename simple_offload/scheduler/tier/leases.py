"""Leases: until when host blocks are kept before others, as a request has wished."""

import math
from collections.abc import Collection, Iterable, Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple

_MAX_STALE = 64
"""Ids in the queue that may be stale though few blocks have a lease."""


class Lease(NamedTuple):
    """What a request has wished for the blocks that it leaves."""

    until: float
    """When it ends, on the clock of ``Segments``; ``RELEASED``: leave before all others."""
    session: bytes
    """Of the request. A later one of this session may end the lease."""

    @property
    def is_release(self) -> bool:
        """Whether the blocks are to leave before all others."""
        return self.until == RELEASED


RELEASED = -math.inf


class Leases:
    """By block id. A lease ends with its time, with its block's contents, or before."""

    def __init__(self) -> None:
        self._of: dict[int, Lease] = {}
        self._queue: list[tuple[float, list[int]]] = []
        """A heap of ends, and the blocks that got a lease up to then. Entries that do not agree
        with ``_of`` are stale."""
        self._num_queued = 0
        """Ids in it."""

    def __len__(self) -> int:
        return len(self._of)

    def get(self, block_id: int) -> Lease | None:
        """The lease of a block, if it has one."""
        return self._of.get(block_id)

    def extend(self, block_ids: Sequence[int], lease: Lease) -> None:
        """Give these blocks a lease, unless they have a longer one."""
        of = self._of
        longer = [i for i in block_ids if i not in of or of[i].until < lease.until]
        of.update(dict.fromkeys(longer, lease))
        if longer:
            heappush(self._queue, (lease.until, longer))
            self._num_queued += len(longer)
        if self._num_queued > 2 * len(of) + _MAX_STALE:
            self._rebuild()

    def end(self, block_ids: Iterable[int]) -> None:
        """End the leases of those of the blocks that have one."""
        if self._of:
            for block_id in block_ids:
                self._of.pop(block_id, None)
            if not self._of:
                self._queue.clear()
                self._num_queued = 0

    def pop_over(self, now: float) -> list[int]:
        """End the leases whose time is over. Returns their blocks, in the order in which they were
        given."""
        over: dict[int, None] = {}
        while self._queue and self._queue[0][0] <= now:
            until, block_ids = heappop(self._queue)
            self._num_queued -= len(block_ids)
            over.update(
                (i, None) for i in block_ids if (of := self._of.get(i)) and of.until == until
            )
        self.end(over)
        return list(over)

    def blocks(self) -> Collection[int]:
        """Ids of the blocks that have one."""
        return self._of.keys()

    def _rebuild(self) -> None:
        by_end: dict[float, list[int]] = {}
        for block_id, lease in self._of.items():
            by_end.setdefault(lease.until, []).append(block_id)
        self._queue = list(by_end.items())
        self._num_queued = len(self._of)
        heapify(self._queue)
