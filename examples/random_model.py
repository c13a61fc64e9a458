"""Small models with random weights, made on the spot, for the demo and the tests.

Nothing is downloaded: a Hugging Face configuration is filled with weights drawn from a seed
and saved with its ``config.json``. Unlike vLLM's dummy weights, which lie within 1e-3, these
are spread so that attention is sharp: its answers then depend on the whole context,
and one wrong KV block changes the tokens. Rounding does not: in float32 logits are off by
about 1e-5, while the best token leads by more than 1e-3 in all but a few cases in a thousand.
"""

from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from examples.bench.models import MLA_SIZES

Architecture = Literal["llama", "qwen3", "gemma3", "mla"]
MODEL_TYPES: dict[Architecture, str] = {"gemma3": "gemma3_text", "mla": "deepseek_v2"}
"""Hugging Face's names, where they are others."""

SIZES = {
    "vocab_size": 512,
    "hidden_size": 128,
    "num_layers": 3,
    "num_heads": 4,
    "num_kv_heads": 2,
    "max_model_len": 4096,
}


def save_random_model(
    directory: Path, architecture: Architecture = "llama", *, seed: int = 0, **sizes: int
) -> Path:
    """Write ``config.json`` and ``model.safetensors`` (float32) and return ``directory``.

    ``sizes`` replace those of SIZES, and the ``sliding_window`` of "gemma3", whose every third
    layer is a full attention layer. The same arguments always give the same weights.
    """
    config = model_config(architecture, **{**SIZES, **sizes})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2:
                weight.normal_(0.0, _spread(name, weight, config), generator=generator)
            elif "q_norm" in name or "k_norm" in name:
                # It undoes those gains. Gemma's norms multiply by one more than their weight.
                weight.fill_(_QUERY_KEY_GAIN - _is_gemma(config))
    model.save_pretrained(directory)
    return directory


def model_config(
    architecture: Architecture,
    *,
    vocab_size: int,
    hidden_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    max_model_len: int,
    intermediate_size: int | None = None,
    sliding_window: int = 64,
) -> PretrainedConfig:
    """Hugging Face's configuration."""
    shape: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size or 2 * hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": hidden_size // num_heads,
        "max_position_embeddings": max_model_len,
        "tie_word_embeddings": False,
    }
    if architecture == "mla":
        shape |= MLA_SIZES | {
            "num_key_value_heads": num_heads,
            "first_k_dense_replace": num_layers,
            "q_lora_rank": None,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
        }
    if architecture == "gemma3":
        layers = ("sliding_attention", "sliding_attention", "full_attention")
        shape |= {
            "layer_types": [layers[layer % 3] for layer in range(num_layers)],
            "sliding_window": sliding_window,
            "query_pre_attn_scalar": shape["head_dim"],
        }
    config = AutoConfig.for_model(MODEL_TYPES.get(architecture, architecture), **shape)
    assert isinstance(config, PretrainedConfig)
    return config


# Queries and keys have this standard deviation, so attention scores have its square: 4. Over a
# few hundred tokens that is where a softmax begins to rest on a handful of them. Much less, and
# every token sees the same average of the context; much more, and most blocks are never looked at.
_QUERY_KEY_GAIN = 2.0


def _spread(name: str, weight: torch.Tensor, config: PretrainedConfig) -> float:
    """Standard deviation for one matrix that keeps the residual stream's parts of one size."""
    if "embed" in name:
        # Gemma multiplies embeddings by the root of the hidden size.
        return float(weight.shape[1] ** -0.5) if _is_gemma(config) else 1.0
    gain = _QUERY_KEY_GAIN if "q_proj" in name or "k_proj" in name else 1.0
    return gain * float(weight.shape[1] ** -0.5)


def _is_gemma(config: PretrainedConfig) -> bool:
    return str(config.model_type).startswith("gemma")
