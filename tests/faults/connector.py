"""The connector with faults: what ``kv_connector_module_path: "tests.faults.connector"`` loads.

It is simple_offload's own, except that the key "faults" of its extra configuration holds a
FaultPlan, and that its workers copy through a FaultyBackend. Nothing of this is in the product.
"""

import copy
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from simple_offload import connector
from tests.faults.backend import FaultyBackend
from tests.faults.plan import FaultPlan

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

FAULTS_KEY = "faults"


class SimpleCPUOffloadConnector(connector.SimpleCPUOffloadConnector):
    """The product, which cannot know that it is being tested."""

    def __init__(
        self,
        vllm_config: "VllmConfig",
        role: KVConnectorRole,
        kv_cache_config: "KVCacheConfig",
    ) -> None:
        transfer_config = copy.copy(vllm_config.kv_transfer_config)
        assert transfer_config is not None
        extra_config = dict(transfer_config.kv_connector_extra_config)
        plan = FaultPlan.model_validate(extra_config.pop(FAULTS_KEY, {}))
        transfer_config.kv_connector_extra_config = extra_config
        vllm_config = copy.copy(vllm_config)
        vllm_config.kv_transfer_config = transfer_config
        super().__init__(vllm_config, role, kv_cache_config)
        self.faults: FaultyBackend | None = None
        if self.worker is not None:
            rank = vllm_config.parallel_config.rank
            self.faults = FaultyBackend(self.worker._backend, plan.of_rank(rank))
            self.worker._backend = self.faults
