"""Replicas: ranks of an engine that have the same KV."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
    iter_layer_specs,
)

from simple_offload import vllm_compat

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_HEAD_COUNT = re.compile(
    r"kv.*head|head.*kv|key_value_head|query_group|attention_group|heads_in_group"
)
"""Names of a model's numbers of KV heads, in Hugging Face's configurations."""


@dataclass(frozen=True)
class Replicas:
    """Consecutive tensor parallel ranks that have the same KV, ``count`` of them together."""

    count: int = 1
    private_groups: frozenset[int] = frozenset()
    """KV cache groups whose pages differ between these ranks."""

    @classmethod
    def find(cls, vllm_config: "VllmConfig", kv_cache_config: KVCacheConfig) -> "Replicas":
        """The replicas of a model, by what vLLM says of its layers (``max_tp_shards``,
        ``tp_replicated``), and where there are more ranks than KV heads. If in doubt, a group is
        private. ``kv_cache_config``: a worker's, which describes each layer."""
        parallel = vllm_config.parallel_config
        num_ranks = parallel.tensor_parallel_size
        if num_ranks == 1 or parallel.prefill_context_parallel_size > 1:
            return cls()
        num_kv_heads = _num_kv_heads(vllm_config)
        by_group = {
            group: math.gcd(
                *(
                    _count(spec, num_ranks, parallel.decode_context_parallel_size, num_kv_heads)
                    for spec in iter_layer_specs(
                        kv_cache_config.kv_cache_groups[group].kv_cache_spec
                    )
                )
            )
            for group in kv_cache_config.prefix_cacheable_group_ids
        }
        count = math.gcd(*(count for count in by_group.values() if count > 1))
        if count <= 1:
            return cls()
        return cls(count, frozenset(group for group, each in by_group.items() if each % count))


def _count(spec: KVCacheSpec, num_ranks: int, dcp_size: int, num_kv_heads: int | None) -> int:
    """How many of ``num_ranks`` consecutive ranks have the same pages of a layer."""
    if isinstance(spec, MambaSpec):
        return num_ranks if spec.tp_replicated else 1
    if not isinstance(spec, AttentionSpec):
        return 1
    if dcp_size > 1 and vllm_compat.is_dcp_sharded(spec):
        return 1
    num_shards = vllm_compat.max_tp_shards(spec)
    if num_shards is None and type(spec) in (FullAttentionSpec, SlidingWindowSpec):
        # vLLM's QKVParallelLinear gives each KV head to consecutive ranks.
        is_sure = spec.num_kv_heads == 1 and not spec.kv_quant_mode.is_per_token_head
        num_shards = num_kv_heads if is_sure else None
    if num_shards is None or num_ranks % num_shards:
        return 1
    return num_ranks // num_shards


def _num_kv_heads(vllm_config: "VllmConfig") -> int | None:
    """KV heads of each layer of the model and its drafter; None if layers may differ."""
    models, drafter = [vllm_config.model_config], vllm_config.speculative_config
    try:
        if drafter is not None:
            num_ranks = vllm_config.parallel_config.tensor_parallel_size
            if drafter.draft_parallel_config.tensor_parallel_size != num_ranks:
                return None
            models.append(drafter.draft_model_config)
        counts = {model.get_total_num_kv_heads() for model in models}
    except AttributeError:  # a drafter without attention, as Medusa, or without a configuration
        return None
    for model in models:
        counts.update(_head_counts(model.hf_text_config.to_dict()))
    return counts.pop() if len(counts) == 1 else None


def _head_counts(config: Any, is_count: bool = False) -> Iterator[int]:
    """All numbers of KV heads in a configuration, however deep."""
    if isinstance(config, dict):
        for name, value in config.items():
            yield from _head_counts(value, is_count or bool(_HEAD_COUNT.search(str(name))))
    elif isinstance(config, list | tuple):
        for value in config:
            yield from _head_counts(value, is_count)
    elif is_count and isinstance(config, int) and not isinstance(config, bool):
        yield config
