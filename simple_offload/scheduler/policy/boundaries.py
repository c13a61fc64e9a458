"""Boundaries: the ends of prompts and answers, at which a session's next request goes on."""

from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from vllm.v1.core.kv_cache_utils import BlockHash, BlockHashWithGroupId, get_block_hash
from vllm.v1.request import Request

from simple_offload.scheduler.tier.cpu_tier import CpuTier
from simple_offload.scheduler.tier.groups import Groups


@dataclass(slots=True, eq=False)
class Boundary:
    """Where a hit may end."""

    num_tokens: int
    """Length of the prefix."""
    last: BlockHash
    """The prefix's last hash."""
    keys: Sequence[BlockHashWithGroupId] = ()
    """Of the windows and states that such a hit reads."""
    earlier: list["Boundary"] = field(default_factory=list)
    """The ends of the request that came before the one that has ended here."""
    beside: list["Boundary"] = field(default_factory=list)
    """The ends of the last request that has ended here."""
    num_hits: int = 0
    """Conversations that have gone on from here."""
    ended: "_End | None" = None
    """The end of the last request that has ended here."""
    gone_on: "_End | None" = None
    """The end of the last request that has gone on from here."""


class _End(NamedTuple):
    """All tokens of a request. A request that begins with them continues its conversation."""

    num_tokens: int
    last: BlockHash | None
    """The hash of its last whole hash block."""
    tail: int
    """A hash of the tokens behind that block."""


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
        self._released: OrderedDict[BlockHash, Boundary] = OrderedDict()
        """As ``_at``, those that a later hit has released. A second conversation may still go on
        from there. No more than the tier has blocks."""

    def hit(self, request: Request, num_tokens: int) -> list[Boundary]:
        """A request goes on after a hit of ``num_tokens`` tokens. Releases the boundaries before
        this one, except those at which no request has ended. Returns the ends of the request that
        has ended here, and this boundary last."""
        keys = [
            key
            for group in self._groups.ids
            if group not in self._groups.chained_ids
            for key in self._groups.keys(
                request.block_hashes,
                group,
                self._groups.first_read(num_tokens, group),
                num_tokens // self._groups.block_sizes[group],
            )
        ]
        if not keys:
            return []
        boundary = self._note(request, num_tokens, keys)
        boundary.num_hits += not self._num_continued(request, boundary.gone_on)
        boundary.gone_on = None  # a second one that continues that request branches off
        useless: list[BlockHashWithGroupId] = []
        for each in boundary.earlier:
            if each.num_hits <= 1 and each.beside:
                useless += self._forget(each)
                each.keys = ()
                each.earlier.clear()
                self._released[each.last] = each
                if len(self._released) > self._tier.max_contents:
                    self._released.popitem(last=False)
        boundary.earlier.clear()
        if useless:
            # Another conversation may need blocks behind this hit: the end of an answer, or the
            # block that a drafter reads behind a boundary.
            before = set(request.block_hashes[: num_tokens // self._groups.hash_block_size])
            self._tier.release([key for key in useless if get_block_hash(key) in before])
        return [*boundary.beside, boundary]

    def num_own(self, request: Request, num_tokens: int) -> int:
        """Tokens of the conversation that a request would continue after a hit of ``num_tokens``
        tokens."""
        place = num_tokens // self._groups.hash_block_size - 1
        boundary = self._at.get(request.block_hashes[place]) if place >= 0 else None
        if boundary is None:
            return 0
        ends = (boundary.ended, boundary.gone_on)
        return max(self._num_continued(request, end) for end in ends)

    def add(
        self,
        request: Request,
        ends: Mapping[int, Sequence[BlockHashWithGroupId]],
        earlier: Sequence[Boundary],
    ) -> None:
        """A request has ended, for which ``hit`` had returned ``earlier``. ``ends``: by the tokens
        of a later hit, the keys of windows and states that it reads."""
        left = [self._note(request, num_tokens, keys) for num_tokens, keys in ends.items()]
        before = [each for each in earlier if each not in left]
        end = self._end(request, request.num_tokens)
        for boundary in left:
            # A hit may be longer than the next one at the end of the request's prompt.
            boundary.earlier = [e for e in before if e.num_tokens < boundary.num_tokens]
            boundary.beside, boundary.ended = left, end
        if earlier:
            earlier[-1].gone_on = end
        while len(self._num_needing) > self._tier.max_contents:
            self._forget(next(iter(self._at.values())))

    def _num_continued(self, request: Request, end: _End | None) -> int:
        """Tokens of the conversation with this ``end``, if ``request`` continues it."""
        if end is None or end != self._end(request, end.num_tokens):
            return 0
        return end.num_tokens

    def _end(self, request: Request, num_tokens: int) -> _End:
        """The end of a request's first ``num_tokens`` tokens. vLLM asks for a waiting request in
        each step, so that this reads no more than a hash block."""
        size = self._groups.hash_block_size
        count = min(num_tokens // size, len(request.block_hashes))
        tail = request.all_token_ids[count * size : num_tokens]
        return _End(
            num_tokens, request.block_hashes[count - 1] if count else None, hash(tuple(tail))
        )

    def _note(
        self,
        request: Request,
        num_tokens: int,
        keys: Sequence[BlockHashWithGroupId],
    ) -> Boundary:
        """The boundary after ``num_tokens`` tokens, which is used now."""
        last = request.block_hashes[num_tokens // self._groups.hash_block_size - 1]
        if last not in self._at:
            boundary = self._released.pop(last, None) or Boundary(num_tokens, last)
            boundary.keys = keys
            self._at[last] = boundary
            self._num_needing.update(keys)
        self._at.move_to_end(last)
        return self._at[last]

    def _forget(self, boundary: Boundary) -> list[BlockHashWithGroupId]:
        """Returns the keys that no other boundary needs."""
        if self._at.get(boundary.last) is boundary:
            del self._at[boundary.last]
            self._num_needing.subtract(boundary.keys)
            for key in boundary.keys:
                if not self._num_needing[key]:
                    del self._num_needing[key]
        return [key for key in boundary.keys if key not in self._num_needing]
