"""Adapters to the scheduler sides of connectors."""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, cast

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
)
from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, get_block_hash, get_group_id
from vllm.v1.kv_offload.base import make_offload_key
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.simple_kv_offload.metadata import (
    SimpleCPUOffloadMetadata,
    SimpleCPUOffloadWorkerMetadata,
)

from examples.bench.connectors import SIMPLE, Contender
from examples.scheduler_bench.planned import Planned
from simple_offload.metadata import RankCapacity, StepMetadata, WorkerReport


@dataclass(frozen=True)
class Transfer:
    """A load or store that started with a step."""

    id: int
    is_load: bool
    num_blocks: int
    requests: Collection[str] = ()
    """Requests whose blocks are loaded."""
    is_urgent: bool = False
    """True if the worker waits for it before the step's compute."""


class Side:
    """How one kind of connector is configured, and the messages of its worker side."""

    def size(self, num_blocks: int, planned: Planned) -> dict[str, int]:
        """The keys of its configuration for ``num_blocks`` host blocks a rank, with vLLM's null
        block, if ranks share nothing."""
        return {"cpu_bytes_to_use": planned.num_bytes(num_blocks)}

    def open(self, connector: Any, num_blocks: int, planned: Planned) -> None:
        """Report to the scheduler side, once, that the worker has its memory. vLLM's connectors
        take it for granted."""

    def submitted(self, metadata: Any) -> list[Transfer]:
        """The transfers that start with a step."""
        raise NotImplementedError

    def report(self, ended: Sequence[Transfer], num_ranks: int) -> KVConnectorOutput | None:
        """The report of all ranks when these transfers have ended; None: nothing."""
        if not ended:
            return None
        return KVConnectorOutput(
            finished_recving={request for transfer in ended for request in transfer.requests},
            kv_connector_worker_meta=self._worker_meta(ended, num_ranks),
        )

    def num_used(self, connector: Any) -> tuple[int, int]:
        """How many host blocks of the scheduler side hold something, and how many it has."""
        raise NotImplementedError

    def has(self, connector: Any, key: BlockHashWithGroupId) -> bool:
        """Whether the host tier holds a device block's key."""
        raise NotImplementedError

    def _worker_meta(
        self, ended: Sequence[Transfer], num_ranks: int
    ) -> KVConnectorWorkerMetadata | None:
        raise NotImplementedError


class OurSide(Side):
    """simple_offload."""

    def size(self, num_blocks: int, _planned: Planned) -> dict[str, int]:
        return {"num_cpu_blocks": num_blocks}

    def open(self, connector: Any, num_blocks: int, planned: Planned) -> None:
        """As ``RankPool`` has it: ranks that share copies have the blocks of all of them."""
        replicas = planned.replicas
        num_blocks *= replicas.count
        sizes = (num_blocks, num_blocks, planned.block_bytes)
        shared = (replicas.count, replicas.private_groups)
        connector.set_xfer_handshake_metadata_pp_aware(
            {
                (0, rank): RankCapacity(f"{rank}", *sizes, *shared)
                for rank in range(planned.num_ranks)
            }
        )

    def submitted(self, metadata: StepMetadata) -> list[Transfer]:
        loads = [
            Transfer(each.id, True, len(each.host_blocks), (str(each.request_id),))
            for each in metadata.loads
        ]
        return loads + [Transfer(each.id, False, len(each.host_blocks)) for each in metadata.stores]

    def num_used(self, connector: Any) -> tuple[int, int]:
        tier = connector.scheduler.tier
        num_replicas = tier.num_blocks - 1 - tier.max_contents
        return tier.num_used + num_replicas, tier.num_blocks

    def has(self, connector: Any, key: BlockHashWithGroupId) -> bool:
        return bool(connector.scheduler.tier.has(key))

    def _worker_meta(self, ended: Sequence[Transfer], num_ranks: int) -> WorkerReport:
        return WorkerReport(Counter({transfer.id: num_ranks for transfer in ended}))


class BuiltinSide(Side):
    """vLLM's own SimpleCPUOffloadConnector."""

    def submitted(self, metadata: SimpleCPUOffloadMetadata) -> list[Transfer]:
        transfers = []
        if (event := metadata.load_event) >= 0:
            requests = metadata.load_event_to_reqs.get(event, ())
            transfers.append(Transfer(event, True, len(metadata.load_cpu_blocks), tuple(requests)))
        if (event := metadata.store_event) >= 0:
            transfers.append(Transfer(event, False, len(metadata.store_cpu_blocks)))
        return transfers

    def num_used(self, connector: Any) -> tuple[int, int]:
        blocks = connector.scheduler_manager.cpu_block_pool.blocks
        return sum(block.block_hash is not None for block in blocks), len(blocks)

    def has(self, connector: Any, key: BlockHashWithGroupId) -> bool:
        found = connector.scheduler_manager.cpu_block_pool.cached_block_hash_to_block
        return found.get_one_block(key) is not None

    def _worker_meta(
        self, ended: Sequence[Transfer], num_ranks: int
    ) -> SimpleCPUOffloadWorkerMetadata | None:
        stored = {transfer.id: num_ranks for transfer in ended if not transfer.is_load}
        return SimpleCPUOffloadWorkerMetadata(stored) if stored else None


class OffloadingSide(Side):
    """vLLM's OffloadingConnector."""

    def size(self, num_blocks: int, planned: Planned) -> dict[str, int]:
        # Its single copy needs CUDA: a CPU build gives each rank one.
        num_copies = planned.num_ranks if planned.is_replicated else 1
        return {"cpu_bytes_to_use": planned.num_bytes(num_blocks) * num_copies}

    def submitted(self, metadata: OffloadingConnectorMetadata) -> list[Transfer]:
        urgent = metadata.jobs_to_flush or ()
        transfers = [Transfer(job, False, 0, is_urgent=True) for job in urgent]
        for job_id, job in metadata.load_jobs.items():
            blocks = cast(Any, job.dst_spec).block_ids
            transfers.append(Transfer(job_id, True, len(blocks), (job.req_id,)))
        for job_id, job in metadata.store_jobs.items():
            blocks = cast(Any, job.src_spec).block_ids
            transfers.append(Transfer(job_id, False, len(blocks)))
        return transfers

    def num_used(self, connector: Any) -> tuple[int, int]:
        manager = connector.scheduler.manager
        num_chunks = manager._num_chunks
        return num_chunks - manager._get_num_free_chunks(), num_chunks

    def has(self, connector: Any, key: BlockHashWithGroupId) -> bool:
        manager = connector.scheduler.manager
        chunk = manager._policy.get(make_offload_key(get_block_hash(key), get_group_id(key)))
        return chunk is not None and bool(chunk.is_ready)

    def _worker_meta(self, ended: Sequence[Transfer], num_ranks: int) -> OffloadingWorkerMetadata:
        return OffloadingWorkerMetadata({transfer.id: num_ranks for transfer in ended})


def side_of(contender: Contender) -> Side:
    """The adapter to the contender's connector."""
    if contender.module is not None:
        return OurSide()
    return BuiltinSide() if contender.connector == SIMPLE else OffloadingSide()
