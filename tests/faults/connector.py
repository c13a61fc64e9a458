"""The connector with faults: the module that ``kv_connector_module_path: "tests.faults.connector"``
loads. Its worker copies through a FaultyBackend. The product has none of this."""

from typing import TYPE_CHECKING, Any, cast
from unittest.mock import patch

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from simple_offload import connector
from simple_offload.backends.base import CopyBackend
from simple_offload.backends.select import make_backend
from tests.faults.backend import FaultyBackend

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


class SimpleCPUOffloadConnector(connector.SimpleCPUOffloadConnector):
    """The product's connector with planned faults."""

    faults: FaultyBackend

    def __init__(
        self,
        vllm_config: "VllmConfig",
        role: KVConnectorRole,
        kv_cache_config: "KVCacheConfig",
    ) -> None:
        def make_faulty(*arguments: Any) -> CopyBackend:
            self.faults = FaultyBackend(make_backend(*arguments))
            return cast(CopyBackend, self.faults)

        with patch("simple_offload.worker.worker.make_backend", make_faulty):
            super().__init__(vllm_config, role, kv_cache_config)
