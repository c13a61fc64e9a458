"""History: why the caches have lost contents."""

from collections.abc import Collection, Sequence
from itertools import repeat

import numpy as np
from numpy.typing import NDArray

from simple_offload.miss_reason import MissReason

_NUM_BUCKETS = 1 << 16
"""By the first two bytes of a key."""
_BUCKET_SIZE = 8
_MAX_RECENT = 256
"""Keys that wait to be entered. numpy takes about as long for hundreds as for one."""

Numbers = NDArray[np.unsignedinteger]


class History:
    """By key, the last reason for which contents were lost, or not stored, and when.

    The last ones are in a dict, and the others in a hash table of 2^19 entries, 4.5 MiB. Entries
    enter at a place of their bucket after the other, so that the oldest makes room. Of two keys
    that enter one bucket at the same time, about one in 500, the first is forgotten.
    """

    def __init__(self) -> None:
        shape = (_NUM_BUCKETS, _BUCKET_SIZE)
        # Pages of zeros take no memory before something is written to them.
        self._tags = np.zeros(shape, "<u4")
        self._reasons = np.zeros(shape, np.uint8)
        self._times = np.zeros(shape, np.uint32)
        self._num_entered = np.zeros(_NUM_BUCKETS, np.uint8)
        """By bucket, modulo 256."""
        self._recent: dict[bytes, tuple[MissReason, int]] = {}

    def note(self, reason: MissReason, keys: Collection[bytes], now: int = 0) -> None:
        """Contents with ``keys`` are lost for ``reason``. ``now``: what ``find`` returns as their
        time."""
        self._recent.update(zip(keys, repeat((reason, now))))
        if len(self._recent) > _MAX_RECENT:
            self._enter()

    def knows(self, keys: Sequence[bytes]) -> bool:
        """Whether there is a reason for one of a few keys."""
        if not self._recent.keys().isdisjoint(keys):
            return True
        tags = self._tags
        return any(key[4:8] in tags[int.from_bytes(key[:2], "little")].tobytes() for key in keys)

    def find(self, keys: Sequence[bytes]) -> tuple[Numbers, Numbers]:
        """By key, the last reason, UNSEEN if there is none, and its time."""
        self._enter()
        buckets, tags = _places(keys)
        ages = (self._num_entered[buckets, None] - 1 - np.arange(_BUCKET_SIZE)) % _BUCKET_SIZE
        ages = np.where(self._tags[buckets] == tags[:, None], ages, _BUCKET_SIZE)
        newest = ages.argmin(axis=1)
        is_known = ages.min(axis=1) < _BUCKET_SIZE
        reasons = np.where(is_known, self._reasons[buckets, newest], np.uint8(MissReason.UNSEEN))
        return reasons, self._times[buckets, newest]

    def _enter(self) -> None:
        """Move the last ones into the table."""
        recent, self._recent = self._recent, {}
        buckets, tags = _places(list(recent))
        values = np.array(list(recent.values()), np.int64).reshape(-1, 2)
        for first in range(0, len(tags), _MAX_RECENT):
            part = slice(first, first + _MAX_RECENT)
            into = buckets[part]
            places = self._num_entered[into] % _BUCKET_SIZE
            self._tags[into, places] = tags[part]
            self._reasons[into, places] = values[part, 0]
            self._times[into, places] = values[part, 1] & 0xFFFFFFFF
            self._num_entered[into] += 1


def _places(keys: Sequence[bytes]) -> tuple[Numbers, Numbers]:
    """By key, its bucket and its tag there: the first two bytes of the hash, and four others."""
    if not keys:
        return np.zeros(0, "<u2"), np.zeros(0, "<u4")
    rows = np.frombuffer(b"".join(keys), np.uint8).reshape(len(keys), -1)
    buckets = np.ascontiguousarray(rows[:, :2]).view("<u2").ravel()
    return buckets, np.ascontiguousarray(rows[:, 4:8]).view("<u4").ravel()
