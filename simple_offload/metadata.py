"""What crosses the process boundary: StepMetadata down to the ranks, WorkerReport up."""

import struct
from collections import Counter
from collections.abc import Sequence
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

    A host block is here as large as a device block: what the scheduler side calls a slot, where
    its own host blocks are larger.

    ``id`` only grows over the life of the engine. ``request_id`` is set on loads: vLLM wants
    to hear from each rank which request's blocks have arrived; stores belong to nobody.
    """

    id: int
    device_blocks: BlockIds  # [n]
    host_blocks: BlockIds  # [n]
    request_id: str | None = None
    after_compute: bool = True
    """Whether it has to come after compute that was queued before it: unless it is known that
    none of that touches its device blocks."""

    @classmethod
    def pairing(
        cls,
        transfer_id: int,
        device_blocks: Sequence[int],
        host_blocks: Sequence[int],
        request_id: str | None = None,
        after_compute: bool = True,
    ) -> "Transfer":
        """A transfer of ``device_blocks[i]`` with ``host_blocks[i]``; ValueError when the two
        are not equally long."""
        count = len(device_blocks)
        if count != len(host_blocks):
            raise ValueError(f"{count} device blocks paired with {len(host_blocks)} host blocks")
        device, host = _as_array(device_blocks), _as_array(host_blocks)
        return cls(transfer_id, device, host, request_id, after_compute)


def _as_array(ids: Sequence[int]) -> BlockIds:
    """In a third of the time that ``np.array`` takes for thousands of them; writable, like its."""
    return np.frombuffer(bytearray(struct.pack(f"{len(ids)}q", *ids)), np.int64)


@dataclass(slots=True)
class StepMetadata(KVConnectorMetadata):
    """The transfers that start with one engine step, and what its compute has to wait for."""

    loads: list[Transfer] = field(default_factory=list)
    stores: list[Transfer] = field(default_factory=list)
    admitted: list[int] = field(default_factory=list)
    """Loads whose blocks may be read from this step on, by id. A rank that announced one before
    its end lets the compute stream wait for the rest of it."""
    computes: bool = False
    """Whether the step runs any tokens."""
    num_host_blocks: int | None = None
    """How many host blocks, of a device block's size, all ranks have room for. Said once."""


@dataclass(slots=True)
class WorkerReport(KVConnectorWorkerMetadata):
    """Transfers that ended since the last report: how many ranks ended each, and on how many
    of them it failed."""

    ended: Counter[int] = field(default_factory=Counter)
    failed: Counter[int] = field(default_factory=Counter)
    broken: bool = False
    """A rank cannot copy any more, whatever is asked of it."""
    capacities: dict[str, "RankCapacity"] = field(default_factory=dict)
    """By rank, where it has opened more host blocks."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "WorkerReport":
        assert isinstance(other, WorkerReport)
        return WorkerReport(
            self.ended + other.ended,
            self.failed + other.failed,
            self.broken or other.broken,
            self.capacities | other.capacities,
        )


@dataclass(frozen=True, slots=True)
class RankCapacity(KVConnectorHandshakeMetadata):
    """What one rank has host memory for, told to the scheduler before serving, and whenever more of
    it is open."""

    rank: str
    """A name that no other rank has."""
    num_host_blocks: int
    """How many host blocks of a device block's size it has room for."""
    num_open: int
    """How many of them are ready."""
    block_bytes: int
