"""Models with windows, states, compressed latents and drafters, as they are published.

Each has the fields of its config.json that decide its KV, and those that its class of vLLM cannot
do without. These are typical of the family. So is what a comment says of a model.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Config = Mapping[str, Any]


def _kda(num_layers: int, num_heads: int) -> dict[str, Any]:
    """Each fourth layer and the last has MLA."""
    return {
        "full_attn_layers": [*range(4, num_layers, 4), num_layers],
        "kda_layers": [layer for layer in range(1, num_layers) if layer % 4],
        "head_dim": 128,
        "num_heads": num_heads,
        "short_conv_kernel_size": 4,
    }


# With a line for each field they would fill pages.
# fmt: off
_KIMI_LINEAR: Config = {
    "architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear", "hidden_size": 2304,
    "num_hidden_layers": 27, "num_attention_heads": 32, "num_key_value_heads": 32,
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "mla_use_nope": True,
    "linear_attn_config": _kda(27, num_heads=32),
    "max_position_embeddings": 1048576, "torch_dtype": "bfloat16",
}
_KIMI_K3: Config = {
    "architectures": ["KimiK3ForConditionalGeneration"], "model_type": "kimi_k3",
    "torch_dtype": "bfloat16",
    # The announced 69 layers of KDA and 24 of MLA with 96 heads; their order is Kimi Linear's.
    "text_config": {
        **_KIMI_LINEAR, "hidden_size": 7168, "num_hidden_layers": 93, "num_attention_heads": 96,
        "num_key_value_heads": 96, "linear_attn_config": _kda(93, num_heads=96),
    },
}
_NEMOTRON_3_NANO: Config = {
    "architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", "hidden_size": 2688,
    "num_hidden_layers": 52,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128, "mamba_num_heads": 64,
    "mamba_head_dim": 64, "ssm_state_size": 128, "mamba_ssm_cache_dtype": "float32", "n_groups": 8,
    "conv_kernel": 4, "max_position_embeddings": 262144, "torch_dtype": "bfloat16",
}
_NEMOTRON_3_SUPER: Config = {
    **_NEMOTRON_3_NANO, "hidden_size": 4096, "num_hidden_layers": 88,
    # 40 layers of Mamba and 8 of attention; their order is typical of the family.
    "hybrid_override_pattern":
    "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME",
    "mamba_num_heads": 128,
}
_QWEN3_NEXT: Config = {
    "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "hidden_size": 2048,
    "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
    "full_attention_interval": 4, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_value_head_dim": 128,
    "num_nextn_predict_layers": 1, "max_position_embeddings": 262144, "torch_dtype": "bfloat16",
}
# vLLM's module of Qwen3.5 needs torchvision, which its CPU build comes without. Qwen3-Next's layers
# have the same KV.
_QWEN3_5: Config = {
    **_QWEN3_NEXT, "hidden_size": 4096, "num_hidden_layers": 60, "num_attention_heads": 32,
    "linear_num_value_heads": 64,
}
_DEEPSEEK_V4_FLASH: Config = {
    "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "hidden_size": 4096,
    "num_hidden_layers": 43, "num_attention_heads": 64, "num_key_value_heads": 1, "head_dim": 512,
    "q_lora_rank": 1024, "o_lora_rank": 1024, "o_groups": 8, "qk_rope_head_dim": 64,
    "index_n_heads": 64, "index_head_dim": 128, "index_topk": 512, "sliding_window": 128,
    # The last is the MTP layer's.
    "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0], "compress_rope_theta": 160000, "hc_mult": 4,
    "hc_eps": 1e-6, "hc_sinkhorn_iters": 20, "hidden_act": "silu", "rms_norm_eps": 1e-6,
    "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1,
    "num_experts_per_tok": 6, "norm_topk_prob": True, "num_hash_layers": 3,
    "num_nextn_predict_layers": 1, "swiglu_limit": 10.0, "vocab_size": 129280,
    "max_position_embeddings": 1048576, "torch_dtype": "bfloat16",
}
_DEEPSEEK_V4_PRO: Config = {
    **_DEEPSEEK_V4_FLASH, "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128,
    "q_lora_rank": 1536, "o_groups": 16, "compress_ratios": [128, 128, *[4, 128] * 29, 4, 0],
}
_GPT_OSS_120B: Config = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_size": 2880,
    "num_hidden_layers": 36, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
    "sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * 18,
    "max_position_embeddings": 131072, "torch_dtype": "bfloat16",
}
_GEMMA_3_27B: Config = {
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "hidden_size": 5376,
    "num_hidden_layers": 62, "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128,
    "sliding_window": 1024, "sliding_window_pattern": 6, "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}
_DEEPSEEK_V3_2: Config = {
    "architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32", "hidden_size": 7168,
    "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128,
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "index_head_dim": 128, "index_n_heads": 64, "index_topk": 2048,
    "max_position_embeddings": 163840, "torch_dtype": "bfloat16",
}
# An index in each layer is assumed.
_GLM_5: Config = {
    **_DEEPSEEK_V3_2, "architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa",
    "hidden_size": 6144, "num_hidden_layers": 78, "num_attention_heads": 64,
    "num_key_value_heads": 64, "qk_nope_head_dim": 192, "v_head_dim": 256, "index_n_heads": 32,
    "max_position_embeddings": 202752,
}
# fmt: on


@dataclass(frozen=True)
class Model:
    """A model, and how it is served."""

    title: str
    config: Config
    num_ranks: int
    """Tensor parallel."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Others of vLLM's EngineArgs."""
    active: float = 0.0
    """Billions of parameters that a token uses, which decide the speed of the simulated engine.
    That of Kimi-K3 is assumed."""
    host_gib: tuple[float, ...] = ()
    """Sizes of the server's host memory that agents are played with."""
    longest: int = 64_000
    """Tokens of the longest session."""


