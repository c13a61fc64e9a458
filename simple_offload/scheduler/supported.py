"""Checks at start: models and executors that the scheduler side cannot serve are refused."""

from itertools import count
from typing import Any

from pydantic import TypeAdapter
from vllm.config import ParallelConfig, VllmConfig
from vllm.platforms import current_platform
from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    KVCacheConfig,
    MambaSpec,
    iter_layer_specs,
)

from simple_offload import vllm_compat
from simple_offload.config import ConfigError, OffloadConfig


def require_supported_deployment(vllm_config: VllmConfig) -> None:
    """Raise ConfigError for an executor, or for options of vLLM or the platform, that this version
    cannot serve."""
    _require_supported_executor(vllm_config.parallel_config)
    if vllm_compat.returns_routed_experts(vllm_config):
        raise ConfigError(
            "enable_return_routed_experts=true: vLLM keeps the experts of as many blocks as the "
            "device has, and its engine would end at a hit of others; allowed: false"
        )
    if _is_on_npu():
        _require_supported_ascend_options(vllm_config.additional_config or {})


def _require_supported_executor(parallel: ParallelConfig) -> None:
    """A store can be found only when all ranks have reported it to the scheduler."""
    backend, allowed = parallel.distributed_executor_backend, "allowed: 'mp' or 'ray'"
    if backend == "external_launcher" and parallel.world_size > 1:
        # Each rank's engine gets that rank's reports only. And its scheduler would load when that
        # rank is ready, while such engines must all decide alike.
        raise ConfigError(
            f"distributed_executor_backend={backend!r} with {parallel.world_size} ranks: each "
            f"rank's scheduler hears of its own transfers only, and nothing would be found; "
            f"{allowed}, or one rank"
        )
    if (
        backend == "ray"
        and parallel.pipeline_parallel_size > 1
        and vllm_compat.ray_reports_one_stage()
    ):
        raise ConfigError(
            "VLLM_USE_RAY_V2_EXECUTOR_BACKEND=0 with pipeline parallel "
            f"({parallel.pipeline_parallel_size} stages): that executor drops what all stages but "
            f"the last report, and loads would never end; allowed: 1, which is vLLM's default"
        )


def _require_supported_ascend_options(options: Any) -> None:
    """vllm-ascend's own (``--additional-config``, 0.30.0rc2), which move KV out of its blocks."""
    if _is_true(options.get("enable_kvpp", False)):
        raise ConfigError(
            "additional_config.enable_kvpp=true: a rank then has the KV of some layers, and the "
            "other layers take turns in two buffers; allowed: false"
        )
    if _is_true(options.get("sparse_kv_offload_config", {}).get("enabled", False)):
        raise ConfigError(
            "additional_config.sparse_kv_offload_config.enabled=true: vllm-ascend then keeps KV in "
            "host memory itself; allowed: false"
        )


def require_supported_layers(kv_cache_config: KVCacheConfig) -> None:
    """Raise ConfigError for layers whose KV this device's vLLM does not keep as this version
    expects. Every rank checks its own, before it opens memory: vLLM's scheduler is made later, and
    told of one layer of a group."""
    if any(group.host_resident for group in kv_cache_config.kv_cache_groups):
        raise ConfigError(
            "KV cache groups that live in host memory already (as HiSparseConnector has them) are "
            "not supported; allowed: one of both connectors"
        )
    if not _is_on_npu():
        return
    for group in kv_cache_config.kv_cache_groups:
        for spec in iter_layer_specs(group.kv_cache_spec):
            if isinstance(spec, MambaSpec):
                # patch_mamba_block_aligned_split.py: no split after a hit, if kv_role is kv_both or
                # kv_consumer. In the simulator, pages with wrong states were read.
                raise ConfigError(
                    "this model has state (Mamba) layers: beside a KV connector, vllm-ascend does "
                    "not end steps where states are kept, and a kept state may then be of other "
                    "tokens than its key; allowed on an NPU: models of attention layers"
                )
            if (count := getattr(spec, "sfa_dcp_replicated_indexer_size", 1)) > 1:
                raise ConfigError(
                    f"decode_context_parallel_size={count} with a sparse attention indexer: each "
                    "rank has the indexer's KV of all ranks, and where a block's part of it lies "
                    "is not known; allowed on an NPU: 1"
                )


def _is_on_npu() -> bool:
    return str(current_platform.device_type) == "npu"


def _is_true(value: object) -> bool:
    """As vllm-ascend reads its options: "true" is one, too."""
    return TypeAdapter(bool).validate_python(value)


def require_supported_groups(kv_cache_config: KVCacheConfig) -> None:
    """Raise ConfigError for a model with a KV cache that this version cannot serve."""
    if not kv_cache_config.prefix_cacheable_group_ids:
        raise ConfigError("this model has no KV cache group that prefix caching covers")


def require_right_states(coordinator: KVCacheCoordinator, hash_block_size: int) -> None:
    """Raise ConfigError where this vLLM finds wrong states by itself."""
    if vllm_compat.confuses_states(coordinator):
        raise ConfigError(
            f"prefix_match_unit={hash_block_size}: the blocks of this model's state (Mamba) layers "
            "have more tokens, and vLLM 0.30 may then find the state of another prefix; allowed: "
            "no prefix_match_unit, or vLLM 0.31 or later"
        )


def chunk_sizes(kv_cache_config: KVCacheConfig) -> frozenset[int]:
    """Chunk sizes, in tokens, of all layers whose attention is local to a chunk."""
    return frozenset(
        spec.attention_chunk_size
        for group in kv_cache_config.kv_cache_groups
        for spec in iter_layer_specs(group.kv_cache_spec)
        if isinstance(spec, ChunkedLocalAttentionSpec)
    )


def require_sub_blocks_possible(
    config: OffloadConfig, kv_cache_config: KVCacheConfig, block_size: int
) -> None:
    """Raise ConfigError if host blocks cannot have several sub-blocks."""
    setting = f"cpu_block_size={config.cpu_block_size}"
    allowed = f"allowed: {block_size}, or no cpu_block_size"
    # A state stands for all tokens before it: a host block has one at its end, and none for its
    # other sub-blocks. vLLM keeps few of them anyway.
    if kv_cache_config.has_mamba_layers:
        raise ConfigError(f"{setting}: this model has state (Mamba) layers; {allowed}")
    # vLLM's lookup for attention in chunks (ChunkedLocalAttentionManager.find_longest_cache_hit)
    # assumes that blocks and chunks end together.
    size = config.cpu_block_size
    chunks = chunk_sizes(kv_cache_config)
    if size is not None and not _fit(size, chunks):
        nearest = next(
            near
            for distance in count(block_size, block_size)
            for near in (size + distance, size - distance)
            if near > 0 and _fit(near, chunks)
        )
        raise ConfigError(
            f"{setting}: must divide attention_chunk_size={min(chunks)} of this model, or be a "
            f"multiple of it; the nearest is {nearest}"
        )


def _fit(size: int, chunks: frozenset[int]) -> bool:
    return all(chunk % size == 0 or size % chunk == 0 for chunk in chunks)
