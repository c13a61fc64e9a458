"""Rows: host memory as the scheduler's process sees it, for the second tier."""

from collections.abc import Sequence
from typing import cast

import numpy as np
import numpy.typing as npt
import xxhash

from simple_offload.metadata import SEAL_BYTES
from simple_offload.shared_memory import Address, SharedMemory

_MAGIC = b"KVROW\x00\x00\x01"


class Rows:
    """A row is a host block with the pages of all ranks, and becomes one object. It ends with a
    seal: a checksum (XXH3, 128 bits) of its bytes and its name. So no bytes that were damaged, cut
    off, replaced while they were written, or meant for another key are taken for a block's.
    """

    def __init__(self, memory: SharedMemory, num_rows: int, num_bytes: int) -> None:
        """The first ``num_rows * num_bytes`` bytes of ``memory``."""
        self._memory = memory
        part = memory.part(0, num_rows * num_bytes).numpy().view(np.uint8)
        self._rows: npt.NDArray[np.uint8] = part.reshape(num_rows, num_bytes)

    @classmethod
    def open(cls, address: Address, num_rows: int, num_bytes: int) -> "Rows":
        """The rows that the ranks have. Raises OSError if this process may not open them."""
        memory = SharedMemory.open(address)
        memory.map(num_rows * num_bytes)
        return cls(memory, num_rows, num_bytes)

    @property
    def num_bytes(self) -> int:
        """Of a row."""
        return int(self._rows.shape[1])

    @property
    def view(self) -> memoryview:
        """All rows, ``[num_rows, num_bytes]``."""
        return memoryview(cast(bytearray, self._rows))

    def seal_of(self, row: int, name: bytes) -> bytes:
        """The seal of a row whose pages are complete, as the object ``name``."""
        return _MAGIC + self._checksum(row, name)

    def seal(self, rows: Sequence[int], seals: Sequence[bytes]) -> None:
        """Put ``seals`` on ``rows``."""
        joined = np.frombuffer(b"".join(seals), np.uint8).reshape(len(rows), -1)
        self._rows[rows, -joined.shape[1] :] = joined

    def is_sealed(self, row: int, name: bytes) -> bool:
        """Whether a row has all bytes of the object ``name``, and no others."""
        seal = self.seal_of(row, name)
        return self._rows[row, -len(seal) :].tobytes() == seal

    def close(self) -> None:
        """Let go of the memory, once nothing uses it."""
        self._rows = np.empty((0, 0), np.uint8)
        self._memory.free()

    def _checksum(self, row: int, name: bytes) -> bytes:
        checksum = xxhash.xxh3_128(memoryview(cast(bytearray, self._rows[row, :-SEAL_BYTES])))
        checksum.update(name)
        return checksum.digest()
