"""Messages between the processes: StepMetadata down to the ranks, WorkerReport up."""

from collections import Counter
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from simple_offload.shared_memory import Address
from simple_offload.transfer import Transfer


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
    """Values that decide how a page's bytes are laid out, as JSON has them."""
