"""Owners: which contents one session alone has computed, and may release."""

from collections import OrderedDict
from collections.abc import Iterable
from hashlib import blake2b

from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId
from vllm.v1.request import Request

_MIN_KEYS = 1 << 16


def session_of(request: Request) -> bytes:
    """A digest of the request's session and salt. A request without a session is one by itself.
    vLLM limits the length of a salt, but not of a session's id."""
    who = request.session_id and (request.session_id, request.cache_salt)
    return blake2b(repr(who or request.request_id).encode(), digest_size=16).digest()


class Owners:
    """Sessions that may release contents. A key has no owner once a second session hits or computes
    its contents.

    The owners of the last keys are remembered; a session need not say that it has ended. A
    forgotten key is not released.
    """

    def __init__(self, num_blocks: int) -> None:
        """Remember twice ``num_blocks`` keys, or more."""
        self._max_keys = max(_MIN_KEYS, 2 * num_blocks)
        self._of: OrderedDict[BlockHashWithGroupId, bytes] = OrderedDict()

    def __len__(self) -> int:
        return len(self._of)

    def claim(self, session: bytes, keys: Iterable[BlockHashWithGroupId]) -> None:
        """``session`` has computed contents with ``keys``, which neither cache had."""
        for key in keys:
            if self._of.setdefault(key, session) != session:
                del self._of[key]
            else:
                self._of.move_to_end(key)
        while len(self._of) > self._max_keys:
            self._of.popitem(last=False)

    def share(self, session: bytes, keys: Iterable[BlockHashWithGroupId]) -> None:
        """``session`` has hit contents with ``keys``, or has computed them once more."""
        for key in self._of.keys() & keys if self._of else ():
            if self._of[key] != session:
                del self._of[key]

    def of(self, key: BlockHashWithGroupId) -> bytes | None:
        """The session that may release contents with ``key``."""
        return self._of.get(key)
