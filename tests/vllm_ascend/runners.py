"""vllm-ascend's two model runners, as far as they allocate and shape KV caches, in CPU memory."""

from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from vllm.model_executor.layers.attention import MLAAttention
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    UniformTypeKVCacheSpecs,
)
from vllm_ascend.attention.mla_v1 import AscendMLABackend
from vllm_ascend.core.kv_cache_interface import AscendMLAAttentionSpec, AscendSFAIndexerCacheSpec
from vllm_ascend.worker import model_runner_v1
from vllm_ascend.worker.model_runner_v1 import NPUModelRunner
from vllm_ascend.worker.v2 import attn_utils

NUM_BLOCKS = 3
KERNEL_BLOCK = 128
"""Tokens of a block of the attention kernels, which vLLM's may have several of."""
LATENT, ROPE = 64, 16

Layers = dict[str, KVCacheSpec]


def place(groups: Sequence[Layers]) -> KVCacheConfig:
    """The groups' layers, over each other in a common buffer, in vLLM's layer-outermost layout."""
    size = max(sum(NUM_BLOCKS * spec.page_size_bytes for spec in g.values()) for g in groups)
    tensors, made = [], []
    for layers in groups:
        before = 0
        for name, spec in layers.items():
            page = spec.page_size_bytes
            tensors.append(
                KVCacheTensor(
                    size=size,
                    layers=[name],
                    layer_stride=NUM_BLOCKS * page,
                    block_stride=page,
                    offset=before,
                )
            )
            before += NUM_BLOCKS * page
        spec, *others = layers.values()
        if any(other != spec for other in others):
            spec = UniformTypeKVCacheSpecs(spec.block_size, layers)
        made.append(KVCacheGroupSpec(list(layers), spec))
    return KVCacheConfig(NUM_BLOCKS, tensors, made)


def v1(
    monkeypatch: pytest.MonkeyPatch, groups: Sequence[Layers], backend: type[Any], **more: Any
) -> dict[str, Any]:
    """What the V1 runner registers with a connector, by layer. ``more``: its attributes."""
    config, paged = place(groups), more.pop("paged_attention", False)
    layers = _layers(groups, backend)
    runner: Any = NPUModelRunner.__new__(NPUModelRunner)
    runner.device = torch.device("cpu")
    runner.ascend_config = SimpleNamespace(
        kvpp_config=SimpleNamespace(size=1), xlite_graph_config=SimpleNamespace(enabled=False)
    )
    runner.vllm_config = _vllm_config()
    runner.compilation_config = runner.vllm_config.compilation_config
    runner.model_config = MagicMock()
    runner.model_config.hf_text_config.model_type = more.pop("model_type", "qwen3")
    runner.use_sparse = runner.use_compress = runner.sparse_kv_offload_enabled = False
    runner.dcp_size, runner.runner_only_attn_layers = 1, set()
    runner.use_hybrid_blocks = len(groups) > 1
    runner.c8_cache_dtype = torch.int8
    for name, value in more.items():
        setattr(runner, name, value)
    monkeypatch.setattr(model_runner_v1, "get_layers_from_vllm_config", lambda *_: layers)
    monkeypatch.setattr(model_runner_v1, "requires_contiguous_pa_kv_cache", lambda *_: paged)

    def backends() -> Iterator[Any]:
        for number, group in enumerate(groups):
            for name, spec in group.items():
                yield SimpleNamespace(
                    kv_cache_group_id=number,
                    kv_cache_spec=spec,
                    backend=layers[name].get_attn_backend(),
                    layer_names=[name],
                )

    runner._kv_cache_spec_attn_group_iterator = backends
    raw = runner._allocate_kv_cache_tensors(config)
    caches: dict[str, Any] = runner._reshape_kv_cache_tensors(
        config, raw, [KERNEL_BLOCK] * len(groups)
    )
    return caches


def v2(
    monkeypatch: pytest.MonkeyPatch, groups: Sequence[Layers], backend: type[Any], **more: Any
) -> dict[str, Any]:
    """What the V2 runner registers, by layer. ``more``: attributes of the V1 runner."""
    layers, vllm_config = _layers(groups, backend), _vllm_config()
    vllm_config.parallel_config.decode_context_parallel_size = more.get("dcp_size", 1)
    monkeypatch.setattr(attn_utils, "get_current_vllm_config", lambda: vllm_config)
    monkeypatch.setattr(attn_utils, "get_layers_from_vllm_config", lambda *_: layers)
    caches: dict[str, Any] = attn_utils.allocate_kv_cache_main(
        place(groups), torch.device("cpu"), None, [KERNEL_BLOCK] * len(groups)
    )
    return caches


Build = Callable[..., dict[str, Any]]


def _vllm_config() -> Any:
    config = MagicMock()
    config.additional_config = {}
    config.quant_config = config.speculative_config = None
    config.kv_transfer_config.kv_connector = "SimpleCPUOffloadConnector"
    config.compilation_config.static_forward_context = {}
    config.model_config.hf_config = SimpleNamespace()
    config.cache_config.cache_dtype = "auto"
    layout = SimpleNamespace(is_layer_compact=True, is_block_compact=True)
    config.cache_config.get_resolved_kv_cache_layout.return_value = layout
    return config


def _layers(groups: Sequence[Layers], backend: type[Any]) -> dict[str, Any]:
    """The layers of the model, by name. ``backend`` belongs to those without MLA."""
    return {name: _layer(spec, backend) for group in groups for name, spec in group.items()}


def _layer(spec: KVCacheSpec, backend: type[Any]) -> Any:
    layer: Any = SimpleNamespace()
    if isinstance(spec, AscendMLAAttentionSpec | AscendSFAIndexerCacheSpec):
        layer, backend = MLAAttention.__new__(MLAAttention), AscendMLABackend
        torch.nn.Module.__init__(layer)
        layer.kv_lora_rank, layer.qk_rope_head_dim = LATENT, ROPE
    layer.get_attn_backend = lambda: backend
    layer.impl = layer.kv_sharing_target_layer_name = None
    return layer
