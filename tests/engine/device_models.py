"""Random models for the tests on a GPU, of kinds that vLLM cannot serve on every CPU.

Those of ``shrunk`` are a configuration only: ``random_weights`` fills them when they are loaded.
Weights are spread like those of ``examples.random_model``, so that answers depend on the whole
context.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from examples.random_model import save_random_model
from tests.engine.shrunk import DRAFTERS, HIDDEN_SIZE, MAX_MODEL_LEN, MODELS, VOCAB_SIZE

Kind = Literal[
    "llama",
    "gemma3",
    "mla",
    "hybrid",
    "gpt-oss-eagle3",
    "drafted-gemma3",
    "step3p5-mtp",
    "llama4",
    "minimax-m3",
    "kimi-k3",
]

FORGETS = (0.003, 0.05)
"""Decay of a Mamba head's state per token, minimum and maximum. The state then depends on tens to
hundreds of tokens, so that a wrong state changes many later tokens."""

DRAFTER = "drafter"
"""Folder of the drafter inside the folder of its target."""


def save_device_model(directory: Path, kind: Kind, *, seed: int = 0) -> Path:
    """Write a model with heads of 64 (MLA: DeepSeek's own sizes), float32; return ``directory``.

    "mla" is DeepSeek-V2's attention without its experts, "hybrid" is Falcon-H1, which has
    attention and Mamba-2 in every layer.
    """
    if kind in MODELS:
        _write(directory, MODELS[kind])
        if kind in DRAFTERS:
            _write(directory / DRAFTER, DRAFTERS[kind])
        return directory
    if kind in ("llama", "gemma3"):
        return save_random_model(directory, kind, hidden_size=HIDDEN_SIZE, seed=seed)
    config = _mla_config() if kind == "mla" else _hybrid_config()
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("A_log"):
                weight.uniform_(*(math.log(rate) for rate in FORGETS), generator=generator)
            elif weight.dim() == 2:
                weight.normal_(0.0, _spread(name, weight, kind), generator=generator)
    model.save_pretrained(directory)
    return directory


def _write(directory: Path, config: Mapping[str, Any]) -> None:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))


def _spread(name: str, weight: torch.Tensor, kind: Kind) -> float:
    """Standard deviation of one matrix; attention scores then have a standard deviation of 4."""
    if "embed" in name:
        return 1.0
    if kind == "mla":
        # Keys come through a norm and one matrix with the values, so all gain is the queries'.
        gain = 4.0 if "q_proj" in name else 1.0
    else:
        gain = 2.0 if "q_proj" in name or "k_proj" in name else 1.0
    return gain * float(weight.shape[1] ** -0.5)


def _mla_config() -> PretrainedConfig:
    from transformers import DeepseekV2Config

    return DeepseekV2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=2 * HIDDEN_SIZE,
        num_hidden_layers=3,
        first_k_dense_replace=3,
        num_attention_heads=16,
        num_key_value_heads=16,
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        n_routed_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        max_position_embeddings=MAX_MODEL_LEN,
        tie_word_embeddings=False,
    )


def _hybrid_config() -> PretrainedConfig:
    from transformers import FalconH1Config

    return FalconH1Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=2 * HIDDEN_SIZE,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        mamba_d_ssm=256,
        mamba_n_heads=4,
        mamba_d_head=64,
        mamba_d_state=16,
        mamba_chunk_size=64,
        mamba_rms_norm=True,
        max_position_embeddings=MAX_MODEL_LEN,
        tie_word_embeddings=False,
    )
