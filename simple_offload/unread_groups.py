"""Unread groups: DeepSeek-V4's deep compressor states, which no kernel reads after a hit."""

import re

from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, iter_layer_specs

_COMPRESSOR = re.compile(r"\blayers\.(\d+)\.attn\.compressor\.state_cache$")


def unread_groups(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, block_size: int
) -> frozenset[int]:
    """Ids of the groups without a block that kernels read after a hit. Hits are multiples of
    ``block_size`` tokens.

    A compressor of ratio 128 makes one entry of 128 tokens, and keeps their states until then.
    vLLM's cache has a window of 128 tokens for them. But its kernels read the states at the last
    of 128 tokens only, from the first of these on: ``(position + 1) % COMPRESS_RATIO`` in
    vllm/models/deepseek_v4 (fused_compress_quant_cache.py, sparse_attn_compress_cutedsl.py,
    amd/rocm.py) of vLLM 0.30 to 0.33. Entries of ratio 4 also have the four tokens before, and so
    a window of 8. vllm-ascend has kernels of its own.
    """
    config = vllm_config.model_config.hf_text_config
    if config.model_type != "deepseek_v4" or current_platform.device_type not in {"cuda", "cpu"}:
        return frozenset()

    def is_unread(group: KVCacheGroupSpec) -> bool:
        (spec, *_) = iter_layer_specs(group.kv_cache_spec)
        window = getattr(spec, "sliding_window", None)
        compressors = [_COMPRESSOR.search(name) for name in group.layer_names]
        return (
            window is not None
            and block_size % window == 0
            and all(
                each is not None and config.compress_ratios[int(each[1])] == window
                for each in compressors
            )
        )

    groups = enumerate(kv_cache_config.kv_cache_groups)
    return frozenset(number for number, group in groups if is_unread(group))
