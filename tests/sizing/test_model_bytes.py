"""KV bytes of a token, as vLLM plans them, against numbers derived by hand."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from simple_offload.config import ConfigError
from simple_offload.sizing.model_bytes import ModelBytes, parse_plan, plan_model
from simple_offload.sizing.planning import answer
from tests.forked import in_child

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}
DEEPSEEK_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "max_position_embeddings": 163840,
    "torch_dtype": "bfloat16",
    # Kernels for such weights are there on few CPUs.
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
}
DEEPSEEK_V32: dict[str, Any] = DEEPSEEK_V3 | {
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 2048,
}
GEMMA_3_12B: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "hidden_size": 3840,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "sliding_window": 1024,
    "sliding_window_pattern": 6,
    "torch_dtype": "bfloat16",
}
NEMOTRON_3_NANO: dict[str, Any] = {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "hidden_size": 2688,
    "num_hidden_layers": 52,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "mamba_num_heads": 64,
    "mamba_head_dim": 64,
    "ssm_state_size": 128,
    "mamba_ssm_cache_dtype": "float32",
    "n_groups": 8,
    "conv_kernel": 4,
    "max_position_embeddings": 262144,
    "torch_dtype": "bfloat16",
}
MIXTRAL: dict[str, Any] = LLAMA_8B | {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_local_experts": 8,
}
EAGLE_3: dict[str, Any] = LLAMA_8B | {
    "architectures": ["LlamaForCausalLMEagle3"],
    "num_hidden_layers": 1,
    "draft_vocab_size": 32000,
}
BLOOM: dict[str, Any] = {
    "architectures": ["BloomForCausalLM"],
    "model_type": "bloom",
    "hidden_size": 1024,
    "n_layer": 24,
    "n_head": 16,
    "torch_dtype": "bfloat16",
}
QWEN_2_AUDIO: dict[str, Any] = {
    "architectures": ["Qwen2AudioForConditionalGeneration"],
    "model_type": "qwen2_audio",
    "text_config": LLAMA_8B
    | {"model_type": "qwen2", "quantization_config": DEEPSEEK_V3["quantization_config"]},
}
MODELOPT = {
    "producer": {"name": "modelopt"},
    "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"},
}
LLM_COMPRESSOR = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True},
        }
    },
    "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True},
}


def quantized(config: dict[str, Any], quantization: dict[str, Any]) -> dict[str, Any]:
    return config | {"quantization_config": quantization}


FP8_KV = {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}

BF16, FP32 = 2, 4
CASES: Mapping[str, tuple[dict[str, Any], ...]] = {
    "llama": (LLAMA_8B, {}),
    "llama, 2 ranks": (LLAMA_8B, {"tensor_parallel_size": 2}),
    "llama, 16 ranks": (LLAMA_8B, {"tensor_parallel_size": 16}),
    "llama, fp8": (LLAMA_8B, {"kv_cache_dtype": "fp8"}),
    "llama, int4": (LLAMA_8B, {"kv_cache_dtype": "int4_per_token_head"}),
    "llama, packed": (LLAMA_8B, {"kv_cache_dtype": "turboquant_k8v4"}),
    "llama, nvfp4": (LLAMA_8B, {"kv_cache_dtype": "nvfp4"}),
    "llama, fp8 by its checkpoint": (quantized(LLAMA_8B, FP8_KV), {}),
    "llama, fp8 by modelopt": (quantized(LLAMA_8B, MODELOPT), {}),
    "llama, fp8 by modelopt's file": (LLAMA_8B, {}, MODELOPT),
    "llama, fp8 by llm-compressor": (quantized(LLAMA_8B, LLM_COMPRESSOR), {}),
    "v3, fp8 by llm-compressor": (quantized(DEEPSEEK_V3, LLM_COMPRESSOR), {}),
    "audio": (QWEN_2_AUDIO, {}),
    "llama, larger blocks": (LLAMA_8B, {"block_size": 64}),
    "v3": (DEEPSEEK_V3, {"tensor_parallel_size": 8}),
    "v3.2": (DEEPSEEK_V32, {"tensor_parallel_size": 8}),
    "v3.2, fp8": (DEEPSEEK_V32, {"kv_cache_dtype": "fp8"}),
    "v3.2, mtp": (
        DEEPSEEK_V32 | {"num_nextn_predict_layers": 1},
        {
            "tensor_parallel_size": 8,
            "speculative_config": {"method": "mtp", "num_speculative_tokens": 1},
        },
    ),
    "llama, eagle": (
        LLAMA_8B,
        {"speculative_config": {"method": "eagle3", "model": "", "num_speculative_tokens": 3}},
    ),
    "llama, n-grams": (
        LLAMA_8B,
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    ),
    "bloom": (BLOOM, {}),
    "gemma": (GEMMA_3_12B, {"tensor_parallel_size": 2}),
    "nemotron": (NEMOTRON_3_NANO, {}),
    "nemotron, 8 ranks": (NEMOTRON_3_NANO, {"tensor_parallel_size": 8}),
    "mixtral": (MIXTRAL, {}),
    "unknown": (LLAMA_8B | {"architectures": ["LamaForCausalLM"], "model_type": "lama"}, {}),
    "unknown type": (LLAMA_8B, {"kv_cache_dtype": "fp7"}),
}
"""Configuration, options, and the content of hf_quant_config.json if there is one."""


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The answers to all cases, of one process, forked from this one: imports take most of the time
    of a new one."""
    folder = tmp_path_factory.mktemp("plans")
    (folder / "config.json").write_text(json.dumps(EAGLE_3))
    arguments = []
    for number, (config, changed, *beside) in enumerate(CASES.values()):
        path = folder / f"{number}" / "config.json"
        path.parent.mkdir()
        path.write_text(json.dumps(config))
        for quantization in beside:
            path.with_name("hf_quant_config.json").write_text(json.dumps(quantization))
        options = {"tensor_parallel_size": 1, "kv_cache_dtype": "auto", "block_size": None}
        given = {"config": str(path), **options, **changed}
        if (drafter := given.get("speculative_config")) and "model" in drafter:
            given["speculative_config"] = drafter | {"model": str(folder)}
        arguments.append((folder / f"{number}.answer", given))
    in_child(_plan_all, arguments)
    return {
        name: json.loads((folder / f"{number}.answer").read_text())
        for number, name in enumerate(CASES)
    }


