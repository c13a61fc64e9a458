"""What crosses the process boundary: StepMetadata down to the ranks, WorkerReport up."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

BlockIds = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Transfer:
    """One copy job: pairs of device and host blocks, copied by every rank.

    ``id`` only grows over the life of the engine. ``request_id`` is set on loads: vLLM wants
    to hear from each rank which request's blocks have arrived; stores belong to nobody.
    """

    id: int
    device_blocks: BlockIds  # [n]
    host_blocks: BlockIds  # [n]
    request_id: str | None = None

    @classmethod
    def pairing(
        cls,
        transfer_id: int,
        device_blocks: Iterable[int],
        host_blocks: Iterable[int],
        request_id: str | None = None,
    ) -> "Transfer":
        """A transfer of ``device_blocks[i]`` with ``host_blocks[i]``; ValueError when the two
        are not equally long."""
        device = np.fromiter(device_blocks, dtype=np.int64)
        host = np.fromiter(host_blocks, dtype=np.int64)
        if len(device) != len(host):
            raise ValueError(f"{len(device)} device blocks paired with {len(host)} host blocks")
        return cls(transfer_id, device, host, request_id)


@dataclass(slots=True)
class StepMetadata(KVConnectorMetadata):
    """The transfers that start with one engine step."""

    loads: list[Transfer] = field(default_factory=list)
    stores: list[Transfer] = field(default_factory=list)


@dataclass(slots=True)
class WorkerReport(KVConnectorWorkerMetadata):
    """Transfers that ended since the last report: how many ranks ended each, and on how many
    of them it failed. ``broken``: a rank cannot copy any more, whatever is asked of it."""

    ended: Counter[int] = field(default_factory=Counter)
    failed: Counter[int] = field(default_factory=Counter)
    broken: bool = False

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "WorkerReport":
        assert isinstance(other, WorkerReport)
        return WorkerReport(
            self.ended + other.ended, self.failed + other.failed, self.broken or other.broken
        )


@dataclass(frozen=True, slots=True)
class RankCapacity(KVConnectorHandshakeMetadata):
    """How many host blocks one rank has memory for, told to the scheduler before serving."""

    num_host_blocks: int
    block_bytes: int
