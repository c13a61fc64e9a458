"""What the scheduler side can serve; of anything else, an error that says why."""

from itertools import count

from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    KVCacheConfig,
    MambaSpec,
    iter_layer_specs,
)

from simple_offload.config import ConfigError, OffloadConfig


def require_supported_groups(kv_cache_config: KVCacheConfig) -> None:
    """Raise ConfigError for a model whose KV cache this version cannot serve."""
    if not kv_cache_config.prefix_cacheable_group_ids:
        raise ConfigError("this model has no KV cache group that prefix caching covers")
    modes = {
        spec.mamba_cache_mode
        for group in kv_cache_config.kv_cache_groups
        for spec in iter_layer_specs(group.kv_cache_spec)
        if isinstance(spec, MambaSpec)
    }
    if "none" in modes:
        # vLLM then has one state a request, which it overwrites with every token.
        raise ConfigError(
            "mamba_cache_mode='none': vLLM keeps no state that a later request could start from; "
            "allowed: 'align', which vLLM chooses when enable_prefix_caching is on"
        )
    if any(group.host_resident for group in kv_cache_config.kv_cache_groups):
        raise ConfigError("KV cache groups that live in host memory already are not supported")


def chunk_sizes(kv_cache_config: KVCacheConfig) -> frozenset[int]:
    """Tokens of the chunks that attention is local to, of all layers that have such."""
    return frozenset(
        spec.attention_chunk_size
        for group in kv_cache_config.kv_cache_groups
        for spec in iter_layer_specs(group.kv_cache_spec)
        if isinstance(spec, ChunkedLocalAttentionSpec)
    )


def require_parts_possible(
    config: OffloadConfig, kv_cache_config: KVCacheConfig, block_size: int
) -> None:
    """Raise ConfigError where host blocks of several device blocks cannot be had."""
    setting = f"cpu_block_size={config.cpu_block_size}"
    allowed = f"allowed: {block_size}, or no cpu_block_size"
    if config.lazy_offload:
        raise ConfigError(
            f"{setting}: lazy_offload stores device blocks one by one; {allowed}, or "
            "lazy_offload=false"
        )
    # A state stands for all tokens before it, so there is one at the end of a block and none of
    # its parts; vLLM keeps few of them besides.
    if kv_cache_config.has_mamba_layers:
        raise ConfigError(f"{setting}: this model has state (Mamba) layers; {allowed}")
    # vLLM's lookup for attention in chunks (ChunkedLocalAttentionManager.find_longest_cache_hit)
    # takes it that blocks and chunks end together.
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
