"""Seals: checksums at the ends of rows."""

from collections.abc import Sequence
from typing import cast

import numpy as np
import numpy.typing as npt
import xxhash

_MAGIC = b"KVROW\x00\x00\x01"


class Seals:
    """A seal is a checksum (XXH3, 128 bits) of a row's bytes and its object's name. So no bytes
    that were damaged, cut off, replaced while they were written, or meant for another key are taken
    for a block's.
    """

    def __init__(self, rows: npt.NDArray[np.uint8], seal_bytes: int) -> None:
        """``rows``: ``[num_rows, num_bytes]``, each with room for its seal at its end."""
        self._rows = rows
        self._seal_bytes = seal_bytes

    def make(self, rows: Sequence[int], names: Sequence[bytes]) -> list[bytes]:
        """The seals of rows whose pages are complete, as the objects ``names``."""
        return [_MAGIC + self._checksum(row, name) for row, name in zip(rows, names, strict=True)]

    def count_whole(self, rows: Sequence[int], names: Sequence[bytes]) -> int:
        """The number of rows, from the first on, that have all bytes of the objects ``names``, and
        no others."""
        for index, (row, name) in enumerate(zip(rows, names, strict=True)):
            [seal] = self.make([row], [name])
            if self._rows[row, -len(seal) :].tobytes() != seal:
                return index
        return len(rows)

    def _checksum(self, row: int, name: bytes) -> bytes:
        contents = self._rows[row, : -self._seal_bytes]
        checksum = xxhash.xxh3_128(memoryview(cast(bytearray, contents)))
        checksum.update(name)
        return checksum.digest()
