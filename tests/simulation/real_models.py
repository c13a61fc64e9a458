"""Real models: the KV cache specs of published models, and the groups that vLLM makes of them.

Each layer's spec comes from vLLM's own layer class. The layer object has only the attributes that
``get_kv_cache_spec`` reads: no weights, no kernels, no GPU. Each function names its sources, the
model files of vLLM. A checkpoint's config.json sets the number of heads and the order of layers.
Here these are typical of the family, and not of one checkpoint. A few repeats of the layer pattern
stand for all layers.
"""

import copy
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.v1.attention.backend import AttentionType
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import (
    CircularBufferSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MLAAttentionSpec,
    SparseCacheRole,
)

from tests.simulation.device import layer_spec
from tests.simulation.groups import DRAFT, SpeculativeConfig

planning: Any = kv_cache_utils
"""vLLM's module that plans KV caches. Its name differs from 0.33 on."""
if not hasattr(planning, "get_kv_cache_groups"):
    planning = importlib.import_module("vllm.v1.core.kv_cache_planning")

Specs = dict[str, KVCacheSpec]
"""By layer name, in the order in which vLLM registers the layers."""


@dataclass(frozen=True)
class Drafter:
    """A drafter with KV pages. ``method``: vLLM's name for its method. ``architecture``: in vLLM's
    registry. ``num_modules``: MTP modules that draft one after the other."""

    method: str
    architecture: str
    num_drafted: int = 3
    num_modules: int = 1


@dataclass(frozen=True)
class RealModel:
    """A model as served on GPUs."""

    architecture: str
    """In vLLM's registry."""
    block_size: int
    """``cache_config.block_size``, in tokens."""
    layers: Callable[[VllmConfig], Specs]
    """The target's layers, then the drafter's."""
    drafter: Drafter | None = None
    shrink: int = 4
    """Tokens for each token of the simulator. Divides all block sizes, windows and chunks."""
    cache_dtype: str = "auto"
    layout: str = "BLHNC"
    """The KV layout that this connector requests. vLLM uses it where kernels can."""
    hybrid: bool = True
    """Whether vLLM puts different kinds of layers in separate groups."""
    compress_ratios: tuple[int, ...] = ()
    """DeepSeek-V4's, by layer."""
    state_page_bytes: int | None = None
    """Bytes of a state page: as large as vLLM makes them. They equal attention's pages, whose
    blocks vLLM enlarges to match (``_align_hybrid_block_size`` in platforms/interface.py)."""


# Layers

_BF16 = torch.bfloat16


def _spec(layer_class: Any, config: VllmConfig, **attributes: Any) -> KVCacheSpec:
    layer = object.__new__(layer_class)
    layer.__dict__.update(attributes)  # nn.Module.__setattr__ needs __init__, which has not run
    spec = layer_class.get_kv_cache_spec(layer, config)
    assert isinstance(spec, KVCacheSpec)
    return spec


def _class(module: str, name: str) -> Any:
    return getattr(importlib.import_module(f"vllm.{module}"), name)


def _attention(
    config: VllmConfig, num_kv_heads: int, head_size: int, window: int | None = None
) -> KVCacheSpec:
    """A layer of ordinary attention with FlashAttention's kernels."""
    return _spec(
        _class("model_executor.layers.attention.attention", "Attention"),
        config,
        attn_type=AttentionType.DECODER,
        attn_backend=_class("v1.attention.backends.flash_attn", "FlashAttentionBackend"),
        kv_cache_dtype="auto",
        kv_cache_torch_dtype=_BF16,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        head_size_v=head_size,
        sliding_window=window,
    )


# Models


_COMPRESS_RATIOS = (0, 0, 4, 128, 4, 128, 4)


def _deepseek_v4(config: VllmConfig) -> Specs:
    """models/deepseek_v4/attention.py, compressor.py: each layer has a window of latents. Most also
    have compressed latents of all tokens, and those still to be compressed. An MTP layer has only a
    window."""
    specs: Specs = {}
    for layer, ratio in enumerate(_COMPRESS_RATIOS):
        prefix = f"model.layers.{layer}.attn"
        if ratio == 4:
            specs[f"{prefix}.indexer.k_cache"] = _spec(
                _class("models.deepseek_v4.attention", "DeepseekV4IndexerCache"),
                config,
                cache_config=config.cache_config,
                head_dim=128 + 4,  # of one byte, and a scale
                dtype=torch.uint8,
                compress_ratio=ratio,
            )
            state = f"{prefix}.indexer.compressor.state_cache"
            specs[state] = _compressor_state(config, ratio, head_dim=128)
        specs[f"{prefix}.swa_cache"] = _deepseek_window(config)
        if ratio:
            specs[prefix] = _spec(
                _class("models.deepseek_v4.nvidia.flashmla", "DeepseekV4FlashMLAAttention"),
                config,
                compress_ratio=ratio,
                head_dim=512,
                kv_cache_dtype=config.cache_config.cache_dtype,
                kv_cache_torch_dtype=torch.uint8,
            )
            state = f"{prefix}.compressor.state_cache"
            specs[state] = _compressor_state(config, ratio, head_dim=512)
    if config.speculative_config is not None:
        specs["draft.layers.7.attn.swa_cache"] = _deepseek_window(config)
    return specs


