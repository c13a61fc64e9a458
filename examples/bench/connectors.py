"""The KV connectors that engines are compared with."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from examples.bench.child import LAYOUT

SIMPLE = "SimpleCPUOffloadConnector"
"""The name of vLLM's built-in connector, and of ours."""
PACKAGE = "simple_offload"


@dataclass(frozen=True)
class Contender:
    """One way to run vLLM."""

    name: str
    connector: str | None = None
    """vLLM's ``kv_connector``; None runs without one."""
    module: str | None = None
    """``kv_connector_module_path`` of a connector from outside vLLM."""
    environment: Mapping[str, str] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further keys of ``kv_connector_extra_config``."""
    source: str | None = None
    """Folder with another package ``simple_offload``, which takes the place of this one."""

    def transfer_config(self, host_bytes: int) -> dict[str, Any] | None:
        """vLLM's ``kv_transfer_config`` for a host tier of ``host_bytes`` in all ranks together."""
        if self.connector is None:
            return None
        config: dict[str, Any] = {
            "kv_connector": self.connector,
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"cpu_bytes_to_use": host_bytes, **self.extra},
        }
        if self.module is not None:
            config["kv_connector_module_path"] = self.module
        return config


NONE = Contender("none")
OURS = Contender("ours", SIMPLE, PACKAGE)
CONTENDERS = {
    contender.name: contender
    for contender in (
        NONE,
        OURS,
        replace(OURS, name="ours-private", extra={"host_copies": "private"}),
        Contender("builtin", SIMPLE),
        Contender("builtin-lazy", SIMPLE, extra={"lazy_offload": True}),
        Contender("builtin-BLHNC", SIMPLE, environment={LAYOUT: "BLHNC"}),
        Contender("offloading", "OffloadingConnector"),
    )
}
ON_CPU = ("none", "ours")
"""The others copy with CUDA."""


def before(source: Path) -> Contender:
    """Ours at another commit: the package in the folder ``source``."""
    return replace(OURS, name="before", source=str(source.resolve()))
