"""Sessions: how much of its prefix each session has found when it began."""

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.request import Request

_MAX_SESSIONS = 1 << 16
"""Sessions that are remembered, the most recent ones: some 15 MiB. A session need not say that it
has ended."""


class Sessions:
    """What a session's first request finds was there before: others may share it. The rest of its
    chain is the session's own. A request without a session is one by itself."""

    def __init__(self) -> None:
        self._num_found: OrderedDict[tuple[str, str | None], int] = OrderedDict()
        """By session and salt, in tokens."""

    def on_found(self, request: "Request", num_found_tokens: int) -> int:
        """``request`` begins, and has found so many of its tokens. Returns how many its session
        found first."""
        if not request.session_id:
            return num_found_tokens
        key = request.session_id, request.cache_salt
        first = self._num_found.setdefault(key, num_found_tokens)
        self._num_found.move_to_end(key)
        if len(self._num_found) > _MAX_SESSIONS:
            self._num_found.popitem(last=False)
        return first

    def end(self, request: "Request") -> None:
        """``request`` is the last one of its session."""
        if request.session_id:
            self._num_found.pop((request.session_id, request.cache_salt), None)