def _compressor_state(config: VllmConfig, ratio: int, head_dim: int) -> KVCacheSpec:
    num_overlapping = 2 if ratio == 4 else 1
    return _spec_of_built(
        _class("models.deepseek_v4.compressor", "CompressorStateCache"),
        config,
        state_dim=2 * num_overlapping * head_dim,
        dtype=torch.float32,
        compress_ratio=ratio,
    )


def _deepseek_window(config: VllmConfig) -> KVCacheSpec:
    return _spec_of_built(
        _class("v1.attention.backends.mla.sparse_swa", "DeepseekV4SWACache"),
        config,
        head_dim=512,
        window_size=128,
        dtype=torch.uint8,
        cache_config=config.cache_config,
    )


def _spec_of_built(layer_class: Any, config: VllmConfig, **arguments: Any) -> KVCacheSpec:
    """The spec of a layer whose own ``__init__`` can run here."""
    config.compilation_config.static_forward_context.clear()
    with set_current_vllm_config(config):
        layer = layer_class(prefix="", **arguments)
    spec = layer.get_kv_cache_spec(config)
    assert isinstance(spec, KVCacheSpec)
    return spec


def _kimi_k3(config: VllmConfig, *, non_causal: bool = False) -> Specs:
    """models/kimi_k3/nvidia/{kda,mla,mtp,dspark_mla}.py: three layers of linear attention for each
    of MLA. The drafter uses MLA; DSpark's is non-causal."""
    state = _spec(
        _class("models.kimi_k3.nvidia.kda", "KimiK3DeltaAttention"),
        config,
        tp_size=8,
        num_heads=64,
        head_dim=128,
        conv_size=4,
        num_spec=config.num_speculative_tokens,
        model_config=SimpleNamespace(dtype=_BF16),
        cache_config=config.cache_config,
        kda_prefill_backend="flashkda",
    )

    def latents(*, non_causal: bool = False) -> KVCacheSpec:
        return _spec(
            _class("models.kimi_k3.nvidia.mla", "MultiHeadLatentAttention"),
            config,
            head_size=512 + 64,
            kv_cache_dtype=config.cache_config.cache_dtype,
            non_causal_multi_token_decode=non_causal,
        )

    layers = [latents() if layer % 4 == 3 else state for layer in range(8)]
    return _named("self_attn", layers, config, latents(non_causal=non_causal))


def _minimax_m3(config: VllmConfig) -> Specs:
    """models/minimax_m3/nvidia/model.py (MiniMaxM3Attention, MiniMaxM3SparseAttention, both with 4
    KV heads), common/indexer.py (MiniMaxM3IndexerCache): three dense layers, then sparse ones with
    an index. The module needs torchvision, so the specs are written out here."""
    block_size = config.cache_config.block_size
    attention = FullAttentionSpec(
        block_size=block_size, num_kv_heads=4, head_size=128, dtype=torch.float8_e4m3fn
    )
    index = MLAAttentionSpec(
        block_size=block_size,
        num_kv_heads=1,
        head_size=128,
        dtype=torch.float8_e4m3fn,
        cache_role=SparseCacheRole.INDEXER,
    )
    specs: Specs = {}
    # The drafter's layer is sparse (nvidia/mtp.py).
    for layer, name in enumerate(_names("self_attn", config, 6)):
        specs[f"{name}.attn" if layer < 3 else name] = attention
        if layer >= 3:
            specs[f"{name}.indexer.index_cache"] = index
    return specs


