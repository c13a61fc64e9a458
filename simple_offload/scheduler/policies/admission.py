"""Admission: whether a prefix has been asked for often enough to be worth a place in the tier."""

from collections import OrderedDict
from typing import TYPE_CHECKING

from vllm.v1.core.kv_cache_utils import BlockHash, BlockHashWithGroupId, get_block_hash

if TYPE_CHECKING:
    from vllm.v1.request import Request

MIN_COUNTED = 65_536
"""Prefixes that are counted at least, whatever the size of the device: some 10 MiB."""


class Admission:
    """Counts by hash how many requests have had a prefix, as a part of their prompts or of what
    they said; the one that computed it first counts too.

    At most ``max_counted`` hashes are remembered, those that were asked for last. What has been
    forgotten starts anew. With a threshold of 1 nothing is counted.
    """

    def __init__(self, threshold: int, max_counted: int = MIN_COUNTED) -> None:
        self.threshold = threshold
        self.max_counted = max_counted
        self.version = 0
        """Grows whenever something may be admitted that was not before."""
        self._counts: OrderedDict[BlockHash, int] = OrderedDict()
        """Least recently asked for first."""
        self._num_noted: dict[str, int] = {}
        """By request, how many of its hashes have been counted."""

    @property
    def num_counted(self) -> int:
        """Hashes that are remembered."""
        return len(self._counts)

    @property
    def num_requests(self) -> int:
        """Requests that are being followed."""
        return len(self._num_noted)

    def note(self, request: "Request") -> None:
        """Count what ``request`` has, each hash once a request however often this is called."""
        if self.threshold == 1:
            return
        hashes = request.block_hashes
        first = self._num_noted.get(request.request_id, 0)
        if first >= len(hashes):
            return
        self._num_noted[request.request_id] = len(hashes)
        # Last hash first: a prefix is to be forgotten from its end.
        for block_hash in reversed(hashes[first:]):
            count = self._counts.get(block_hash, 0) + 1
            self._counts[block_hash] = min(count, self.threshold)
            self._counts.move_to_end(block_hash)
            self.version += count == self.threshold
        while len(self._counts) > self.max_counted:
            self._counts.popitem(last=False)

    def forget(self, request_id: str) -> None:
        """The request has ended. What it has asked for stays counted."""
        self._num_noted.pop(request_id, None)

    def admits(self, key: BlockHashWithGroupId) -> bool:
        """Whether the prefix that ends with the block of ``key`` is worth storing."""
        if self.threshold == 1:
            return True
        return self._counts.get(get_block_hash(key), 0) >= self.threshold
