"""No offloading: a KV connector that keeps nothing, so that vLLM's device cache is alone."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)

if TYPE_CHECKING:
    import torch
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from examples.scheduler_bench.contenders import Transfer


class NoOffload(KVConnectorBase_V1, SupportsHMA):
    """Offers no hit and starts no transfer."""

    def get_num_new_matched_tokens(
        self, request: "Request", num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return 0, False

    def update_state_after_alloc(
        self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int
    ) -> None:
        pass

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, None

    # The worker side does not run here.

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:
        raise NotImplementedError

    def wait_for_layer_load(self, layer_name: str) -> None:
        raise NotImplementedError

    def save_kv_layer(
        self, layer_name: str, kv_layer: "torch.Tensor", attn_metadata: Any, **kwargs: Any
    ) -> None:
        raise NotImplementedError

    def wait_for_save(self) -> None:
        raise NotImplementedError


class NoSide:
    """``contenders.Side`` of NoOffload."""

    connector = "NoOffload"
    module: str | None = "examples.scheduler_bench.no_offload"

    def extra_config(self, num_blocks: int, block_bytes: int) -> dict[str, Any]:
        return {}

    def open(self, connector: Any, num_blocks: int, block_bytes: int) -> None:
        pass

    def submitted(self, metadata: KVConnectorMetadata) -> "list[Transfer]":
        return []

    def report(self, ended: "Sequence[Transfer]") -> "KVConnectorOutput | None":
        return None

    def num_host_blocks(self, connector: Any) -> int:
        return 0

    def has(self, connector: Any, key: "BlockHashWithGroupId") -> bool:
        return False