def _glm_5(config: VllmConfig) -> Specs:
    """models/glm5next/common/attention.py, without its layers of linear attention, beside which
    hits are rare: latents, an index with an entry for four tokens, and a ring that holds those of
    an entry that is not complete. The MTP layer has the same. The module needs torchvision, so the
    specs are written out here."""
    block_size = config.cache_config.block_size
    latents = MLAAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=576, dtype=_BF16)
    index = MLAAttentionSpec(
        block_size=block_size, num_kv_heads=1, head_size=132, dtype=torch.uint8, tokens_per_state=4
    )
    ring = CircularBufferSpec(
        block_size=8, num_kv_heads=2, head_size=128, head_size_v=0, dtype=_BF16, dcp_sharded=False
    )
    specs: Specs = {}
    for name in _names("self_attn", config, 4):
        specs[name] = latents
        specs[f"{name}.indexer.k_cache"] = index
        specs[f"{name}.indexer.tail_cache"] = ring
    return specs


def _gpt_oss(config: VllmConfig) -> Specs:
    """model_executor/models/gpt_oss.py: every other layer has a window of 128. The drafter is
    Llama's (llama_eagle3.py)."""
    layers = [_attention(config, 8, 64, None if layer % 2 else 128) for layer in range(6)]
    return _named("attn", layers, config, _attention(config, 8, 64))


def _gemma_3(config: VllmConfig) -> Specs:
    """model_executor/models/gemma3.py, 27B: five layers with a window of 1024 for each without. The
    drafter has half as many heads, so its pages have another size."""
    layers = [_attention(config, 16, 128, None if layer == 5 else 1024) for layer in range(6)]
    return _named("attn", layers, config, _attention(config, 8, 128))


def _step_3p5(config: VllmConfig) -> Specs:
    """model_executor/models/step3p5.py, step3p5_mtp.py: three layers with a window of 512 for
    each without; each MTP module is a layer with a window."""
    windows = [512 if layer % 4 else None for layer in range(8)]
    layers = [_attention(config, 8, 128, window) for window in windows]
    return _named("self_attn.attn", layers, config, *[_attention(config, 8, 128, 512)] * 3)


def _llama_4(config: VllmConfig) -> Specs:
    """model_executor/models/llama4.py: three layers that attend within chunks of 8192 for each
    without chunks. The drafter is Llama's (llama_eagle3.py)."""
    local = _class(
        "model_executor.layers.attention.chunked_local_attention", "ChunkedLocalAttention"
    )
    chunked = _spec(
        local,
        config,
        attention_chunk_size=8192,
        num_kv_heads=8,
        head_size=128,
        kv_cache_dtype="auto",
        kv_cache_torch_dtype=_BF16,
    )
    whole = _attention(config, 8, 128)
    return _named("self_attn.attn", [chunked, chunked, chunked, whole] * 2, config, whole)


def _named(
    suffix: str, layers: Sequence[KVCacheSpec], config: VllmConfig, *drafters: KVCacheSpec
) -> Specs:
    """The specs of a model's layers, and of its drafter's if it has one."""
    names = _names(suffix, config, len(layers), len(drafters))
    return dict(zip(names, [*layers, *drafters], strict=False))


def _names(suffix: str, config: VllmConfig, num_layers: int, num_drafters: int = 1) -> list[str]:
    """The names of a model's layers, and of its drafter's if it has one."""
    prefixes = ["model."] * num_layers
    if config.speculative_config is not None:
        prefixes += [DRAFT] * num_drafters
    return [f"{prefix}layers.{layer}.{suffix}" for layer, prefix in enumerate(prefixes)]


_EAGLE3 = Drafter("eagle3", "Eagle3LlamaForCausalLM")
_KIMI_K3 = RealModel(
    "KimiK3ForConditionalGeneration",
    1024,
    _kimi_k3,
    Drafter("mtp", "KimiK3MTPModel"),
    shrink=256,
    state_page_bytes=1024 * 576,
    cache_dtype="fp8",
)
_GEMMA_3 = RealModel("Gemma3ForCausalLM", 64, _gemma_3, _EAGLE3, shrink=16)
_LLAMA_4 = RealModel("Llama4ForCausalLM", 256, _llama_4, shrink=64)

