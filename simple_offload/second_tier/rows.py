"""Rows: host memory as the scheduler's process sees it, for the second tier."""

from collections.abc import Sequence
from typing import cast

import numpy as np
import numpy.typing as npt

from simple_offload.shared_memory import Address, SharedMemory


class Rows:
    """A row is a host block with the pages of all ranks, and becomes one object. It ends with a
    seal (``Seals``)."""

    def __init__(self, memory: SharedMemory, num_rows: int, num_bytes: int) -> None:
        """The first ``num_rows * num_bytes`` bytes of ``memory``."""
        self.memory = memory
        part = memory.part(0, num_rows * num_bytes).numpy().view(np.uint8)
        self._rows: npt.NDArray[np.uint8] = part.reshape(num_rows, num_bytes)

    @classmethod
    def open(cls, address: Address, num_rows: int, num_bytes: int) -> "Rows":
        """The rows that the ranks have. Raises OSError if this process may not open them."""
        memory = SharedMemory.open(address)
        memory.map(num_rows * num_bytes, stays_open=True)  # for the helper
        return cls(memory, num_rows, num_bytes)

    @property
    def num_bytes(self) -> int:
        """Of a row."""
        return int(self._rows.shape[1])

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        """All rows, ``[num_rows, num_bytes]``."""
        return self._rows

    @property
    def view(self) -> memoryview:
        """Likewise, as vLLM's tiers take them."""
        return memoryview(cast(bytearray, self._rows))

    def seal(self, rows: Sequence[int], seals: Sequence[bytes]) -> None:
        """Put ``seals`` on ``rows``."""
        joined = np.frombuffer(b"".join(seals), np.uint8).reshape(len(rows), -1)
        self._rows[rows, -joined.shape[1] :] = joined
