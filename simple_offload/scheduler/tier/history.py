"""History: why the caches have lost contents."""

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from simple_offload.miss_reason import MissReason

_NUM_BUCKETS = 1 << 16
"""By the first two bytes of a key."""
_BUCKET_SIZE = 8
_MAX_RECENT = 256
"""Keys that wait to be entered. numpy takes about as long for hundreds as for one."""

Numbers = NDArray[np.integer]


class History:
    """By key, the last reason for which contents were lost, or not stored, and when.

    The last ones are in a dict, and the others in a hash table of 2^19 entries, 4 MiB. Entries
    enter at a place of their bucket after the other, so that the oldest makes room. Of two keys
    that enter one bucket at the same time, about one in 500, the first is forgotten.
    """

    def __init__(self) -> None:
        # Pages of zeros take no memory before something is written to them.
        self._table = np.zeros((_NUM_BUCKETS, _BUCKET_SIZE), "<u8")
        """By bucket, entries of 8 bytes: the reason, the time (4 bytes), and a tag (3 bytes)."""
        self._num_entered = np.zeros(_NUM_BUCKETS, np.uint8)
        """By bucket, modulo 256."""
        self._has_entered = False
        """Whether anything has: nothing is lost while the caches have room."""
        self._recent: dict[bytes, int] = {}
        """By key, its entry, without a tag."""

    def note(self, reason: MissReason, keys: Collection[bytes], now: int = 0) -> None:
        """Contents with ``keys`` are lost for ``reason``. ``now``: what ``find`` returns as their
        time."""
        self._recent.update(dict.fromkeys(keys, reason + ((now & 0xFFFFFFFF) << 8)))
        if len(self._recent) > _MAX_RECENT:
            self._enter()

    def knows(self, keys: Sequence[bytes]) -> bool:
        """Whether there may be a reason for one of a few keys: by chance, other bytes of a bucket
        look like a tag."""
        if not self._recent.keys().isdisjoint(keys):
            return True
        if not self._has_entered:
            return False
        table = self._table
        return any(key[4:7] in table[int.from_bytes(key[:2], "little")].tobytes() for key in keys)

    def find(self, keys: Sequence[bytes]) -> tuple[Numbers, Numbers]:
        """By key, the last reason, UNSEEN if there is none, and its time."""
        self._enter()
        buckets, tags = _places(keys)
        ages = (self._num_entered[buckets, None] - 1 - np.arange(_BUCKET_SIZE)) % _BUCKET_SIZE
        entries = self._table[buckets]
        ages = np.where(entries >> 40 == tags[:, None], ages, _BUCKET_SIZE)
        newest = np.take_along_axis(entries, ages.argmin(axis=1)[:, None], axis=1)[:, 0]
        known = np.where(ages.min(axis=1) < _BUCKET_SIZE, newest, 0)
        return known & 0xFF, known >> 8 & 0xFFFFFFFF

    def _enter(self) -> None:
        """Move the last ones into the table."""
        recent, self._recent = self._recent, {}
        self._has_entered |= bool(recent)
        buckets, tags = _places(list(recent))
        entries = tags << 40 | np.fromiter(recent.values(), "<u8", len(recent))
        for first in range(0, len(tags), _MAX_RECENT):
            part = slice(first, first + _MAX_RECENT)
            into = buckets[part]
            self._table[into, self._num_entered[into] % _BUCKET_SIZE] = entries[part]
            self._num_entered[into] += 1


def _places(keys: Sequence[bytes]) -> tuple[Numbers, Numbers]:
    """By key, its bucket and its tag there: the first two bytes of the hash, and three others."""
    if not keys:
        return np.zeros(0, "<u2"), np.zeros(0, "<u8")
    rows = np.frombuffer(b"".join(keys), np.uint8).reshape(len(keys), -1)
    first = np.ascontiguousarray(rows[:, :8]).view("<u8").ravel()
    return first & 0xFFFF, first >> 32 & 0xFFFFFF
