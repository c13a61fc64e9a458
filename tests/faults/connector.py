"""The connector with faults: the module that ``kv_connector_module_path: "tests.faults.connector"``
loads.

It adds a key "faults" to the extra configuration, which holds a FaultPlan, and its workers copy
through a FaultyBackend. The product has none of this.
"""

import copy
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from simple_offload import connector
from tests.faults.backend import FaultyBackend
from tests.faults.plan import FaultPlan

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

FAULTS_KEY = "faults"


class SimpleCPUOffloadConnector(connector.SimpleCPUOffloadConnector):
    """The product's connector with faults."""

    def __init__(
        self,
        vllm_config: "VllmConfig",
        role: KVConnectorRole,
        kv_cache_config: "KVCacheConfig",
    ) -> None:
        vllm_config, faults = _split_faults(vllm_config)
        super().__init__(vllm_config, role, kv_cache_config)
        self.faults: FaultyBackend | None = None
        if self.worker is not None:
            rank = vllm_config.parallel_config.rank
            plan = FaultPlan.model_validate(faults)
            self.faults = FaultyBackend(self.worker._backend, plan.for_rank(rank))
            self.worker._backend = self.faults

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        product = {key: value for key, value in extra_config.items() if key != FAULTS_KEY}
        return super().requires_piecewise_for_cudagraph(product)

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: "VllmConfig") -> str | None:
        return super().get_required_kvcache_layout(_split_faults(vllm_config)[0])


def _split_faults(vllm_config: "VllmConfig") -> tuple["VllmConfig", Any]:
    """The configuration without the key of faults, and the value of that key."""
    transfer_config = copy.copy(vllm_config.kv_transfer_config)
    assert transfer_config is not None
    extra_config = dict(transfer_config.kv_connector_extra_config)
    faults = extra_config.pop(FAULTS_KEY, {})
    transfer_config.kv_connector_extra_config = extra_config
    vllm_config = copy.copy(vllm_config)
    vllm_config.kv_transfer_config = transfer_config
    return vllm_config, faults
