"""Sessions: what each session alone has computed, and may release."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING

from vllm.v1.core.kv_cache_utils import BlockHash

if TYPE_CHECKING:
    from vllm.v1.request import Request

_MAX_CHAINS = 1 << 16
"""Chains that are remembered, those used last: some 20 MiB. A session need not say that it has
ended."""


def session_of(request: "Request") -> bytes:
    """A digest of the request's session and salt. A request without a session is one by itself.
    vLLM limits the length of a salt, but not of a session's id."""
    who = request.session_id and (request.session_id, request.cache_salt)
    return blake2b(repr(who or request.request_id).encode(), digest_size=16).digest()


@dataclass(slots=True)
class _Chain:
    session: bytes
    """The session that has computed it."""
    first: int
    """Place of its first hash among the hashes of each request that goes through it."""
    num_shared: int = 0
    """Hashes, counted from the start of the prompt, that requests of other sessions have found."""


class Sessions:
    """A chain begins with the first block that was not there when a session's request began. What
    follows is the session's own, up to where another chain begins, but for what requests of other
    sessions have found since. If a chain is forgotten, less is released.
    """

    def __init__(self, *, has_full_attention: bool) -> None:
        """Without ``has_full_attention``, blocks behind one that is missing can be found all the
        same. Then a request continues no chain of its session: the blocks may be of others."""
        self._has_full_attention = has_full_attention
        self._chains: OrderedDict[BlockHash, _Chain] = OrderedDict()
        """By the hash of their first block."""
        self._unhashed: dict[str, tuple[Request, int]] = {}
        """By id of a request whose first new block has no hash yet, that request, and the number of
        its hashes that were there."""

    def on_found(self, request: "Request", num_found: int) -> None:
        """``request`` gets blocks, and has found its first ``num_found`` hashes."""
        for other, num_there in list(self._unhashed.values()):
            if len(other.block_hashes) > num_there:
                self.begin(other, num_there)
        session = session_of(request)
        for block_hash in self._chains.keys() & request.block_hashes[:num_found]:
            chain = self._chains[block_hash]
            if chain.session != session:
                chain.num_shared = max(chain.num_shared, num_found)

    def begin(self, request: "Request", num_there: int) -> None:
        """``request``, or a later one of its session, may release what is computed behind its first
        ``num_there`` hashes, which were there. It goes on with a chain of its session, or begins
        one."""
        hashes, session = request.block_hashes, session_of(request)
        last = self._last(hashes[: num_there + 1])
        if last is not None and last.session == session and self._has_full_attention:
            self._chains.move_to_end(hashes[last.first])
        elif num_there < len(hashes):
            self._chains[hashes[num_there]] = _Chain(session, num_there)
            self._chains.move_to_end(hashes[num_there])
            if len(self._chains) > _MAX_CHAINS:
                self._chains.popitem(last=False)
        else:
            self._unhashed[request.request_id] = request, num_there
            return
        self._unhashed.pop(request.request_id, None)

    def on_there(self, request: "Request", num_there: int) -> None:
        """The request's answer has turned out to be there already, up to ``num_there`` hashes."""
        self._begin_late(request)
        chain = self._last(request.block_hashes[:num_there])
        if chain is not None:
            chain.num_shared = max(chain.num_shared, num_there)

    def on_request_finished(self, request: "Request") -> None:
        """``request`` gets no further hashes."""
        self._begin_late(request)
        self._unhashed.pop(request.request_id, None)

    def num_kept(self, request: "Request") -> int:
        """How many of the request's hashes, from the first one on, its session must not release."""
        last = self._last(request.block_hashes)
        if last is None or last.session != session_of(request):
            return len(request.block_hashes)
        return max(last.first, last.num_shared)

    def _begin_late(self, request: "Request") -> None:
        if request.request_id in self._unhashed:
            self.begin(*self._unhashed[request.request_id])

    def _last(self, block_hashes: Sequence[BlockHash]) -> _Chain | None:
        """The chain that the last of these hashes of a request belongs to."""
        chains = [self._chains[each] for each in self._chains.keys() & block_hashes]
        return max(chains, key=lambda chain: chain.first, default=None)
