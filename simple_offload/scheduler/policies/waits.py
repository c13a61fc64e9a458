"""Waits: how much of a request waits to be stored in one go."""

from collections.abc import Sequence

from simple_offload.scheduler.tier.groups import Groups

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