def _mtp(num_tokens: int) -> dict[str, Any]:
    return {"speculative_config": {"method": "mtp", "num_speculative_tokens": num_tokens}}


_FP8 = {"kv_cache_dtype": "fp8"}
_FP32_STATES = {"mamba_ssm_cache_dtype": "float32"}  # as the configuration of Qwen3.5 says

MODELS = {
    "kimi-linear": Model("Kimi Linear 48B", _KIMI_LINEAR, 1, {}, 3.0, (10, 16, 20)),
    "kimi-k3": Model("Kimi-K3", _KIMI_K3, 8, {}, 50.0, (80,)),
    "nemotron-3-nano": Model("Nemotron-3-Nano", _NEMOTRON_3_NANO, 1, {}, 3.2, (12,)),
    "nemotron-3-super": Model("Nemotron-3-Super", _NEMOTRON_3_SUPER, 4, {}, 12.0, (16,)),
    "qwen3-next": Model("Qwen3-Next 80B", _QWEN3_NEXT, 2, {}, 3.0, (32,)),
    "qwen3.5": Model("Qwen3.5 397B", _QWEN3_5, 8, _FP32_STATES, 17.0, (48,)),
    "qwen3.5-mtp": Model("Qwen3.5 397B, MTP", _QWEN3_5, 8, _FP32_STATES | _mtp(1), 17.0, (48,)),
    "deepseek-v4-flash": Model(
        "DeepSeek-V4-Flash", _DEEPSEEK_V4_FLASH, 4, _FP8, 13.0, (5, 10), 48_000
    ),
    "deepseek-v4-flash-mtp": Model(
        "DeepSeek-V4-Flash, MTP", _DEEPSEEK_V4_FLASH, 4, _FP8 | _mtp(2), 13.0, (5,), 48_000
    ),
    "deepseek-v4-pro": Model("DeepSeek-V4-Pro", _DEEPSEEK_V4_PRO, 8, _FP8, 49.0, (8,), 48_000),
    "gpt-oss": Model("gpt-oss 120B", _GPT_OSS_120B, 1, {}, 5.1, (24,)),
    "gemma-3": Model("Gemma 3 27B", _GEMMA_3_27B, 1, {}, 27.0, (120,)),
    "deepseek-v3.2": Model("DeepSeek-V3.2", _DEEPSEEK_V3_2, 8, _FP8),
    "glm-5": Model("GLM-5", _GLM_5, 8, _FP8),
}
"""By the name of the command line."""
