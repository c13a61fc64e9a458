"""The contenders: KV connectors, and adapters to their scheduler sides."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.simple_kv_offload.metadata import (
    SimpleCPUOffloadMetadata,
    SimpleCPUOffloadWorkerMetadata,
)

from examples.scheduler_bench.plan import BLOCK_SIZE
from simple_offload.metadata import RankCapacity, StepMetadata, WorkerReport


@dataclass(frozen=True)
class Submitted:
    """The transfers that started with one step."""

    loads: tuple[int, ...] = ()
    stores: tuple[int, ...] = ()
    """Their ids."""
    loading: frozenset[str] = frozenset()
    """Requests whose blocks are being loaded."""
    num_loaded: int = 0
    num_stored: int = 0
    """In blocks."""


class Side(Protocol):
    """How one kind of connector is configured, and what its worker side would say to it."""

    module: str | None
    """``kv_connector_module_path``."""

    def extra_config(self, num_blocks: int, block_bytes: int) -> dict[str, Any]:
        """For a tier of ``num_blocks`` host blocks, vLLM's null block included."""

    def open(self, connector: Any, num_blocks: int, block_bytes: int) -> None:
        """Tell the scheduler side, once, that the worker has its memory."""

    def submitted(self, metadata: KVConnectorMetadata) -> Submitted:
        """What a step's metadata starts."""

    def report(self, ended: Sequence[Submitted]) -> KVConnectorOutput | None:
        """What the worker says when all these transfers have ended; None: nothing."""

    def num_host_blocks(self, connector: Any) -> int:
        """How many host blocks the scheduler side has."""


class OurSide:
    """simple_offload."""

    module: str | None = "simple_offload"

    def extra_config(self, num_blocks: int, block_bytes: int) -> dict[str, Any]:
        del block_bytes
        return {"num_cpu_blocks": num_blocks}

    def open(self, connector: Any, num_blocks: int, block_bytes: int) -> None:
        capacity = RankCapacity("0", num_blocks, num_blocks, block_bytes)
        connector.set_xfer_handshake_metadata_pp_aware({(0, 0): capacity})

    def submitted(self, metadata: KVConnectorMetadata) -> Submitted:
        step = cast(StepMetadata, metadata)
        return Submitted(
            tuple(load.id for load in step.loads),
            tuple(store.id for store in step.stores),
            frozenset(load.request_id for load in step.loads if load.request_id is not None),
            sum(len(load.host_blocks) for load in step.loads),
            sum(len(store.host_blocks) for store in step.stores),
        )

    def report(self, ended: Sequence[Submitted]) -> KVConnectorOutput | None:
        report = WorkerReport()
        for step in ended:
            report.ended.update((*step.loads, *step.stores))
        if not report.ended:
            return None
        loaded = {request_id for step in ended for request_id in step.loading}
        return KVConnectorOutput(finished_recving=loaded, kv_connector_worker_meta=report)

    def num_host_blocks(self, connector: Any) -> int:
        return int(connector.scheduler.tier.num_blocks)


class BuiltinSide:
    """vLLM's own SimpleCPUOffloadConnector."""

    module: str | None = None

    def extra_config(self, num_blocks: int, block_bytes: int) -> dict[str, Any]:
        return {"cpu_bytes_to_use": num_blocks * block_bytes}

    def open(self, connector: Any, num_blocks: int, block_bytes: int) -> None:
        """It takes the memory for granted."""

    def submitted(self, metadata: KVConnectorMetadata) -> Submitted:
        step = cast(SimpleCPUOffloadMetadata, metadata)
        return Submitted(
            (step.load_event,) if step.load_event >= 0 else (),
            (step.store_event,) if step.store_event >= 0 else (),
            frozenset(step.load_event_to_reqs.get(step.load_event, ())),
            len(step.load_cpu_blocks),
            len(step.store_cpu_blocks),
        )

    def report(self, ended: Sequence[Submitted]) -> KVConnectorOutput | None:
        stored = {event: 1 for step in ended for event in step.stores}
        loaded = {request_id for step in ended for request_id in step.loading}
        if not stored and not loaded:
            return None
        return KVConnectorOutput(
            finished_recving=loaded,
            kv_connector_worker_meta=SimpleCPUOffloadWorkerMetadata(stored) if stored else None,
        )

    def num_host_blocks(self, connector: Any) -> int:
        return int(connector.scheduler_manager.num_cpu_blocks)


@dataclass(frozen=True)
class Contender:
    """A connector and its settings."""

    name: str
    side: Side
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Of ``kv_connector_extra_config``, beside the size."""
    rival: str | None = None
    """The contender that it is compared with."""
    lazy: bool = False
    """True if it stores the blocks that the device is about to evict, and no others."""
    for_one_offs: bool = False
    """True if it takes part in hit rates with one-off prompts only."""

    @property
    def num_sub_blocks(self) -> int:
        """Device blocks in one of its host blocks."""
        return int(self.extra.get("cpu_block_size", BLOCK_SIZE)) // BLOCK_SIZE


CONTENDERS = {
    contender.name: contender
    for contender in (
        Contender("ours", OurSide(), rival="builtin"),
        Contender("ours-128", OurSide(), {"cpu_block_size": 128}, "builtin"),
        Contender("ours-lazy", OurSide(), {"lazy_offload": True}, "builtin-lazy", lazy=True),
        Contender(
            "ours-threshold", OurSide(), {"store_threshold": 2}, "builtin", for_one_offs=True
        ),
        Contender("builtin", BuiltinSide()),
        Contender("builtin-lazy", BuiltinSide(), {"lazy_offload": True}, lazy=True),
    )
}
