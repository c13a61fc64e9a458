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
from simple_offload.sizing.planning import main
from tests.forked import in_child

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}
DEEPSEEK_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "first_k_dense_replace": 3,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 129280,
    "max_position_embeddings": 163840,
    "rope_theta": 10000,
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
    "intermediate_size": 15360,
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
    "sliding_window": 1024,
    "sliding_window_pattern": 6,
    "query_pre_attn_scalar": 256,
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
    "intermediate_size": 1856,
    "mamba_num_heads": 64,
    "mamba_head_dim": 64,
    "ssm_state_size": 128,
    "mamba_ssm_cache_dtype": "float32",
    "n_groups": 8,
    "conv_kernel": 4,
    "chunk_size": 128,
    "expand": 2,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "mlp_hidden_act": "relu2",
    "vocab_size": 131072,
    "max_position_embeddings": 262144,
    "torch_dtype": "bfloat16",
}
MIXTRAL: dict[str, Any] = LLAMA_8B | {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "vocab_size": 32000,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
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
    "seq_length": 2048,
    "vocab_size": 250880,
    "torch_dtype": "bfloat16",
}
FP8_KV = {"quantization_config": {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}}

BF16, FP32 = 2, 4
CASES: Mapping[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": (LLAMA_8B, {}),
    "llama, 2 ranks": (LLAMA_8B, {"tensor_parallel_size": 2}),
    "llama, 16 ranks": (LLAMA_8B, {"tensor_parallel_size": 16}),
    "llama, fp8": (LLAMA_8B, {"kv_cache_dtype": "fp8"}),
    "llama, fp8 by its checkpoint": (LLAMA_8B | FP8_KV, {}),
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


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The answers to all cases, of one process, forked from this one: imports take most of the time
    of a new one."""
    folder = tmp_path_factory.mktemp("plans")
    (folder / "config.json").write_text(json.dumps(EAGLE_3))
    arguments = []
    for number, (config, changed) in enumerate(CASES.values()):
        path = folder / f"{number}.json"
        path.write_text(json.dumps(config))
        options = {"tensor_parallel_size": 1, "kv_cache_dtype": "auto", "block_size": None}
        given = {"config": str(path), **options, **changed}
        if (drafter := given.get("speculative_config")) and "model" in drafter:
            given["speculative_config"] = drafter | {"model": str(folder)}
        arguments.append([json.dumps(given), str(folder / f"{number}.answer")])
    in_child(_plan_all, arguments)
    return {
        name: json.loads((folder / f"{number}.answer").read_text())
        for number, name in enumerate(CASES)
    }


def _plan_all(arguments: list[list[str]]) -> None:
    for each in arguments:
        main(each)


@pytest.fixture
def model(plans: dict[str, Any], request: pytest.FixtureRequest) -> ModelBytes:
    plan = plans[request.param]
    assert isinstance(plan, dict), plan
    return parse_plan(plan)


def of_case(name: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("model", [name], indirect=True)


# Keys and values


@pytest.mark.parametrize("model", ["llama", "mixtral", "llama, larger blocks"], indirect=True)
def test_kv_heads_of_every_layer(model: ModelBytes) -> None:
    assert model.token_per_rank == 2 * 32 * 8 * 128 * BF16 == 128 * 1024
    assert model.token_on_devices == model.token_in_host == model.token_per_rank
    assert model.boundary_in_host == 0


@of_case("llama, 2 ranks")
def test_ranks_share_out_the_heads(model: ModelBytes) -> None:
    assert model.token_per_rank == 2 * 32 * 4 * 128 * BF16
    assert model.token_on_devices == model.token_in_host == 128 * 1024
    assert model.num_sharing == 1


@of_case("llama, 16 ranks")
def test_ranks_with_the_same_head_share_a_host_copy(model: ModelBytes) -> None:
    assert model.token_per_rank == 2 * 32 * 1 * 128 * BF16
    assert model.token_on_devices == 16 * model.token_per_rank
    assert model.token_in_host == 8 * model.token_per_rank
    assert model.num_sharing == 2


@pytest.mark.parametrize("model", ["llama, fp8", "llama, fp8 by its checkpoint"], indirect=True)
def test_fp8_halves_a_token(model: ModelBytes) -> None:
    assert model.token_per_rank == 2 * 32 * 8 * 128 == 64 * 1024


@of_case("llama, larger blocks")
def test_blocks_are_as_large_as_asked_for(model: ModelBytes) -> None:
    assert [group.block_tokens for group in model.groups] == [64]
    assert model.block_bytes == 64 * 128 * 1024


@of_case("bloom")
def test_layers_may_read_constants_back(model: ModelBytes) -> None:
    """ALiBi's slopes."""
    assert model.token_per_rank == 2 * 24 * 1024 * BF16


# Latents


@of_case("v3")
def test_latents_are_the_same_on_all_ranks(model: ModelBytes) -> None:
    assert model.token_per_rank == 61 * (512 + 64) * BF16 == 70272
    assert model.token_on_devices == 8 * 70272
    assert model.token_in_host == 70272
    assert model.num_sharing == 8


@of_case("v3.2")
def test_keys_of_the_index_count(model: ModelBytes) -> None:
    """128 of one byte, and a scale."""
    assert model.token_in_host == 61 * ((512 + 64) * BF16 + 128 + 4)


@of_case("v3.2, fp8")
def test_sparse_latents_have_a_format_of_their_own(model: ModelBytes) -> None:
    """FlashMLA's: latents in fp8, four scales, and the rotary part in 16 bits."""
    assert model.token_per_rank == 61 * (512 + 4 * FP32 + 64 * BF16 + 128 + 4)


# Drafters


@of_case("v3.2, mtp")
def test_an_mtp_layer_has_the_models_latents(model: ModelBytes) -> None:
    assert model.token_in_host == 62 * ((512 + 64) * BF16 + 128 + 4)
    assert model.num_sharing == 8


@of_case("llama, eagle")
def test_a_drafter_has_keys_and_values_of_its_own(model: ModelBytes) -> None:
    assert model.token_per_rank == 2 * 33 * 8 * 128 * BF16


@of_case("llama, n-grams")
def test_drafts_without_a_model_have_none(model: ModelBytes) -> None:
    assert model.token_per_rank == 128 * 1024


# Windows and states


@of_case("gemma")
def test_windows_are_said_apart(model: ModelBytes) -> None:
    """Every sixth of 48 layers has full attention."""
    layer = 2 * 8 * 256 * BF16
    assert model.token_in_host == 8 * layer == 64 * 1024
    # The next token's window has 1,023 tokens before it: 64 blocks of 16.
    assert model.boundary_in_host == 40 * 64 * 16 * layer == 320 * 2**20
    assert model.boundary_per_rank == model.boundary_in_host / 2
    assert [group.kind for group in model.groups].count("window") == 5


@of_case("nemotron")
def test_states_are_said_apart(model: ModelBytes) -> None:
    layer = 2 * 2 * 128 * BF16
    assert model.token_in_host == 6 * layer == 6144
    convolution = (64 * 64 + 2 * 8 * 128) * 3 * BF16
    state = convolution + 64 * 64 * 128 * FP32
    # vLLM makes attention's pages as large as a state's, in multiples of 16 tokens.
    block_tokens = 16 * -(-state // (16 * layer))
    assert {group.block_tokens for group in model.groups} == {block_tokens} == {2096}
    # 23 layers of states, in groups as large as that of 6 layers of attention.
    assert [group.num_layers for group in model.groups] == [6, 6, 6, 5, 6]
    assert model.boundary_in_host == 4 * 6 * block_tokens * layer


@of_case("nemotron, 8 ranks")
def test_states_are_private_beside_shared_heads(model: ModelBytes) -> None:
    """Two KV heads on 8 ranks."""
    assert model.num_sharing == 4
    assert model.token_per_rank == 6 * 2 * 1 * 128 * BF16
    assert model.token_in_host == 2 * model.token_per_rank
    assert model.boundary_in_host == 8 * model.boundary_per_rank


# What is not planned


@pytest.mark.parametrize(
    ("name", "reason"), [("unknown", "LamaForCausalLM|lama"), ("unknown type", "fp7|fp8")]
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
