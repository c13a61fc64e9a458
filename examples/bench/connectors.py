"""The KV connectors that engines are compared with."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from examples.bench.child import LAYOUT

SIMPLE = "SimpleCPUOffloadConnector"
"""The name of vLLM's built-in connector, and of ours."""


@dataclass(frozen=True)
class Contender:
    """One way to run vLLM."""

    name: str
    connector: str | None = None
    """vLLM's ``kv_connector``; None runs without one."""
    module: str | None = None
    """``kv_connector_module_path`` of a connector from outside vLLM."""
    environment: Mapping[str, str] = field(default_factory=dict)

    def transfer_config(self, host_bytes: int) -> dict[str, Any] | None:
        """vLLM's ``kv_transfer_config`` for a host tier of ``host_bytes`` in all ranks together."""
        if self.connector is None:
            return None
        config: dict[str, Any] = {
            "kv_connector": self.connector,
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"cpu_bytes_to_use": host_bytes},
        }
        if self.module is not None:
            config["kv_connector_module_path"] = self.module
        return config


NONE = Contender("none")
OURS = Contender("ours", SIMPLE, "simple_offload")
CONTENDERS = {
    contender.name: contender
    for contender in (
        NONE,
        OURS,
        Contender("builtin", SIMPLE),
        Contender("builtin-BLHNC", SIMPLE, environment={LAYOUT: "BLHNC"}),
        Contender("offloading", "OffloadingConnector"),
    )
}
ON_CPU = ("none", "ours")
"""The others copy with CUDA."""
