"""Pacing: when a request is looked at next, and how many blocks are stored at once."""

from collections.abc import Mapping, Sequence
from heapq import heappop, heappush

from simple_offload.scheduler.tier.groups import Groups

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


_MOST_BLOCKS = 8
_MOST_TOKENS = 128
"""So many device blocks or tokens, whichever is less, but at least a host block. The scheduler side
takes about as long for eight blocks as for one. While the request runs, the device has them, and
when it ends, they wait no longer. One that is preempted before they are stored may lose them, which
is why these are few: it computes them again."""


class Waits:
    """Blocks that leave the block table while their request runs (windows, states) do not wait."""

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        self._counts = [
            max(1, min(_MOST_BLOCKS // groups.num_parts, _MOST_TOKENS // size))
            if group in groups.chained_ids
            else 1
            for group, size in enumerate(groups.block_sizes)
        ]
        """By group, how many host blocks are dealt with in one go."""

    def next_at(self, next_index: Sequence[int], may_wait: bool = True) -> int:
        """How many tokens of a request must be complete before there is something to do for it.
        ``next_index``: by group, its first block that has not been dealt with. That one is enough
        if not ``may_wait``."""
        sizes, counts = self._groups.block_sizes, self._counts
        return min(
            [
                (next_index[group] + (counts[group] if may_wait else 1)) * sizes[group]
                for group in self._groups.ids
            ]
        )

    def are_past(self, num_tokens: int, next_index: Sequence[int]) -> bool:
        """Whether no full block of a request's first ``num_tokens`` tokens is yet to be dealt
        with."""
        sizes = self._groups.block_sizes
        for group in self._groups.ids:  # a generator takes far longer
            if (next_index[group] + 1) * sizes[group] <= num_tokens:
                return False
        return True

    def first_at(self, num_found: int) -> int:
        """``next_at`` for one that has found ``num_found`` tokens and computed none."""
        return self.next_at([num_found // size for size in self._groups.block_sizes])
