"""The negative control: a connector that corrupts its host blocks.

``kv_connector_module_path: "examples.accuracy.corrupt"`` loads it. It is simple_offload's own,
except that the worker turns the top bit of every byte of a host block before it loads it. In
every dtype, that changes signs and at most the lowest bit of exponents: values stay finite, and
are wrong.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from simple_offload import connector
from simple_offload.backends.base import Barrier, CopyBackend, Direction, Pending
from simple_offload.transfer import Transfer

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

_TOP_BIT = -128


class SimpleCPUOffloadConnector(connector.SimpleCPUOffloadConnector):
    """The product, with a backend that corrupts its blocks."""

    def __init__(
        self,
        vllm_config: "VllmConfig",
        role: KVConnectorRole,
        kv_cache_config: "KVCacheConfig",
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if self.worker is not None:
            self.worker._backend = CorruptingBackend(self.worker._backend)


class CorruptingBackend:
    """Passes everything on to ``inner``. Every host block is corrupted once after each store,
    before it is loaded, in all regions."""

    def __init__(self, inner: CopyBackend) -> None:
        self._inner = inner
        self.chunk_bytes, self.pins_memory = inner.chunk_bytes, inner.pins_memory
        self.allocate_host, self.open, self.close = inner.allocate_host, inner.open, inner.close
        self.barrier, self.enter_thread = inner.barrier, inner.enter_thread
        self._chunks: list[Sequence[torch.Tensor]] = []
        self._corrupted: set[int] = set()

    def add_host_chunk(self, regions: Sequence[torch.Tensor]) -> None:
        self._chunks.append(regions)
        self._inner.add_host_chunk(regions)

    def copy(
        self, direction: Direction, transfer: Transfer, barrier: Barrier | None
    ) -> Pending | None:
        # Loads and stores run on threads of their own, yet never hold the same host block.
        for block in map(int, transfer.host_blocks):
            if direction is Direction.STORE:
                self._corrupted.discard(block)
            elif block not in self._corrupted:
                self._corrupted.add(block)
                self._corrupt(block)
        return self._inner.copy(direction, transfer, barrier)

    def _corrupt(self, block: int) -> None:
        # All chunks but the last have as many blocks as the first.
        chunk, row = divmod(block, len(self._chunks[0][0]))
        for region in self._chunks[chunk]:
            region[row].bitwise_xor_(_TOP_BIT)
