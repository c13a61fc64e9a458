"""What crosses the process boundary: StepMetadata down to the ranks, WorkerReport up."""

import struct
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from simple_offload.shared_memory import Address

BlockIds = npt.NDArray[np.int64]

SEAL_BYTES = 32
"""At the end of a row of host memory, for the second tier's seal."""


@dataclass(frozen=True, slots=True, eq=False)
class Transfer:
    """One copy job: pairs of device and host blocks, copied by every rank.

    A host block is as large as a device block here: a slot, in the scheduler side's terms, if its
    host blocks are larger.

    ``id`` only grows over the life of the engine. Loads have a ``request_id``: each rank tells
    vLLM which request's blocks have arrived. Stores have none.
    """

    id: int
    device_blocks: BlockIds  # [n]
    host_blocks: BlockIds  # [n]
    request_id: str | None = None
    after_compute: bool = True
    """Whether it must come after compute that was queued before it. False only if none of that
    touches its device blocks."""
    by_place: BlockIds | None = None  # [places, n]
    """If ranks share host memory, but not in all KV cache groups: the host blocks for the rank at
    each place of its pool. Ranks share those that are equal for all places."""

    num_new_tokens: int = 0
    """Of a load: tokens of its request that are left to compute."""

    @property
    def overlaps(self) -> bool:
        """Whether its request's compute may begin before the last bytes have arrived. With one new
        token, the request joins those that decode, whose step vLLM launches as a whole."""
        return self.num_new_tokens > 1

    @classmethod
    def pairing(
        cls,
        transfer_id: int,
        device_blocks: Sequence[int],
        host_blocks: Sequence[int],
        request_id: str | None = None,
        after_compute: bool = True,
        by_place: Callable[[BlockIds], BlockIds | None] = lambda _: None,
        num_new_tokens: int = 0,
    ) -> "Transfer":
        """A transfer of ``device_blocks[i]`` with ``host_blocks[i]``; ValueError if their lengths
        differ. ``by_place``: from host blocks to those at each place."""
        count = len(device_blocks)
        if count != len(host_blocks):
            raise ValueError(f"{count} device blocks paired with {len(host_blocks)} host blocks")
        device, host = as_array(device_blocks), as_array(host_blocks)
        places = by_place(host)
        return cls(transfer_id, device, host, request_id, after_compute, places, num_new_tokens)


def as_array(ids: Sequence[int]) -> BlockIds:
    """As ``np.array``, writable too, in a third of the time for thousands of ids."""
    return np.frombuffer(bytearray(struct.pack(f"{len(ids)}q", *ids)), np.int64)


@dataclass(slots=True)
class StepMetadata(KVConnectorMetadata):
    """The transfers that start with one engine step, and the loads that its compute waits for."""

    loads: list[Transfer] = field(default_factory=list)
    stores: list[Transfer] = field(default_factory=list)
    admitted: list[int] = field(default_factory=list)
    """Ids of loads whose blocks may be read from this step on. On a rank that announced one before
    its end, the compute stream waits for the rest of it."""
    num_tokens: int = 0
    """Tokens that the step runs."""
    num_host_blocks: int | None = None
    """Host blocks, of a device block's size, that all ranks have room for. Sent once."""
    step: int | None = None
    """The number of this step, if the scheduler wants to know its end."""


@dataclass(slots=True)
class WorkerReport(KVConnectorWorkerMetadata):
    """Transfers that ended since the last report: by id, the number of ranks that ended it, and of
    those on which it failed."""

    ended: Counter[int] = field(default_factory=Counter)
    failed: Counter[int] = field(default_factory=Counter)
    broken: bool = False
    """A rank cannot copy any more."""
    capacities: dict[str, "RankCapacity"] = field(default_factory=dict)
    """By rank, if it has opened more host blocks."""
    step: int | None = None
    """The step that this report comes with, if it has a number. vLLM takes the report in when that
    step has ended."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "WorkerReport":
        assert isinstance(other, WorkerReport)
        return WorkerReport(
            self.ended + other.ended,
            self.failed + other.failed,
            self.broken or other.broken,
            self.capacities | other.capacities,
            self.step if other.step is None else other.step,
        )


@dataclass(frozen=True, slots=True)
class RankCapacity(KVConnectorHandshakeMetadata):
    """One rank's host memory, reported before serving and whenever more of it is open."""

    rank: str
    """A name that no other rank has."""
    num_host_blocks: int
    """Host blocks of a device block's size that it has room for."""
    num_open: int
    """Number of them that are open."""
    block_bytes: int
    num_places: int = 1
    """Ranks of its pool."""
    private_groups: frozenset[int] = frozenset()
    """If there are several: KV cache groups in which each of them has blocks of its own."""
    row_bytes: int = 0
    """For a second tier: bytes of a row, which has a block's pages of all ranks."""
    memory: Address | None = None
    """Of these rows. Told by one of the ranks."""
    layout: tuple[object, ...] = ()
    """What decides how a page's bytes are laid out, of values that JSON has."""
