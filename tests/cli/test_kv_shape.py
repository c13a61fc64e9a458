"""kv_shape: bytes and groups are those that vLLM's own classes and functions come to."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from simple_offload.cli.arguments import CommandError
from simple_offload.cli.kv_shape import Kind, KVShape, kv_shape, read_config
from tests.cli.models import DEEPSEEK_V3, GEMMA3_27B, GPT_OSS_20B, KNOWN, LLAMA_8B

BLOCK = 16


def shape_of(config: dict[str, Any], tensor_parallel: int = 1, kv_dtype: str = "auto") -> KVShape:
    return kv_shape(config, tensor_parallel=tensor_parallel, kv_dtype=kv_dtype)


def vllm_specs(folder: Path, config: dict[str, Any], tensor_parallel: int) -> dict[str, Any]:
    """Specs of every layer as vLLM's classes have them, from what vLLM and transformers read in
    the same config.json."""
    import torch
    from transformers import AutoConfig
    from vllm.transformers_utils.model_arch_config_convertor import (
        MODEL_ARCH_CONFIG_CONVERTORS,
        ModelArchConfigConvertorBase,
    )
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        MLAAttentionSpec,
        SlidingWindowSpec,
    )

    (folder / "config.json").write_text(json.dumps(config))
    read = AutoConfig.from_pretrained(folder)
    text = read.get_text_config()
    convertor = MODEL_ARCH_CONFIG_CONVERTORS.get(read.model_type, ModelArchConfigConvertorBase)
    model = convertor(read, text)
    sizes: dict[str, Any] = {
        "block_size": BLOCK,
        "head_size": model.get_head_size(),
        "dtype": torch.bfloat16,
    }
    if config.get("kv_lora_rank"):
        layer: Any = MLAAttentionSpec(num_kv_heads=1, **sizes)
        return {f"{index}": layer for index in range(text.num_hidden_layers)}
    sizes["num_kv_heads"] = max(1, model.get_total_num_kv_heads() // tensor_parallel)
    window: Any = getattr(text, "sliding_window", None)
    otherwise = "full_attention" if window is None else "sliding_attention"
    types = getattr(text, "layer_types", None) or [otherwise] * text.num_hidden_layers
    specs: dict[str, Any] = {}
    for index, kind in enumerate(types):
        specs[f"{index}"] = (
            FullAttentionSpec(**sizes)
            if kind == "full_attention"
            else SlidingWindowSpec(sliding_window=window, **sizes)
        )
    return specs


@pytest.mark.parametrize("tensor_parallel", [1, 4, None], ids=["1", "4", "a head each"])
@pytest.mark.parametrize("name", KNOWN)
def test_bytes_and_groups_are_vllms(tmp_path: Path, name: str, tensor_parallel: int | None) -> None:
    from vllm.v1.core import kv_cache_utils

    config = KNOWN[name]
    tensor_parallel = tensor_parallel or config.get("text_config", config)["num_attention_heads"]
    specs = vllm_specs(tmp_path, config, tensor_parallel)
    shape = shape_of(config, tensor_parallel)
    assert shape.token_bytes * BLOCK == sum(spec.page_size_bytes for spec in specs.values())
    if len(set(specs.values())) == 1:
        grouped = kv_cache_utils._get_kv_cache_groups_uniform_spec(specs)
    else:
        grouped = kv_cache_utils._get_kv_cache_groups_uniform_page_size(specs)
    theirs = Counter(
        (len(group.layer_names), getattr(group.kv_cache_spec, "sliding_window", None))
        for group in grouped
    )
    assert Counter((group.layers, group.window) for group in shape.groups) == theirs
    page = next(iter(specs.values())).page_size_bytes
    most = max(len(group.layer_names) for group in grouped)
    assert shape.block_bytes(BLOCK) == page * most


def test_known_sizes() -> None:
    assert shape_of(LLAMA_8B).token_bytes == 128 << 10
    assert shape_of(DEEPSEEK_V3).token_bytes == 61 * 576 * 2
    assert shape_of(LLAMA_8B, kv_dtype="fp8").token_bytes == 64 << 10
    assert shape_of(DEEPSEEK_V3, tensor_parallel=8) == shape_of(DEEPSEEK_V3)


def test_a_checkpoint_may_ask_for_fp8_kv() -> None:
    quantized = {**LLAMA_8B, "quantization_config": {"kv_cache_scheme": {"num_bits": 8}}}
    assert shape_of(quantized).token_bytes == 64 << 10


def test_blocks_of_a_conversation() -> None:
    shape = shape_of(GPT_OSS_20B)
    assert [(group.kind, group.window) for group in shape.groups] == [
        (Kind.SLIDING, 128),
        (Kind.FULL, None),
    ]
    assert shape.blocks(1600, BLOCK) == 8 + 100
    assert shape.blocks(1600, BLOCK, stored=True) == 200
    assert shape.blocks(17, BLOCK) == 4


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"mamba_d_state": 16}, "mamba_d_state=16: state layers"),
        ({"layer_types": ["linear_attention"] * 32}, "'linear_attention': state layers"),
        ({"layer_types": ["full_attention"] * 3}, "3 entries for 32 layers"),
        ({"index_topk": 2048}, "index_topk=2048: a cache for sparse attention"),
        ({"num_kv_shared_layers": 4}, "num_kv_shared_layers=4"),
        ({"attention_chunk_size": 8192}, "attention_chunk_size=8192 without layer_types"),
        ({"torch_dtype": "int3"}, "dtype='int3': must be one of"),
        ({"torch_dtype": "bfloat61"}, "did you mean 'bfloat16'?"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0: must be a whole number above 0"),
        ({"num_hidden_layers": "32"}, "num_hidden_layers='32'"),
        (
            {"layer_types": ["sliding_attention"] * 32},
            "sliding_window is missing",
        ),
    ],
)
def test_what_cannot_be_sized_is_said(change: dict[str, Any], told: str) -> None:
    with pytest.raises(CommandError) as error:
        shape_of({**LLAMA_8B, **change})
    assert told in str(error.value)


def test_a_missing_key_is_named_with_its_nearest() -> None:
    config = {**LLAMA_8B, "num_hidden_layer": 32}
    del config["num_hidden_layers"]
    with pytest.raises(CommandError, match="did you mean 'num_hidden_layer'"):
        shape_of(config)


def test_ranks_that_do_not_divide_the_heads() -> None:
    with pytest.raises(CommandError, match="--tensor-parallel=3: does not divide"):
        shape_of(LLAMA_8B, tensor_parallel=3)


def test_the_language_model_counts() -> None:
    assert shape_of(GEMMA3_27B).layers == 62


def test_reading_a_folder_or_a_file(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA_8B))
    assert read_config(tmp_path) == read_config(file) == LLAMA_8B


@pytest.mark.parametrize(
    ("text", "told"), [(None, "cannot be read"), ("{", "not JSON"), ("[]", "no JSON object")]
)
def test_what_is_no_configuration(tmp_path: Path, text: str | None, told: str) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(CommandError, match=told):
        read_config(tmp_path)
