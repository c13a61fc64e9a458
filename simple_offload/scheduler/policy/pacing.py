"""Pacing: when a request is looked at next, and how many blocks are stored at once."""

from collections.abc import Mapping, Sequence
from heapq import heappop, heappush

from simple_offload.scheduler.tier.groups import Groups

_SMALL_STEP = 16
"""Up to this many tokens (a decode step with drafts) a step advances one counter for all requests.
A request that is scheduled more is due at once."""


class Pacer:
    """Spares most requests a look in most steps: of 256 that decode, 240 do not complete a block.

    The tokens scheduled bound the tokens computed. After steps with at most 1, 1 and 3 tokens a
    request, none has computed more than 5; a request that lacks 6 is not due.
    """

    def __init__(self) -> None:
        self._due: dict[str, None] = {}
        """In the order in which they became due."""
        self._postponed: dict[str, int] = {}
        """By request, the value of the counter at which it is due."""
        self._queue: list[tuple[int, str]] = []
        """A heap of these values; entries that do not agree with them are old."""
        self._counter = 0
        """Over all steps, the sum of the most tokens that a request was scheduled in each."""
        self._counter_before = 0
        self._in_big_step: set[str] = set()

    def add(self, request_id: str) -> None:
        """Make the request due."""
        self._postponed.pop(request_id, None)
        self._due[request_id] = None

    def remove(self, request_id: str) -> None:
        self._postponed.pop(request_id, None)
        self._due.pop(request_id, None)

    def clear(self) -> None:
        self._due.clear()
        self._postponed.clear()
        self._queue.clear()

    def on_step(self, num_scheduled: Mapping[str, int]) -> list[str]:
        """A step has been scheduled with these numbers of tokens, by request. Returns the requests
        in it that are due: the step may compute the tokens they lack. They stay due until they are
        postponed."""
        self._counter_before = self._counter
        sizes = set(num_scheduled.values())
        most = max(sizes, default=0)
        self._in_big_step.clear()
        if most > _SMALL_STEP:
            most = max((size for size in sizes if size <= _SMALL_STEP), default=0)
            big = [request_id for request_id, n in num_scheduled.items() if n > _SMALL_STEP]
            self._in_big_step.update(big)
            for request_id in big:  # a set's order differs from process to process
                if self._postponed.pop(request_id, None) is not None:
                    self._due[request_id] = None
        self._counter += most
        queue = self._queue
        while queue and queue[0][0] <= self._counter:
            at, request_id = heappop(queue)
            if self._postponed.get(request_id) == at:
                del self._postponed[request_id]
                self._due[request_id] = None
        return [request_id for request_id in self._due if request_id in num_scheduled]

    def postpone(self, request_id: str, num_lacking: int) -> None:
        """A request that was due in this step is due again once it has computed ``num_lacking``
        more tokens, this step's included."""
        if num_lacking > 0 and request_id not in self._in_big_step:
            self._due.pop(request_id, None)
            self._postponed[request_id] = at = self._counter_before + num_lacking
            heappush(self._queue, (at, request_id))


_MAX_BLOCKS = 8
_MAX_TOKENS = 128
"""Device blocks or tokens of an answer that are recorded at once, whichever is less, but at least a
host block. The scheduler side takes about as long for eight blocks as for one. The device has them
while the request runs, and its end records the rest."""


class Batches:
    """How many blocks of a request are recorded at once. Blocks that may leave the block table
    while their request runs (windows, states) are recorded one by one."""

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        self._sizes = [
            max(1, min(_MAX_BLOCKS // groups.num_sub_blocks, _MAX_TOKENS // size))
            if group in groups.chained_ids
            else 1
            for group, size in enumerate(groups.block_sizes)
        ]
        """By group, in host blocks."""

    def next_at(self, num_recorded: Sequence[int], num_prompt_tokens: int) -> int:
        """Number of a request's tokens that must be complete before its next batch is.
        ``num_recorded``: by group, in host blocks. Full blocks of the prompt do not wait for a
        batch."""
        sizes, batches = self._groups.block_sizes, self._sizes
        most = 0
        for group in self._groups.ids:  # a generator takes far longer
            size = sizes[group]
            at = (num_recorded[group] + 1) * size
            if at <= num_prompt_tokens:
                return at
            batch = at + (batches[group] - 1) * size
            most = min(most, batch) if most else batch
        return most
