"""Rows: host memory as the scheduler's process sees it, for the second tier."""

from collections.abc import Sequence
from typing import cast

import numpy as np
import numpy.typing as npt

from simple_offload.shared_memory import Address, SharedMemory


class Rows:
    """A row is a host block with the pages of all ranks, and becomes one object. It ends with a
    seal (``Seals``)."""

    def __init__(self, address: Address, num_rows: int, num_bytes: int) -> None:
        """The rows that the ranks have. Raises OSError if this process may not open them."""
        self.num_bytes = num_bytes
        """Of a row."""
        self.memory = SharedMemory.open(address)
        self.memory.map(num_rows * num_bytes, stays_open=True)  # for the helper
        part = self.memory.part(0, num_rows * num_bytes).numpy().view(np.uint8)
        self.array: npt.NDArray[np.uint8] = part.reshape(num_rows, num_bytes)
        """All rows, ``[num_rows, num_bytes]``."""

    @property
    def view(self) -> memoryview:
        """All rows, as vLLM's tiers take them."""
        return memoryview(cast(bytearray, self.array))

    def seal(self, rows: Sequence[int], seals: Sequence[bytes]) -> None:
        """Put ``seals`` on ``rows``."""
        joined = np.frombuffer(b"".join(seals), np.uint8).reshape(len(rows), -1)
        self.array[rows, -joined.shape[1] :] = joined