def _plan_all(arguments: list[tuple[Path, dict[str, Any]]]) -> None:
    for file, options in arguments:
        answer(file, **options)


# Every token

KV = 2 * 8 * 128
"""Keys and values of a token in a layer of Llama."""
INT4 = 2 * 8 * (128 // 2 + FP32)
"""Each head has scales."""
PACKED = 8 * (128 + 128 // 2 + 4)
"""A key of 8 bits, a value of 4 bits and its scale and zero, by head."""
LATENT = 512 + 64
INDEX = 128 + 4
"""Bytes of a key of the index: 128 of one byte, and a scale."""
SPARSE_FP8 = 512 + 4 * FP32 + 64 * BF16
"""FlashMLA's format: latents in fp8, four scales, and the rotary part in 16 bits."""


@pytest.mark.parametrize(
    ("name", "per_rank", "in_host", "num_sharing"),
    [
        ("llama", 32 * KV * BF16, 128 * 1024, 1),
        ("mixtral", 32 * KV * BF16, 128 * 1024, 1),
        ("llama, larger blocks", 32 * KV * BF16, 128 * 1024, 1),
        # Ranks share out the heads. Those with the same head share a host copy.
        ("llama, 2 ranks", 32 * KV * BF16 // 2, 128 * 1024, 1),
        ("llama, 16 ranks", 32 * KV * BF16 // 8, 128 * 1024, 2),
        ("llama, fp8", 32 * KV, 64 * 1024, 1),
        ("llama, int4", 32 * INT4, 34 * 1024, 1),
        ("llama, packed", 28 * PACKED + 4 * KV * BF16, 60288, 1),  # four layers are not quantized
        ("llama, fp8 by its checkpoint", 32 * KV, 64 * 1024, 1),
        ("llama, fp8 by modelopt", 32 * KV, 64 * 1024, 1),
        ("llama, fp8 by modelopt's file", 32 * KV, 64 * 1024, 1),
        ("llama, fp8 by llm-compressor", 32 * KV, 64 * 1024, 1),
        ("v3, fp8 by llm-compressor", 61 * LATENT * BF16, 70272, 1),  # vLLM has no fp8 here
        ("audio", 32 * KV * BF16, 128 * 1024, 1),  # the text model's weights are quantized
        ("bloom", 2 * 24 * 1024 * BF16, 2 * 24 * 1024 * BF16, 1),  # reads constants back
        # Latents are the same on all ranks.
        ("v3", 61 * LATENT * BF16, 70272, 8),
        ("v3.2", 61 * (LATENT * BF16 + INDEX), 61 * (LATENT * BF16 + INDEX), 8),
        ("v3.2, fp8", 61 * (SPARSE_FP8 + INDEX), 61 * (SPARSE_FP8 + INDEX), 1),
        # Drafters
        ("v3.2, mtp", 62 * (LATENT * BF16 + INDEX), 62 * (LATENT * BF16 + INDEX), 8),
        ("llama, eagle", 33 * KV * BF16, 33 * KV * BF16, 1),
        ("llama, n-grams", 32 * KV * BF16, 128 * 1024, 1),
    ],
)
def test_bytes_of_a_token(
    plans: dict[str, Any], name: str, per_rank: int, in_host: int, num_sharing: int
) -> None:
    model = planned(plans, name)
    num_ranks = CASES[name][1].get("tensor_parallel_size", 1)
    assert (model.token_per_rank, model.token_in_host) == (per_rank, in_host)
    assert model.token_on_devices == num_ranks * per_rank
    assert model.num_sharing == num_sharing
    assert model.boundary_in_host == 0


def planned(plans: dict[str, Any], name: str) -> ModelBytes:
    assert isinstance(plans[name], dict), plans[name]
    return parse_plan(plans[name])


def test_blocks_are_as_large_as_asked_for(plans: dict[str, Any]) -> None:
    model = planned(plans, "llama, larger blocks")
    assert [group.block_tokens for group in model.groups] == [64]
    assert model.block_bytes == 64 * 128 * 1024


# Windows and states


def test_windows_are_said_apart(plans: dict[str, Any]) -> None:
    """Every sixth of 48 layers has full attention."""
    model, layer = planned(plans, "gemma"), 2 * 8 * 256 * BF16
    assert model.token_in_host == 8 * layer == 64 * 1024
    # The next token's window has 1,023 tokens before it: 64 blocks of 16.
    assert model.boundary_in_host == 40 * 64 * 16 * layer == 320 * 2**20
    assert model.boundary_per_rank == model.boundary_in_host / 2
    assert [group.kind for group in model.groups].count("window") == 5


def test_states_are_said_apart(plans: dict[str, Any]) -> None:
    model, layer = planned(plans, "nemotron"), 2 * 2 * 128 * BF16
    assert model.token_in_host == 6 * layer == 6144
    convolution = (64 * 64 + 2 * 8 * 128) * 3 * BF16
    state = convolution + 64 * 64 * 128 * FP32
    # vLLM makes attention's pages as large as a state's, in multiples of 16 tokens.
    block_tokens = 16 * -(-state // (16 * layer))
    assert {group.block_tokens for group in model.groups} == {block_tokens} == {2096}
    # 23 layers of states, in groups as large as that of 6 layers of attention.
    assert [group.num_layers for group in model.groups] == [6, 6, 6, 5, 6]
    assert model.boundary_in_host == 4 * 6 * block_tokens * layer


def test_states_are_private_beside_shared_heads(plans: dict[str, Any]) -> None:
    """Two KV heads on 8 ranks."""
    model = planned(plans, "nemotron, 8 ranks")
    assert model.num_sharing == 4
    assert model.token_per_rank == 6 * 2 * 1 * 128 * BF16
    assert model.token_in_host == 2 * model.token_per_rank
    assert model.boundary_in_host == 8 * model.boundary_per_rank


# What is not planned


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("unknown", "LamaForCausalLM|lama"),
        ("unknown type", "fp7|fp8"),
        ("llama, nvfp4", "kv_cache_dtype='nvfp4'"),
    ],
)
def test_vllms_reason_is_said(plans: dict[str, Any], name: str, reason: str) -> None:
    plan = plans[name]
    assert isinstance(plan, str)
    assert any(word in plan for word in reason.split("|")), plan


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "No such file.*Allowed: a model's config.json"),
        ("{", "not JSON"),
        ("[]", "no architectures"),
        ('{"hidden_size": 4}', "no architectures"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "config.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=f"--model='{path}': .*{message}"):
        plan_model(path)


def test_a_process_that_ends_early_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(ConfigError, match="vLLM does not plan it: the process ended with code 1"):
        plan_model(tmp_path)


@pytest.mark.slow
def test_a_process_plans(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    assert plan_model(tmp_path, 2, "fp8", 32).token_per_rank == 32 * 1024
