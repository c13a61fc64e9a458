"""Waits: how much of what a request says waits to be stored in one go."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from simple_offload.scheduler.groups import Groups

if TYPE_CHECKING:
    from vllm.v1.request import Request

_MOST_BLOCKS = 8
_MOST_TOKENS = 128
"""So many device blocks or tokens, whichever is less, but at least a host block. The scheduler side
takes about as long for eight blocks as for one. While the request runs, the device has them. One
that is preempted before they are stored may lose them, which is why these are few: it computes them
again."""


class Waits:
    """Blocks of a prompt wait for no others, nor do those that leave the block table while their
    request runs (windows, states)."""

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        self._counts = [
            max(1, min(_MOST_BLOCKS // groups.num_parts, _MOST_TOKENS // size))
            if group in groups.chained_ids
            else 1
            for group, size in enumerate(groups.block_sizes)
        ]
        """By group, how many host blocks beyond the prompt are dealt with in one go."""

    def next_at(self, request: "Request", next_index: Sequence[int], may_wait: bool = True) -> int:
        """How many tokens of the request must be complete before there is something to do for it.
        ``next_index``: by group, its first block that has not been dealt with. That one is enough
        if it is the prompt's, or not ``may_wait``."""
        at = []
        for group in self._groups.ids:
            index, size = next_index[group], self._groups.block_sizes[group]
            waits = may_wait and (index + 1) * size > request.num_prompt_tokens
            at.append((index + (self._counts[group] if waits else 1)) * size)
        return min(at)
