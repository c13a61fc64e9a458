"""Which KV cache layout to ask vLLM for."""

from typing import TYPE_CHECKING, Any, cast

import torch
from vllm.config import get_layers_from_vllm_config, set_current_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.models import ModelRegistry
from vllm.platforms import current_platform
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.selector import get_attn_backend

from simple_offload.config import OffloadConfig
from simple_offload.logs import get_logger

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = get_logger(__name__)

_SAFE_MODELS = ("vllm.model_executor.models.", "vllm.models.kimi_k3")
"""Modules of models that use vLLM's common attention backends, and of models that gave the same
tokens in the block-outermost layout on an H200 (docs/architecture.md)."""

_BLOCK_OUTERMOST = "BLHNC"
"""The block-outermost layout that most attention backends support. Compute is as fast as in vLLM's
default layout (docs/measurements.md)."""


def wanted_layout(vllm_config: "VllmConfig", config: OffloadConfig) -> str | None:
    """A layout in which a block of all layers is contiguous, so that it is one descriptor.

    None for vLLM's default layout: if ``config`` says "keep", on platforms other than CUDA, if the
    model has attention kernels of its own, or if vLLM would refuse to start. vLLM does so if an
    attention kernel needs smaller blocks than vLLM's and blocks of all layers are contiguous."""
    if config.kv_layout == "keep" or not vllm_config.cache_config.enable_prefix_caching:
        return None
    if not current_platform.is_cuda():
        return None
    if has_own_kernels(vllm_config):
        logger.info("Keeping vLLM's KV cache layout: the model may have its own attention kernels")
        return None
    return None if _kernel_splits_blocks(vllm_config) else _BLOCK_OUTERMOST


def page_layout(vllm_config: "VllmConfig") -> tuple[object, ...]:
    """Values that decide how attention lays out a page, beside its size: the backend of each layer,
    vLLM's layout, and the instruction set, by which CPU attention packs keys. Values that JSON has.
    Once the model has been loaded."""
    layers = get_layers_from_vllm_config(vllm_config, cast(Any, AttentionLayerBase))
    backends = {name: layer.get_attn_backend().get_name() for name, layer in layers.items()}
    instructions = (
        torch.backends.cpu.get_cpu_capability() if current_platform.is_cpu() else "device"
    )
    return backends, str(vllm_config.cache_config.kv_cache_layout), instructions


def has_own_kernels(vllm_config: "VllmConfig") -> bool:
    """Whether the model or its drafter has attention kernels other than vLLM's common backends.
    Such kernels may accept any layout and then read wrong pages: MiniMax-M3's gave wrong tokens in
    this layout (vLLM 0.32, H200). vLLM keeps such models in separate packages."""
    models = [vllm_config.model_config]
    if (speculative := vllm_config.speculative_config) is not None:
        models.append(getattr(speculative, "draft_model_config", None) or models[0])
    for model in models:
        registered = ModelRegistry.models.get(model.architecture)
        module = getattr(registered, "module_name", "")
        if not module.startswith(_SAFE_MODELS):
            return True
    return False


def _kernel_splits_blocks(vllm_config: "VllmConfig") -> bool:
    """Whether the attention backend's kernels need smaller blocks than vLLM's. True also if no
    backend can be found."""
    model = vllm_config.model_config
    block_size = vllm_config.cache_config.block_size
    try:
        with set_current_vllm_config(vllm_config):
            backend = get_attn_backend(
                model.get_head_size(),
                cast(torch.dtype, model.dtype),
                vllm_config.cache_config.cache_dtype,
                use_mla=model.use_mla,
            )
            sizes = backend.get_supported_kernel_block_sizes()
    except Exception as error:  # noqa: BLE001 - the layout is optional, the start is not
        logger.info("Keeping vLLM's KV cache layout: no attention backend found (%s)", error)
        return True
    fits = any(
        block_size % size.base == 0 if isinstance(size, MultipleOf) else block_size == size
        for size in sizes
    )
    if not fits:
        logger.info(
            "Keeping vLLM's KV cache layout: %s splits blocks of %d tokens, which contiguous "
            "blocks do not allow. A --block-size among %s would make copies faster.",
            backend.get_name(),
            block_size,
            sizes,
        )
    return not fits
