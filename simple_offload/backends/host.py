"""HostBackend: for vLLM on CPU, where device blocks are host memory too."""

import sys
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from simple_offload.backends.base import Barrier, Direction, require_blocks_within
from simple_offload.transfer import Transfer


class HostBackend:
    """Copies by NumPy's indexed assignment, one call per region, on the caller's thread. NumPy
    releases Python's interpreter lock while bytes move."""

    chunk_bytes = sys.maxsize
    """One chunk: memory that is not pinned costs nothing until it is written. The worker checks at
    start that there is enough, and nothing checks later."""

    pins_memory = False
    numa_node = None

    def __init__(self) -> None:
        self._device: list[npt.NDArray[np.int8]] = []
        self._host: list[npt.NDArray[np.int8]] = []

    def allocate_host(self, num_bytes: int) -> torch.Tensor:
        """Plain memory; the kernel provides each page at its first write."""
        return torch.empty(num_bytes, dtype=torch.int8)

    def use_shared(self, memory: torch.Tensor, *, is_first: bool) -> None:
        """Nothing to prepare."""

    def open(self, device: Sequence[torch.Tensor]) -> None:
        """The arrays share the tensors' memory."""
        self._device = [region.numpy() for region in device]

    def add_host_chunk(self, regions: Sequence[torch.Tensor]) -> None:
        """Set the only chunk."""
        assert not self._host, "there is one chunk"
        self._host = [region.numpy() for region in regions]

    def barrier(self) -> Barrier | None:
        """None: CPU compute has ended when the forward returns."""
        return None

    def enter_thread(self, direction: Direction) -> None:
        """Nothing to prepare."""

    def copy(self, direction: Direction, transfer: Transfer, barrier: Barrier | None) -> None:
        """Copy now. Raises IndexError for a block outside the regions."""
        for device, host in zip(self._device, self._host, strict=True):
            require_blocks_within(transfer, len(device), len(host))
        for device, host in zip(self._device, self._host, strict=True):
            if direction is Direction.LOAD:
                device[transfer.device_blocks] = host[transfer.host_blocks]
            else:
                host[transfer.host_blocks] = device[transfer.device_blocks]

    def close(self) -> None:
        """Drop the arrays."""
        self._device, self._host = [], []
