"""History: why the caches have lost contents."""

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from simple_offload.miss_reason import MissReason

_NUM_BUCKETS = 1 << 18
_BUCKET_SIZE = 8
_MAX_WAITING = 1024
"""Keys that wait to be entered. numpy takes about as long for hundreds as for one."""

Numbers = NDArray[np.unsignedinteger]


class History:
    """By block hash, the last reason for which contents were lost, or not stored, and when.

    A hash table of 2^21 entries, 18 MiB. Entries enter at a place of their bucket after the other,
    so that the oldest makes room. Of two keys that enter one bucket at the same time, about one in
    500, the first is forgotten.
    """

    def __init__(self) -> None:
        shape = (_NUM_BUCKETS, _BUCKET_SIZE)
        # Pages of zeros take no memory before something is written to them.
        self._tags = np.zeros(shape, np.uint32)
        self._reasons = np.zeros(shape, np.uint8)
        self._times = np.zeros(shape, np.uint32)
        self._num_entered = np.zeros(_NUM_BUCKETS, np.uint8)
        """By bucket, modulo 256."""
        self._waiting: list[tuple[Collection[bytes], MissReason, int]] = []
        self._num_waiting = 0

    def note(self, reason: MissReason, keys: Collection[bytes], now: int = 0) -> None:
        """Contents with ``keys`` (block hashes, whatever stands behind them) are lost for
        ``reason``. ``now``: what ``find`` returns as their time. ``keys`` must not change later."""
        if keys:
            self._waiting.append((keys, reason, now))
            self._num_waiting += len(keys)
            if self._num_waiting > _MAX_WAITING:
                self._enter()

    def find(self, block_hashes: Sequence[bytes]) -> tuple[Numbers, Numbers]:
        """By block hash, the last reason, UNSEEN if there is none, and its time."""
        self._enter()
        buckets, tags = _places(block_hashes)
        of_bucket = self._tags[buckets]
        ages = (self._num_entered[buckets, None] - 1 - np.arange(_BUCKET_SIZE)) % _BUCKET_SIZE
        ages = np.where(of_bucket == tags[:, None], ages, _BUCKET_SIZE)
        newest = ages.argmin(axis=1)
        is_known = ages.min(axis=1) < _BUCKET_SIZE
        reasons = np.where(is_known, self._reasons[buckets, newest], np.uint8(MissReason.UNSEEN))
        return reasons, self._times[buckets, newest]

    def _enter(self) -> None:
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, []
        self._num_waiting = 0
        buckets, tags = _places([key for keys, _, _ in waiting for key in keys])
        counts = [len(keys) for keys, _, _ in waiting]
        reasons = np.repeat([reason for _, reason, _ in waiting], counts)
        times = np.repeat([now for _, _, now in waiting], counts)
        for first in range(0, len(tags), _MAX_WAITING):
            part = slice(first, first + _MAX_WAITING)
            into = buckets[part]
            places = self._num_entered[into] % _BUCKET_SIZE
            self._tags[into, places] = tags[part]
            self._reasons[into, places] = reasons[part]
            self._times[into, places] = times[part]
            self._num_entered[into] += 1


def _places(keys: Collection[bytes]) -> tuple[Numbers, Numbers]:
    """By key, its bucket and its tag there: leading bits of the hash."""
    if not keys:
        return np.zeros(0, np.uint64), np.zeros(0, np.uint32)
    rows = np.frombuffer(b"".join(keys), np.uint8).reshape(len(keys), -1)
    words = np.ascontiguousarray(rows[:, :8]).view(np.uint64).ravel()
    return words % np.uint64(_NUM_BUCKETS), (words >> np.uint64(32)).astype(np.uint32)
