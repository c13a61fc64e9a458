"""The regions of KV caches that vllm-ascend's runners have allocated and shaped."""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm_ascend import ascend_config, platform
from vllm_ascend.attention.attention_v1 import AscendAttentionBackend
from vllm_ascend.core.kv_cache_interface import AscendMLAAttentionSpec, AscendSFAIndexerCacheSpec

from simple_offload.config import ConfigError
from simple_offload.scheduler import supported
from simple_offload.worker import regions
from tests.vllm_ascend.runners import (
    KERNEL_BLOCK,
    LATENT,
    NUM_BLOCKS,
    ROPE,
    Build,
    Layers,
    place,
    v1,
    v2,
)
from tests.worker.kv_memory import check_regions


class Sparse(AscendAttentionBackend):  # type: ignore[misc]
    """A backend of sparse attention, for which keys and values lie apart."""

    @classmethod
    def is_sparse(cls) -> bool:
        return True


def gqa(num_heads: int = 2, block_size: int = KERNEL_BLOCK) -> FullAttentionSpec:
    return FullAttentionSpec(
        block_size=block_size, num_kv_heads=num_heads, head_size=8, dtype=torch.float16
    )


def window() -> SlidingWindowSpec:
    return SlidingWindowSpec(
        block_size=KERNEL_BLOCK,
        num_kv_heads=2,
        head_size=8,
        dtype=torch.float16,
        sliding_window=256,
    )


def padded(page_bytes: int) -> FullAttentionSpec:
    return replace(gqa(), page_size_padded=page_bytes)


def mla(**changes: Any) -> AscendMLAAttentionSpec:
    keywords = {"block_size": KERNEL_BLOCK, "head_size": LATENT + ROPE, "dtype": torch.bfloat16}
    return AscendMLAAttentionSpec(num_kv_heads=1, **keywords | changes)


def indexer(**changes: Any) -> AscendSFAIndexerCacheSpec:
    keywords = {"block_size": KERNEL_BLOCK, "head_size": 32, "dtype": torch.bfloat16}
    return AscendSFAIndexerCacheSpec(num_kv_heads=1, **keywords | changes)


def state(page_bytes: int) -> MambaSpec:
    """A convolution's and an SSM's states, and padding up to an attention layer's page."""
    return MambaSpec(
        block_size=KERNEL_BLOCK,
        shapes=((3, 8), (4, 16)),
        dtypes=(torch.float16, torch.float32),
        page_size_padded=page_bytes,
    )


A, B, C = (f"model.layers.{number}.self_attn.attn" for number in range(3))
INDEX = "model.layers.0.self_attn.indexer.k_cache"
LINEAR = ("model.layers.4.linear_attn", "model.layers.5.linear_attn")
PAGE = gqa().page_size_bytes  # 8192: keys and values of 128 tokens, each in half of it
SCALED = {"dtype": torch.int8, "scale_dim": 1, "scale_dtype": torch.float16}
PACKED = {"dtype": torch.int8, "head_size": 96, "cache_sparse_sfa_c8": True}
SPARSE = {"use_sparse": True}


class Case(NamedTuple):
    groups: list[Layers]
    pages: list[int]
    """The sizes of the regions' pages."""
    more: Mapping[str, Any] = MappingProxyType({})
    backend: type[Any] = AscendAttentionBackend


