"""SimpleCPUOffloadConnector: the face to vLLM. Every hook is one call into a room behind."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, cast

from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import PromMetric, PromMetricT

from simple_offload import vllm_compat
from simple_offload.config import OffloadConfig, ignored_keys
from simple_offload.layout import page_layout, wanted_layout
from simple_offload.logs import get_logger
from simple_offload.metadata import RankCapacity, StepMetadata, WorkerReport
from simple_offload.metrics import OffloadPromMetrics, OffloadStats
from simple_offload.ranks import Ranks
from simple_offload.replicas import Replicas
from simple_offload.scheduler.manager import OffloadScheduler
from simple_offload.scheduler.supported import (
    require_supported_deployment,
    require_supported_layers,
)
from simple_offload.second_tier.objects import require_known_options
from simple_offload.second_tier.opening import require_second_tier_possible
from simple_offload.worker.overlap import waiting_layers
from simple_offload.worker.worker import OffloadWorker

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = get_logger(__name__)

vllm_compat.require_supported_vllm()


class SimpleCPUOffloadConnector(KVConnectorBase_V1, SupportsHMA):
    """Keeps KV blocks that the device evicts in host memory and loads them back.

    vLLM makes one with the scheduler role and one with the worker role for each rank; each
    has only its own side. Without prefix caching both sides are absent and every hook does
    nothing, since blocks are found by their prefix hashes. ``kv_role`` makes no difference:
    any role both stores and loads, as with vLLM's built-in connector.
    """

    _cache_hit_source = vllm_compat.hit_source("host")

    def __init__(
        self,
        vllm_config: "VllmConfig",
        role: KVConnectorRole,
        kv_cache_config: "KVCacheConfig",
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.scheduler: OffloadScheduler | None = None
        self.worker: OffloadWorker | None = None
        require_supported_deployment(vllm_config)
        ranks = Ranks.from_config(vllm_config.parallel_config)
        extra_config = self._kv_transfer_config.kv_connector_extra_config or {}
        config = OffloadConfig.parse(extra_config, ranks)
        if role == KVConnectorRole.SCHEDULER and (ignored := ignored_keys(extra_config)):
            logger.warning("Ignored in kv_connector_extra_config: %s", ", ".join(ignored))
        if not vllm_config.cache_config.enable_prefix_caching:
            if role == KVConnectorRole.SCHEDULER:
                logger.warning(
                    "Prefix caching is off, and host blocks are found by prefix hashes: "
                    "nothing will be stored or loaded. Enable prefix caching, or remove the "
                    "connector from --kv-transfer-config."
                )
            return
        require_supported_layers(kv_cache_config)
        if role == KVConnectorRole.SCHEDULER:
            self.scheduler = OffloadScheduler(vllm_config, kv_cache_config, config)
        else:
            replicas = Replicas.find(vllm_config, kv_cache_config)
            self.worker = OffloadWorker(
                kv_cache_config,
                config,
                ranks,
                replicas,
                page_layout=lambda: page_layout(vllm_config),
                waiting_layers=lambda: waiting_layers(vllm_config),
            )

    # Before there is an engine

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """No: a step that vLLM replays as one CUDA graph waits for whole loads at its start. vLLM
        asks before it loads the model, which makes this the earliest place for a wrong key to be
        refused. How many ranks share the memory of this machine is not known yet."""
        config = OffloadConfig.parse(extra_config, Ranks(1, num_here=0))
        if config.second_tier is not None:
            require_known_options(config.second_tier)
        return False

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: "VllmConfig") -> str | None:
        """vLLM asks before it measures how much memory is left for KV caches, which makes this the
        earliest place for a deployment to be refused."""
        require_supported_deployment(vllm_config)
        kv_transfer_config = vllm_config.kv_transfer_config
        extra_config = kv_transfer_config.kv_connector_extra_config if kv_transfer_config else {}
        ranks = Ranks.from_config(vllm_config.parallel_config)
        config = OffloadConfig.parse(extra_config or {}, ranks)
        if config.second_tier is not None and vllm_config.cache_config.enable_prefix_caching:
            require_second_tier_possible(config.second_tier, vllm_config)
        return wanted_layout(vllm_config, config)

    @property
    def requires_kv_delivery(self) -> bool:
        """A store that is dropped costs a later hit and nothing else."""
        return False

    # Scheduler side

    def bind_kv_cache_manager(self, kv_cache_manager: "KVCacheManager") -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        if self.scheduler is not None:
            self.scheduler.bind_kv_cache_manager(kv_cache_manager)

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        if self.scheduler is not None:
            # Beside another connector (MultiConnector) the metadata may not be ours.
            capacities = (rank for rank in metadata.values() if isinstance(rank, RankCapacity))
            self.scheduler.agree_on_capacity(capacities)

    def on_new_request(self, request: "Request") -> None:
        if self.scheduler is not None:
            self.scheduler.on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: "Request", num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if self.scheduler is None:
            return 0, False
        return self.scheduler.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int
    ) -> None:
        if self.scheduler is not None:
            self.scheduler.update_state_after_alloc(request, blocks, num_external_tokens)

    def get_external_cache_hit_sources(
        self, request: "Request", num_external_tokens: int
    ) -> dict[Any, int]:
        """vLLM 0.32 and newer, for its own metrics: without sources of no token."""
        assert self.scheduler is not None  # or it would have had no hit
        sources = self.scheduler.hit_sources(request, num_external_tokens)
        return {vllm_compat.hit_source(name): n for name, n in sources.items() if n}

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> KVConnectorMetadata:
        if self.scheduler is None:
            return StepMetadata()
        return self.scheduler.build_connector_meta(scheduler_output)

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        if self.scheduler is not None:
            self.scheduler.update_connector_output(connector_output)

    def request_finished(
        self, request: "Request", block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        if self.scheduler is None:
            return False, None
        return self.scheduler.request_finished(request)

    def has_pending_push_work(self) -> bool:
        return self.scheduler is not None and self.scheduler.has_pending_work()

    def has_pending_block_frees(self) -> bool:
        return self.scheduler is not None and self.scheduler.has_pending_block_frees()

    def reset_cache(self) -> bool | None:
        """vLLM's sleep resets the caches before it takes device memory away. Older than 0.33, it
        tells no rank (``unregister_kv_caches``). A server has waited for stores by then. An engine
        in the caller's process has not: here, its rank waits for them."""
        if self._vllm_config.model_config.enable_sleep_mode and has_kv_transfer_group():
            group = get_kv_transfer_group()
            for rank in getattr(group, "sub_connectors", [group]):  # MultiConnector's
                if isinstance(rank, SimpleCPUOffloadConnector):
                    rank.unregister_kv_caches()
        return self.scheduler.reset_cache() if self.scheduler is not None else True

    # Worker side

    def register_kv_caches(self, kv_caches: dict[str, "torch.Tensor"]) -> None:
        if self.worker is not None:
            self.worker.register_kv_caches(kv_caches)

    def unregister_kv_caches(self) -> None:
        """vLLM 0.33, before sleep."""
        if self.worker is not None:
            self.worker.drain()

    def restore_kv_caches(self) -> None:
        """Nothing, on vLLM 0.33, after sleep: KV memory comes back at the same addresses."""

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """None beside other connectors: vLLM's MultiConnector passes on what its first connector
        with metadata returns, and NixlConnector does not start without its own."""
        is_alone = not has_kv_transfer_group() or get_kv_transfer_group() is self
        return self.worker.capacity if self.worker is not None and is_alone else None

    def get_aligned_num_cpu_blocks(self) -> int | None:
        """vLLM 0.33 asks each rank's built-in connector before it builds the scheduler; it uses the
        smallest answer."""
        return self.worker.capacity.num_host_blocks if self.worker is not None else None

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        if self.worker is not None:
            assert isinstance(connector_metadata, StepMetadata)
            self.worker.bind(connector_metadata)

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:
        if self.worker is not None:
            self.worker.submit_loads()

    def wait_for_layer_load(self, layer_name: str) -> None:
        if self.worker is not None:
            self.worker.wait_for_layer(layer_name)

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: "torch.Tensor",
        attn_metadata: "AttentionMetadata",
        **kwargs: Any,
    ) -> None:
        """Nothing: stores copy whole blocks of earlier steps."""

    def wait_for_save(self) -> None:
        if self.worker is not None:
            self.worker.submit_stores()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        if self.worker is None:
            return KVConnectorTransferResults()
        loaded, failed = self.worker.poll()
        return KVConnectorTransferResults(finished_recving=loaded, failed_recving=failed)

    def build_connector_worker_meta(self) -> WorkerReport | None:
        return self.worker.drain_report() if self.worker is not None else None

    # Both

    def get_kv_connector_stats(self) -> OffloadStats | None:
        if self.scheduler is not None:
            return self.scheduler.drain_stats()
        return self.worker.drain_stats() if self.worker is not None else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> OffloadStats:
        return OffloadStats() if data is None else OffloadStats(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: "VllmConfig",
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> OffloadPromMetrics:
        return OffloadPromMetrics(
            vllm_config,
            cast(Any, metric_types),
            labelnames,
            per_engine_labelvalues,
        )

    def take_events(self) -> Iterable["KVCacheEvent"]:
        return self.scheduler.drain_events() if self.scheduler is not None else ()

    def shutdown(self) -> None:
        if self.scheduler is not None:
            self.scheduler.shutdown()
        if self.worker is not None:
            self.worker.shutdown()


vllm_compat.claim_builtin_name(SimpleCPUOffloadConnector)
