"""Boundaries: the ends of prompts and answers, at which a session's next request goes on."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from vllm.v1.core.kv_cache_utils import BlockHash, BlockHashWithGroupId

from simple_offload.scheduler.tier.cpu_tier import CpuTier
from simple_offload.scheduler.tier.groups import Groups


@dataclass(slots=True, eq=False)
class Boundary:
    """Where a hit may end after a request."""

    keys: Sequence[BlockHashWithGroupId]
    """Of the windows and states that such a hit reads."""
    before: "Boundary | None"
    """Where the request itself has gone on."""
    num_hits: int = 0
    """Requests that have gone on from here."""


class Boundaries:
    """Remembers where requests have ended, and which went on from there.

    A conversation has one chain, but windows and states of each turn, and reads those of its last
    turn. Once they are hit, nothing reads those of the turn before: these are released. They stay
    if two conversations went on from there.
    """

    def __init__(self, groups: Groups, tier: CpuTier) -> None:
        self._groups, self._tier = groups, tier
        self._num_keys = 0
        """Of all boundaries: no more than the tier has blocks."""
        self._at: OrderedDict[BlockHash, Boundary] = OrderedDict()
        """By the last hash before it, oldest first."""

    def hit(self, block_hashes: Sequence[BlockHash], num_tokens: int) -> Boundary | None:
        """A request goes on after a hit of ``num_tokens`` tokens. Returns the boundary there, if a
        request has left it. Releases the one before it."""
        place = num_tokens // self._groups.hash_block_size - 1
        boundary = self._at.get(block_hashes[place]) if place >= 0 else None
        if boundary is None:
            return None
        boundary.num_hits += 1
        before, boundary.before = boundary.before, None
        if before is not None and before.num_hits == 1:
            now = set(boundary.keys)
            self._tier.release([key for key in before.keys if key not in now])
        return boundary

    def add(
        self,
        block_hashes: Sequence[BlockHash],
        ends: Mapping[int, Sequence[BlockHashWithGroupId]],
        before: Boundary | None,
    ) -> None:
        """A request has ended, which had gone on at ``before``. ``ends``: by the tokens of a later
        hit, the keys of windows and states that it reads."""
        boundary = Boundary(list(dict.fromkeys(chain(*ends.values()))), before)
        for num_tokens in ends:
            place = num_tokens // self._groups.hash_block_size - 1
            if place >= 0:
                self._forget(block_hashes[place])
                self._at[block_hashes[place]] = boundary
                self._num_keys += len(boundary.keys)
        while self._num_keys > self._tier.max_contents:
            self._forget(next(iter(self._at)))

    def _forget(self, block_hash: BlockHash) -> None:
        if (boundary := self._at.pop(block_hash, None)) is not None:
            self._num_keys -= len(boundary.keys)
