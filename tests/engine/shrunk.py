"""Shrunk configurations of popular models, with the shapes that vLLM's kernels require. Windows,
chunks and sparse selections are shorter than the prompts.

Every token uses all experts, so that rounding cannot change the choice.
"""

from collections.abc import Mapping
from typing import Any, Final

from examples.bench.models import MLA_SIZES

RANDOM_WEIGHTS: Final = "random_weights"
"""vLLM's ``load_format`` of these models, which ``tests.engine.random_weights`` registers."""

VOCAB_SIZE: Final = 512
HIDDEN_SIZE: Final = 256
MAX_MODEL_LEN: Final = 4096

_USUAL: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN_SIZE,
    "max_position_embeddings": MAX_MODEL_LEN,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
}
_HEADS: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
_FULL_EVERY_THIRD = ["sliding_attention", "sliding_attention", "full_attention"]

_MINIMAX: dict[str, Any] = _USUAL | {
    # One index head for each KV head, and groups of 16 queries: the kernels' own shapes.
    "num_attention_heads": 16,
    "num_key_value_heads": 1,
    "head_dim": 128,
    "intermediate_size": HIDDEN_SIZE,
    "dense_intermediate_size": 2 * HIDDEN_SIZE,
    "shared_intermediate_size": HIDDEN_SIZE,
    "num_hidden_layers": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 4,
    "num_mtp_modules": 0,
    "moe_layer_freq": [0, 1, 1, 1],
    "sparse_attention_config": {
        "use_sparse_attention": True,
        "sparse_index_dim": 128,
        "sparse_num_index_heads": 1,
        "sparse_topk_blocks": 2,
        "sparse_block_size": 128,
        "sparse_disable_index_value": [0, 1, 1, 1],
        "sparse_score_type": "max",
        "sparse_init_block": 0,
        "sparse_local_block": 1,
        "sparse_attention_freq": [0, 1, 1, 1],
    },
}
_KIMI: dict[str, Any] = _USUAL | {
    "model_type": "kimi_linear",
    "architectures": ["KimiLinearForCausalLM"],
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "intermediate_size": 2 * HIDDEN_SIZE,
    "num_hidden_layers": 4,
    "linear_attn_config": {
        "kda_layers": [1, 2, 3],
        "full_attn_layers": [4],
        "num_heads": 4,
        "head_dim": 128,
        "short_conv_kernel_size": 4,
        "use_full_rank_gate": True,
        "gate_lower_bound": -5.0,
    },
    "q_lora_rank": HIDDEN_SIZE,
    **MLA_SIZES,
    "mla_use_nope": True,
    "num_nextn_predict_layers": 1,
}

