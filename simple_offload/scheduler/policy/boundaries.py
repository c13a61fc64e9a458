"""Boundaries: the ends of prompts and answers, at which a session's next request goes on."""

from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from vllm.v1.core.kv_cache_utils import BlockHash, BlockHashWithGroupId

from simple_offload.scheduler.tier.cpu_tier import CpuTier
from simple_offload.scheduler.tier.groups import Groups


@dataclass(slots=True, eq=False)
class Boundary:
    """Where a hit may end."""

    num_tokens: int
    last: BlockHash
    """Of the prefix of so many tokens."""
    keys: Sequence[BlockHashWithGroupId]
    """Of the windows and states that such a hit reads."""
    earlier: list["Boundary"] = field(default_factory=list)
    """The ends of the request that came before the one that has ended here."""
    beside: list["Boundary"] = field(default_factory=list)
    """The ends of the last request that has ended here."""
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
        self._at: OrderedDict[BlockHash, Boundary] = OrderedDict()
        """By the last hash of the prefix, the one used last at the end."""
        self._num_needing: Counter[BlockHashWithGroupId] = Counter()
        """By key, the boundaries that need it. No more keys than the tier has blocks."""

    def hit(self, block_hashes: list[BlockHash], num_tokens: int) -> list[Boundary]:
        """A request goes on after a hit of ``num_tokens`` tokens. Releases the boundaries before
        that. Returns the ends, up to there, of the request that has left it."""
        keys = [
            key
            for group in self._groups.ids
            if group not in self._groups.chained_ids
            for key in self._groups.keys(
                block_hashes,
                group,
                self._groups.first_read(num_tokens, group),
                num_tokens // self._groups.block_sizes[group],
            )
        ]
        if not keys:
            return []
        boundary = self._note(block_hashes, num_tokens, keys)
        boundary.num_hits += 1
        for each in boundary.earlier:
            if each.num_hits <= 1:
                self._tier.release(self._forget(each))
        boundary.earlier.clear()
        return [each for each in boundary.beside if each.num_tokens <= num_tokens]

    def add(
        self,
        block_hashes: list[BlockHash],
        ends: Mapping[int, Sequence[BlockHashWithGroupId]],
        earlier: Sequence[Boundary],
    ) -> None:
        """A request has ended, for which ``hit`` had returned ``earlier``. ``ends``: by the tokens
        of a later hit, the keys of windows and states that it reads."""
        left = [self._note(block_hashes, num_tokens, keys) for num_tokens, keys in ends.items()]
        before = [each for each in earlier if each not in left]
        for boundary in left:
            boundary.earlier, boundary.beside = before, left
        while len(self._num_needing) > self._tier.max_contents:
            self._forget(next(iter(self._at.values())))

    def _note(
        self,
        block_hashes: Sequence[BlockHash],
        num_tokens: int,
        keys: Sequence[BlockHashWithGroupId],
    ) -> Boundary:
        """The boundary after ``num_tokens`` tokens, which is used now."""
        last = block_hashes[num_tokens // self._groups.hash_block_size - 1]
        if last not in self._at:
            self._at[last] = Boundary(num_tokens, last, keys)
            self._num_needing.update(keys)
        self._at.move_to_end(last)
        return self._at[last]

    def _forget(self, boundary: Boundary) -> list[BlockHashWithGroupId]:
        """Returns the keys that no other boundary needs."""
        if self._at.get(boundary.last) is not boundary:
            return []
        del self._at[boundary.last]
        self._num_needing.subtract(boundary.keys)
        unneeded = [key for key in boundary.keys if not self._num_needing[key]]
        for key in unneeded:
            del self._num_needing[key]
        return unneeded