LAYOUTS = {
    # One allocation a layer, whose two views share pages
    "GQA": Case([{A: gqa(), B: gqa(4)}], [PAGE, 2 * PAGE]),
    "GQA, blocks of three kernel blocks": Case([{A: gqa(2, 384)}], [3 * PAGE]),
    # Keys and values apart
    "GQA, context parallel": Case([{A: gqa(), B: gqa()}], [PAGE // 2] * 4, {"dcp_size": 2}),
    "GQA, paged attention": Case([{A: gqa()}], [PAGE // 2] * 2, {"paged_attention": True}),
    "GQA, sparse backend": Case([{A: gqa()}], [PAGE // 2] * 2, {}, Sparse),
    "GQA and windows": Case([{A: gqa()}, {B: window()}, {C: window()}], [PAGE // 2] * 4 + [PAGE]),
    # All groups over each other in one allocation
    "windows over full attention": Case(
        [{A: gqa()}, {B: window()}], [PAGE], {"model_type": "step3p5"}
    ),
    "states over attention": Case(
        [{A: gqa(), B: gqa()}, {name: state(PAGE) for name in LINEAR}], [PAGE] * 2
    ),
    # Latent and rotary parts; an indexer, its scales
    "MLA": Case([{A: mla(), B: mla()}], [4096] * 2 + [16384] * 2),
    "MLA, blocks of three kernel blocks": Case([{A: mla(block_size=384)}], [12288, 49152]),
    "sparse MLA": Case([{A: mla(), INDEX: indexer()}], [4096, 8192, 16384], SPARSE),
    "sparse MLA, indexer of 8 bits": Case(
        [{A: mla(), INDEX: indexer(**SCALED)}], [256, 4096, 4096, 16384], SPARSE
    ),
    "sparse MLA, 8 bits": Case(
        [{A: mla(**PACKED), INDEX: indexer(**SCALED)}], [256, 4096, 12288], SPARSE
    ),
    "MLA of DeepSeek-V4": Case(
        [{A: mla(model_version="deepseek_v4")}], [20480], {"use_compress": True}
    ),
}


ONLY_V1 = {
    "GQA, paged attention",
    "windows over full attention",
    "sparse MLA, 8 bits",
    "MLA of DeepSeek-V4",
}
"""V2 has other layouts there, or is told of them otherwise."""


@pytest.mark.parametrize(
    ("build", "layout"),
    [(build, name) for build in (v1, v2) for name in LAYOUTS if build is v1 or name not in ONLY_V1],
)
def test_every_byte_of_a_block_is_in_one_region(
    monkeypatch: pytest.MonkeyPatch, build: Build, layout: str
) -> None:
    case = LAYOUTS[layout]
    caches = build(monkeypatch, case.groups, case.backend, **case.more)
    assert caches.keys() == {name for group in case.groups for name in group}
    monkeypatch.setattr(regions, "current_platform", SimpleNamespace(device_type="npu"))
    found = regions.find_regions(caches, place(case.groups))
    check_regions(found, caches.values(), NUM_BLOCKS)
    assert sorted(region.shape[1] for region in found) == case.pages


# What is refused


def test_bytes_that_belong_to_several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention's pages are padded up to a state's: the runner leaves the padding out in front of
    all keys, while a state has its whole page."""
    groups: list[Layers] = [{A: padded(2 * PAGE)}, {LINEAR[0]: state(2 * PAGE)}]
    caches = v1(monkeypatch, groups, AscendAttentionBackend)
    monkeypatch.setattr(regions, "current_platform", SimpleNamespace(device_type="npu"))
    with pytest.raises(ValueError, match="belong to several blocks"):
        regions.find_regions(caches, place(groups))


# Options and layers, by vllm-ascend's own names


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [(indexer(sfa_dcp_replicated_indexer_size=2), "indexer"), (state(PAGE), "state .Mamba.")],
)
def test_layers_that_are_refused(
    monkeypatch: pytest.MonkeyPatch, spec: KVCacheSpec, complaint: str
) -> None:
    monkeypatch.setattr(supported, "current_platform", SimpleNamespace(device_type="npu"))
    supported.require_supported_layers(place([{A: mla(), INDEX: indexer()}]))
    with pytest.raises(ConfigError, match=complaint):
        supported.require_supported_layers(place([{A: mla(), INDEX: spec}]))


def test_options_that_are_refused_have_these_names() -> None:
    """As vllm-ascend reads them."""
    parallel = SimpleNamespace(tensor_parallel_size=2, prefill_context_parallel_size=1)
    for value, size in (("yes", 2), ("false", 1)):
        config = SimpleNamespace(additional_config={"enable_kvpp": value}, parallel_config=parallel)
        assert ascend_config.KVPPConfig.from_vllm_config(config).size == size
    assert ascend_config.SparseKVOffloadConfig(enabled="yes").enabled
    assert "sparse_kv_offload_config" in ascend_config.AscendConfig.__dataclass_fields__


def test_recompute_is_refused_for_models_with_states_only() -> None:
    """These are refused here in any case."""
    transfer = SimpleNamespace(kv_load_failure_policy="recompute")
    for is_hybrid in (False, True):
        model = SimpleNamespace(is_hybrid=is_hybrid)
        config = SimpleNamespace(kv_transfer_config=transfer, model_config=model)
        with pytest.raises(AssertionError) if is_hybrid else nullcontext():
            platform._validate_kv_load_failure_policy(config)