MODELS: Mapping[str, dict[str, Any]] = {
    "gpt-oss-eagle3": _USUAL
    | _HEADS
    | {
        "model_type": "gpt_oss",
        "architectures": ["GptOssForCausalLM"],
        "intermediate_size": HIDDEN_SIZE,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 64,
        "num_local_experts": 4,
        "num_experts_per_tok": 4,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": MAX_MODEL_LEN,
        },
    },
    "drafted-gemma3": _USUAL
    | _HEADS
    | {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "intermediate_size": 2 * HIDDEN_SIZE,
        "num_hidden_layers": 3,
        "layer_types": _FULL_EVERY_THIRD,
        "sliding_window": 64,
        "query_pre_attn_scalar": 64,
    },
    "step3p5-mtp": _USUAL
    | {
        "model_type": "step3p5",
        "architectures": ["Step3p5ForCausalLM"],
        "num_attention_heads": 4,
        "num_attention_groups": 2,
        "head_dim": 64,
        "intermediate_size": 2 * HIDDEN_SIZE,
        "num_hidden_layers": 4,
        # No layer_types: vLLM's class cuts them to the layers of the target, and its drafter then
        # finds none of its own. Without them every second layer has a window.
        "sliding_window": 64,
        "use_moe": True,
        "moe_layers_enum": "1,2,3",
        "moe_num_experts": 4,
        "moe_top_k": 4,
        "moe_intermediate_size": HIDDEN_SIZE,
        "moe_router_activation": "sigmoid",
        "share_expert_dim": HIDDEN_SIZE,
        "num_nextn_predict_layers": 3,
    },
    "llama4": _USUAL
    | {
        # As many heads as make parts of a block large enough for loads to be divided.
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "model_type": "llama4_text",
        "architectures": ["Llama4ForCausalLM"],
        "intermediate_size": HIDDEN_SIZE,
        "intermediate_size_mlp": 2 * HIDDEN_SIZE,
        # Two full layers: vLLM's groups then have two KV tensors, which loads can divide.
        "num_hidden_layers": 4,
        "no_rope_layers": [1, 0] * 2,
        "layer_types": ["chunked_attention", "full_attention"] * 2,
        "attention_chunk_size": 128,
        "interleave_moe_layer_step": 2,
        "num_local_experts": 1,
        "num_experts_per_tok": 1,
        "use_qk_norm": True,
        "attn_temperature_tuning": False,
    },
    # The configuration that vLLM knows is the vision model's; the class is the text model's, whose
    # layers have the names of its MTP module's (vLLM 0.32 refuses that): no drafter.
    "minimax-m3": {
        "model_type": "minimax_m3_vl",
        "architectures": ["MiniMaxM3SparseForCausalLM"],
        "text_config": _MINIMAX,
    },
    "kimi-k3": _KIMI,
    # Qwen2's attention with one KV head, which several ranks repeat, and so does the MTP module.
    "mimo-mtp": _USUAL
    | _HEADS
    | {
        "num_key_value_heads": 1,
        "model_type": "qwen2",
        "architectures": ["MiMoForCausalLM"],
        "intermediate_size": 2 * HIDDEN_SIZE,
        "num_hidden_layers": 3,
        "num_nextn_predict_layers": 1,
    },
}

_EAGLE3: dict[str, Any] = (
    _USUAL
    | _HEADS
    | {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLMEagle3"],
        "intermediate_size": 2 * HIDDEN_SIZE,
        "num_hidden_layers": 1,
        "draft_vocab_size": VOCAB_SIZE,
        # vLLM's own choice of three needs more layers than a shrunk target has.
        "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
    }
)

DRAFTERS: Mapping[str, dict[str, Any]] = {
    "gpt-oss-eagle3": _EAGLE3,
    "drafted-gemma3": _EAGLE3 | {"architectures": ["LlamaForCausalLM"]},
    # From Kimi-K3's own configuration, which names the class of its MTP module.
    "kimi-k3": {
        "model_type": "kimi_k3",
        "architectures": ["KimiK3ForConditionalGeneration"],
        "text_config": _KIMI,
    },
}
"""Drafters that are separate models, by target."""

FILLED: Mapping[str, dict[str, Any]] = {
    # DeepSeek-V2's attention, with its own sizes and without its experts.
    "mla": _USUAL
    | MLA_SIZES
    | {
        "model_type": "deepseek_v2",
        "intermediate_size": 2 * HIDDEN_SIZE,
        "num_hidden_layers": 4,
        "first_k_dense_replace": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "q_lora_rank": None,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
    },
    # Attention and Mamba-2 in every layer.
    "hybrid": _USUAL
    | _HEADS
    | {
        "model_type": "falcon_h1",
        "intermediate_size": 2 * HIDDEN_SIZE,
        "num_hidden_layers": 3,
        "mamba_d_ssm": 256,
        "mamba_n_heads": 4,
        "mamba_d_head": 64,
        "mamba_d_state": 16,
        "mamba_chunk_size": 64,
        "mamba_rms_norm": True,
    },
}
"""Configurations whose weights are saved with them."""
