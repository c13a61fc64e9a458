"""Host-memory KV cache tier for vLLM.

``SimpleCPUOffloadConnector`` is what vLLM loads (``kv_connector_module_path: "simple_offload"``).
It is imported on first use, so that importing the package costs nothing and needs no vLLM.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from simple_offload.connector import SimpleCPUOffloadConnector

__version__ = "0.1.0"

__all__ = ["SimpleCPUOffloadConnector", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "SimpleCPUOffloadConnector":
        from simple_offload.connector import SimpleCPUOffloadConnector

        return SimpleCPUOffloadConnector
    if name == "OffloadingConnector":
        raise AttributeError(
            "vLLM's --kv-offloading-size selects OffloadingConnector. Set "
            "VLLM_USE_SIMPLE_KV_OFFLOAD=1 to have it select SimpleCPUOffloadConnector"
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
