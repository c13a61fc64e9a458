"""A world where vLLM's MultiConnector has another connector beside this project's."""

from typing import TYPE_CHECKING, Any

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
    MultiKVConnectorMetadata,
    MultiKVConnectorStats,
    MultiKVConnectorWorkerMetadata,
)
from vllm.v1.outputs import KVConnectorOutput

from simple_offload.metadata import StepMetadata
from simple_offload.worker.worker import OffloadWorker
from tests.simulation.shape import Shape
from tests.simulation.world import World

if TYPE_CHECKING:
    from vllm.v1.request import Request


class RemoteConnector(KVConnectorBase_V1, SupportsHMA):
    """Offers the tokens that the script places on another machine between steps, and keeps blocks
    for another machine."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.offers: dict[str, int] = {}
        """By request, the number of its first tokens that the other machine has."""
        self.fetched: set[str] = set()
        """Requests whose blocks another machine fetches after their end."""

    def get_num_new_matched_tokens(
        self, request: "Request", num_computed_tokens: int
    ) -> tuple[int, bool]:
        num_tokens = max(0, self.offers.get(request.request_id, 0) - num_computed_tokens)
        return num_tokens, num_tokens > 0

    def update_state_after_alloc(self, request: "Request", *args: Any) -> None:
        """Like NixlConnector, offer a request's tokens once."""
        self.offers.pop(request.request_id, None)

    def build_connector_meta(self, *args: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def request_finished_all_groups(self, request: "Request", *args: Any) -> tuple[bool, None]:
        return request.request_id in self.fetched, None

    # The script plays the worker side.

    def start_load_kv(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError

    wait_for_layer_load = save_kv_layer = wait_for_save = start_load_kv


class WorldWithRemote(World):
    """``remote_first``: vLLM queries the other connector first."""

    def __init__(self, shape: Shape, remote_first: bool) -> None:
        self.remote_first = remote_first
        self._ours = int(remote_first)
        super().__init__(shape)
        multi: Any = self.scheduler.connector
        self.remote: RemoteConnector = multi.sub_connectors[1 - self._ours]
        self.arrived: set[str] = set()
        """Requests whose remote bytes have arrived since the last step, or never will."""
        self.lost: set[str] = set()
        """Those of them of which nothing has arrived."""
        self.lost_blocks: set[int] = set()
        """Device blocks whose bytes have not arrived, of the others."""
        self.sent: set[str] = set()
        """Requests whose blocks have been fetched since the last step."""

    def kv_transfer_config(self) -> KVTransferConfig:
        ours = {
            "kv_connector": "SimpleCPUOffloadConnector",
            "kv_connector_module_path": "simple_offload",
            "kv_role": self.shape.kv_role,
            "kv_connector_extra_config": self.worker_config(),
        }
        remote = {
            "kv_connector": "RemoteConnector",
            "kv_connector_module_path": "tests.simulation.remote",
            "kv_role": "kv_both",
        }
        return KVTransferConfig(
            kv_connector="MultiConnector",
            kv_role="kv_both",
            kv_load_failure_policy=self.shape.load_failures,
            kv_connector_extra_config={
                "connectors": [remote, ours] if self._ours else [ours, remote]
            },
        )

    def find_connector(self) -> Any:
        multi: Any = self.scheduler.connector
        return multi.sub_connectors[self._ours]

    def to_step_metadata(self, metadata: KVConnectorMetadata | None) -> StepMetadata:
        assert isinstance(metadata, MultiKVConnectorMetadata)
        return super().to_step_metadata(metadata.metadata[self._ours])

    def to_connector_output(self, worker: OffloadWorker) -> KVConnectorOutput:
        output = super().to_connector_output(worker)
        report = output.kv_connector_worker_meta
        if report is not None:
            both = (None, report) if self._ours else (report, None)
            output.kv_connector_worker_meta = MultiKVConnectorWorkerMetadata(both)
        if output.kv_connector_stats is not None:
            named = {"SimpleCPUOffloadConnector": output.kv_connector_stats}
            output.kv_connector_stats = MultiKVConnectorStats(named)
        output.finished_recving = (output.finished_recving or set()) | self.arrived
        output.failed_recving = output.failed_recving | self.lost
        output.invalid_block_ids = set(self.lost_blocks)
        output.finished_sending = set(self.sent)
        for told in (self.arrived, self.lost, self.lost_blocks, self.sent):
            told.clear()
        return output

    def receive(self, request_id: str, num_tokens: int) -> None:
        """Receive the first ``num_tokens`` tokens of a request from the other machine."""
        manager = self.scheduler.kv_cache_manager
        tables = manager.get_block_ids(request_id)
        for rank in self.ranks:
            rank.runner.fill(request_id, tables, num_tokens)
        self.arrived.add(request_id)
