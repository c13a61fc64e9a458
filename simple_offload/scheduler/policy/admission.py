"""Admission: whether a prefix was requested often enough to be stored."""

from collections import OrderedDict
from collections.abc import Set

from vllm.v1.core.kv_cache_utils import BlockHash, BlockHashWithGroupId, get_block_hash
from vllm.v1.request import Request

MIN_COUNTED = 65_536
"""Hashes that are counted at least, whatever the size of the device: some 10 MiB."""


class Admission:
    """Counts by hash the requests with a prefix, in their prompts or outputs; the request that
    computed it first counts too.

    At most ``max_counted`` hashes are counted, the most recently requested. A hash that was dropped
    starts anew. With a threshold of 1 nothing is counted.
    """

    def __init__(self, threshold: int, max_counted: int) -> None:
        self.threshold = threshold
        self.max_counted = max_counted
        self._counts: OrderedDict[BlockHash, int] = OrderedDict()
        """Least recently requested first."""
        self._num_seen: dict[str, int] = {}
        """By request, number of its hashes that have been counted."""

    def count(self, request: Request) -> None:
        """Count the hashes of ``request``, each once a request however often this is called."""
        if self.threshold == 1:
            return
        hashes = request.block_hashes
        first = self._num_seen.get(request.request_id, 0)
        if first >= len(hashes):
            return
        self._num_seen[request.request_id] = len(hashes)
        # Last hash first: a prefix is dropped from its end.
        for block_hash in reversed(hashes[first:]):
            count = self._counts.get(block_hash, 0) + 1
            self._counts[block_hash] = min(count, self.threshold)
            self._counts.move_to_end(block_hash)
        while len(self._counts) > self.max_counted:
            self._counts.popitem(last=False)

    def on_request_finished(self, request_id: str) -> None:
        """The request has ended. Its hashes stay counted."""
        self._num_seen.pop(request_id, None)

    def admitted(self, keys: Set[BlockHashWithGroupId]) -> Set[BlockHashWithGroupId]:
        """Those of ``keys`` whose prefix, up to the end of their block, is worth storing."""
        if self.threshold == 1:
            return keys
        counts = self._counts
        return {key for key in keys if counts.get(get_block_hash(key), 0) >= self.threshold}