REAL_MODELS = {
    "DeepSeek-V4": RealModel(
        "DeepseekV4ForCausalLM",
        256,
        _deepseek_v4,
        Drafter("mtp", "DeepSeekV4MTPModel", num_drafted=2),
        shrink=2,
        cache_dtype="fp8_ds_mla",
        compress_ratios=_COMPRESS_RATIOS,
    ),
    "Kimi-K3, MTP": _KIMI_K3,
    "Kimi-K3, DSpark": replace(
        _KIMI_K3,
        layers=partial(_kimi_k3, non_causal=True),
        drafter=Drafter("dspark", "K3DSparkModel"),
    ),
    "MiniMax-M3": RealModel(
        "MiniMaxM3SparseForCausalLM",
        128,
        _minimax_m3,
        Drafter("mtp", "MiniMaxM3MTP"),
        shrink=32,
        cache_dtype="fp8",
    ),
    "GLM-5.3, MTP": RealModel(
        "Glm5NextForCausalLM", 64, _glm_5, Drafter("mtp", "Glm5NextMTPModel", num_drafted=3)
    ),
    "gpt-oss, EAGLE3": RealModel("GptOssForCausalLM", 16, _gpt_oss, _EAGLE3),
    "Gemma 3, EAGLE3": _GEMMA_3,
    "Gemma 3, EAGLE3, layers outermost": replace(_GEMMA_3, layout="LBHNC"),
    "Step-3.5, chained MTP": RealModel(
        "Step3p5ForCausalLM", 64, _step_3p5, Drafter("mtp", "Step3p5MTP", num_modules=3), shrink=16
    ),
    "Llama 4": _LLAMA_4,
    "Llama 4, EAGLE3": replace(_LLAMA_4, drafter=_EAGLE3, hybrid=False),
}
"""Models to run with this connector, by name. Block sizes are vLLM's own choice, or a power of two
that kernels allow where windows are long."""


# vLLM's plan


def configure(config: VllmConfig, model: RealModel, shrink: int = 1) -> None:
    """Change ``config`` to its state when vLLM plans the model's KV cache. ``shrink``: tokens for
    each token of a ratio."""
    if model.compress_ratios:
        config.model_config = copy.copy(config.model_config)
        config.model_config.hf_text_config = copy.copy(config.model_config.hf_text_config)
        config.model_config.hf_text_config.model_type = "deepseek_v4"
        config.model_config.hf_text_config.compress_ratios = [
            ratio // shrink for ratio in model.compress_ratios
        ]
    cache = config.cache_config
    cache.block_size = model.block_size
    cache.cache_dtype = model.cache_dtype  # type: ignore[assignment]
    cache.kv_cache_layout = model.layout
    config.scheduler_config.disable_hybrid_kv_cache_manager = not model.hybrid
    if drafter := model.drafter:
        chained = min(drafter.num_modules, drafter.num_drafted) > 1
        config.speculative_config = cast(
            Any, SpeculativeConfig(drafter.num_drafted, True, chained, drafter.method)
        )
    cache.mamba_cache_mode = "align"
    cache.mamba_block_size = model.block_size
    cache.mamba_page_size_padded = model.state_page_bytes


def plan_groups(model: RealModel, config: VllmConfig) -> list[KVCacheGroupSpec]:
    """The groups that vLLM makes of the model's layers. ``config``: after ``configure``."""
    specs = model.layers(config)
    if "is_draft" in {field.name for field in fields(KVCacheSpec)}:  # from 0.33 on
        specs = {
            name: replace(spec, is_draft=name.startswith(DRAFT))  # type: ignore[call-arg]
            for name, spec in specs.items()
        }
    if hasattr(planning, "get_global_kv_cache_groups"):
        groups: list[KVCacheGroupSpec] = planning.get_global_kv_cache_groups(config, [specs])
        return groups
    room = 1000 * sum(spec.max_memory_usage_bytes(config) for spec in specs.values())
    (planned,) = planning.get_kv_cache_configs(config, [specs], [room])
    return list(planned.kv_cache_groups)


def place_groups(
    groups: list[KVCacheGroupSpec], config: VllmConfig, num_blocks: int
) -> KVCacheConfig:
    """vLLM's placement of the layers of ``groups`` in a KV cache of ``num_blocks`` blocks."""
    block_bytes = planning._pool_bytes_per_block(config, groups)
    placed: KVCacheConfig = planning.get_kv_cache_config_from_groups(
        config, groups, num_blocks * block_bytes
    )
    return placed


def describe(group: KVCacheGroupSpec) -> str:
    """A summary of a group: its number of layers, their kinds, and the tokens of a block."""
    kinds: dict[str, int] = {}
    for name in group.layer_names:
        spec = layer_spec(group, name)
        sizes = {
            "window": getattr(spec, "sliding_window", None),
            "chunk": getattr(spec, "attention_chunk_size", None),
            "retained": getattr(spec, "extra_retained_tokens", 0),
            "tokens a state": spec.tokens_per_state if spec.tokens_per_state not in (1, -1) else 0,
        }
        kind = type(spec).__name__.removesuffix("Spec")
        layout = ", ".join([kind, *(f"{key} {size}" for key, size in sizes.items() if size)])
        kinds[layout] = kinds.get(layout, 0) + 1
    layers = " + ".join(f"{count} ({layout})" for layout, count in kinds.items())
    return f"{layers} in blocks of {group.kv_cache_spec.block_size}"
