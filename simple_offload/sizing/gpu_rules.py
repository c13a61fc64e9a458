"""vLLM's planning rules of GPUs, for vLLM's CPU build.

That build plans for CPUs: larger blocks, no sparse attention, no prefix cache beside MLA. Here it
takes vLLM's rules for all platforms, and the layouts of the attention backends that Hopper GPUs
get, without their kernels.
"""

import os
from typing import Any

import torch
from vllm.platforms.cpu import CpuPlatform
from vllm.platforms.interface import Platform
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
from vllm.v1.attention.backends.mla.flashmla import FlashMLABackend
from vllm.v1.attention.backends.mla.flashmla_sparse import FlashMLASparseBackend
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend
from vllm.v1.attention.backends.turboquant_attn import TurboQuantAttentionBackend

from simple_offload.sizing.absent import Absent


class _WithoutKernels:
    @staticmethod
    def get_impl_cls() -> Any:
        return Absent


class Attention(_WithoutKernels, FlashAttentionBackend):
    """Keys and values."""


class ScaledAttention(_WithoutKernels, TritonAttentionBackend):
    """The same with scales: FlashAttention lacks these types."""


class PackedAttention(_WithoutKernels, TurboQuantAttentionBackend):
    """Keys and values in one slot."""


class LatentAttention(_WithoutKernels, FlashMLABackend):
    """Latents."""


class SparseLatentAttention(_WithoutKernels, FlashMLASparseBackend):
    """MLA with an index, which selects the latents that attention reads."""


def apply() -> None:
    """Change vLLM's CPU platform in this process."""
    os.environ["VLLM_KIMI_K3_GEMM_AR"] = "0"  # a kernel, whose compiler this build lacks
    torch.cuda.Stream = torch.cuda.Event = Absent  # type: ignore[assignment,misc]
    rules: Any = CpuPlatform
    for name in ("check_and_update_config", "update_block_size_for_backend"):
        setattr(rules, name, classmethod(getattr(Platform, name).__func__))
    rules.get_attn_backend_cls = classmethod(_choose)


def _choose(*_: object, attn_selector_config: Any, **__: object) -> str:
    if attn_selector_config.use_mla:
        latent = SparseLatentAttention if attn_selector_config.use_sparse else LatentAttention
        return f"{__name__}.{latent.__name__}"
    wanted = attn_selector_config.kv_cache_dtype or "auto"
    known: list[str] = []
    for backend in (Attention, ScaledAttention, PackedAttention):
        if wanted in backend.supported_kv_cache_dtypes:
            return f"{__name__}.{backend.__name__}"
        known += backend.supported_kv_cache_dtypes
    raise ValueError(
        f"kv_cache_dtype={wanted!r}: vLLM's CPU build cannot tell its bytes. Allowed here: "
        + ", ".join(dict.fromkeys(known))
    )
