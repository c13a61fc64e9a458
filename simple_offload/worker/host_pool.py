"""HostPool: the host tier's memory on one rank."""

from collections.abc import Sequence

import torch

from simple_offload.backends.base import CopyBackend


class HostPool:
    """For every device region one host region with the same page size and its own number of
    blocks. Neighbouring blocks are neighbours in both, so that runs can be copied as one."""

    def __init__(
        self, backend: CopyBackend, device_regions: Sequence[torch.Tensor], num_blocks: int
    ) -> None:
        self.num_blocks = num_blocks
        self.tensors = [
            backend.allocate_host(num_blocks, region.shape[1]) for region in device_regions
        ]

    @property
    def nbytes(self) -> int:
        """Bytes of all regions."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def close(self) -> None:
        """Let go of the memory."""
        self.tensors = []
