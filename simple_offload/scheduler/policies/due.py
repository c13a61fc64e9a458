"""Due: which requests may have come so far that there is something to do for them."""

from collections.abc import Mapping
from heapq import heappop, heappush

_SMALL_STEP = 16
"""Tokens that a request is scheduled at most in a step that all requests are counted through
together: what decodes, drafts included. One that is scheduled more is due."""


class Due:
    """Spares most requests a look in most steps: of 256 that decode, 240 do not complete a block.

    What a request has computed grows by what it is scheduled. So after steps of 1, 1 and 3
    tokens (the most that any was scheduled) it has 5 more than before at most, and one that
    lacks 6 cannot have them yet.
    """

    def __init__(self, ahead: bool = False) -> None:
        """``ahead``: a request is due in the very step that is scheduled the tokens which it
        lacks, not in the first after it."""
        self._ahead = ahead
        self._due: dict[str, None] = {}
        """In the order in which they became due."""
        self._put_off: dict[str, int] = {}
        """By request, the sum of steps from which on it is due."""
        self._queue: list[tuple[int, str]] = []
        """A heap of those; what does not agree with them is of the past."""
        self._sum = 0
        """Of the steps so far: of the most tokens that a request was scheduled in each."""
        self._sum_before = 0
        self._in_big_step: set[str] = set()

    def follow(self, request_id: str) -> None:
        """The request is due."""
        self._put_off.pop(request_id, None)
        self._due[request_id] = None

    def forget(self, request_id: str) -> None:
        """The request is not followed any more."""
        self._put_off.pop(request_id, None)
        self._due.pop(request_id, None)

    def clear(self) -> None:
        """No request is followed any more."""
        self._due.clear()
        self._put_off.clear()
        self._queue.clear()

    def step(self, num_scheduled: Mapping[str, int]) -> list[str]:
        """A step has been scheduled with so many tokens of each request: those of them that are
        due, and stay so until they are put off."""
        self._sum_before = self._sum
        sizes = set(num_scheduled.values())
        most = max(sizes, default=0)
        self._in_big_step.clear()
        if most > _SMALL_STEP:
            most = max((size for size in sizes if size <= _SMALL_STEP), default=0)
            self._in_big_step.update([r for r, n in num_scheduled.items() if n > _SMALL_STEP])
            for request_id in self._in_big_step:
                if self._put_off.pop(request_id, None) is not None:
                    self._due[request_id] = None
        self._sum += most
        queue, reached = self._queue, self._sum if self._ahead else self._sum_before
        while queue and queue[0][0] <= reached:
            at, request_id = heappop(queue)
            if self._put_off.get(request_id) == at:
                del self._put_off[request_id]
                self._due[request_id] = None
        return [request_id for request_id in self._due if request_id in num_scheduled]

    def put_off(self, request_id: str, num_lacking: int) -> None:
        """There is nothing to do for a request that was due in this step before it has computed
        ``num_lacking`` more tokens, this step's included."""
        if num_lacking > 0 and request_id not in self._in_big_step:
            self._due.pop(request_id, None)
            self._put_off[request_id] = at = self._sum_before + num_lacking
            heappush(self._queue, (at, request_id))
