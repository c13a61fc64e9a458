"""Replicas: which ranks have the same KV, by vLLM's own specs and configurations."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from vllm.config import ModelConfig, ParallelConfig
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from simple_offload.replicas import Replicas

Find = Callable[..., Replicas]

_PAGE: dict[str, Any] = dict(block_size=16, num_kv_heads=1, head_size=64, dtype=torch.bfloat16)
MLA = MLAAttentionSpec(**_PAGE, max_tp_shards=1)
UNKNOWN_MLA = MLAAttentionSpec(**_PAGE)
WINDOW_MLA = SlidingWindowMLASpec(**_PAGE, sliding_window=32, max_tp_shards=1)
HEADS = FullAttentionSpec(**_PAGE)
"""One KV head on each rank, as there is if the model has no more of them than ranks."""
WINDOW = SlidingWindowSpec(**_PAGE, sliding_window=32)
CHUNKS = ChunkedLocalAttentionSpec(**_PAGE, attention_chunk_size=32)
PROMPT = RSWASpec(**_PAGE, rswa_window=32)
STATES = MambaSpec(block_size=16, shapes=((4,),), dtypes=(torch.float32,))
EQUAL_STATES = replace(STATES, tp_replicated=True)


def mixed(*specs: KVCacheSpec) -> KVCacheSpec:
    """A group whose layers have specs of their own."""
    return UniformTypeKVCacheSpecs(16, {f"layer.{n}": spec for n, spec in enumerate(specs)})


@pytest.fixture
def find(tmp_path: Path) -> Find:
    """A function that finds the replicas of a model with these groups. Its keywords: ``num_ranks``
    of a stage, ``pcp`` and ``dcp`` as in vLLM, the ``drafter``'s number of KV heads (0:
    unknown) and its ``draft_ranks``, ``model`` (more of the model's configuration), and
    ``untransferred`` groups."""

    def find(
        *specs: KVCacheSpec,
        num_ranks: int = 8,
        pcp: int = 1,
        dcp: int = 1,
        drafter: int | None = None,
        draft_ranks: int = 8,
        untransferred: tuple[int, ...] = (),
        **model: Any,
    ) -> Replicas:
        def configured(folder: Path, **model: Any) -> ModelConfig:
            LlamaConfig(
                architectures=["LlamaForCausalLM"],
                vocab_size=128,
                hidden_size=192,
                num_hidden_layers=4,
                num_attention_heads=48,
                **model,
            ).save_pretrained(folder)
            return ModelConfig(model=str(folder), skip_tokenizer_init=True)

        drafts = (
            None
            if drafter is None
            else SimpleNamespace(
                draft_model_config=drafter
                and configured(tmp_path / "drafter", num_key_value_heads=drafter),
                draft_parallel_config=ParallelConfig(
                    distributed_executor_backend="mp", tensor_parallel_size=draft_ranks
                ),
            )
        )
        vllm_config: Any = SimpleNamespace(
            model_config=configured(tmp_path / "model", **{"num_key_value_heads": 2} | model),
            parallel_config=ParallelConfig(
                distributed_executor_backend="mp",
                tensor_parallel_size=num_ranks,
                prefill_context_parallel_size=pcp,
                decode_context_parallel_size=dcp,
            ),
            speculative_config=drafts,
        )
        groups = [
            KVCacheGroupSpec([f"layer.{n}"], spec, enable_kv_transfer=n not in untransferred)
            for n, spec in enumerate(specs)
        ]
        return Replicas.find(vllm_config, KVCacheConfig(1, [], groups))

    return find


def alike(count: int, *private_groups: int) -> Replicas:
    return Replicas(count, frozenset(private_groups))


NONE = Replicas()


# What vLLM says of layers. The model has two KV heads, and there are eight ranks.


MODELS: dict[str, tuple[tuple[KVCacheSpec, ...], Replicas]] = {
    "MLA": ((MLA,), alike(8)),
    "MLA, with layers of several page sizes": (
        (mixed(MLA, replace(MLA, head_size=32)),),
        alike(8),
    ),
    "MLA and MLA windows": ((MLA, WINDOW_MLA), alike(8)),
    "MLA and states of a part of the heads": ((MLA, STATES), alike(8, 1)),
    "states of a part of the heads and MLA": ((STATES, MLA), alike(8, 0)),
    "MLA and states that all ranks have": ((MLA, EQUAL_STATES), alike(8)),
    "states that all ranks have": ((EQUAL_STATES,), alike(8)),
    "states of a part of the heads": ((STATES,), NONE),
    "MLA in two shards": ((replace(MLA, max_tp_shards=2),), alike(4)),
    "MLA in as many shards as ranks": ((replace(MLA, max_tp_shards=8),), NONE),
    "MLA in shards that do not divide the ranks": ((replace(MLA, max_tp_shards=3),), NONE),
    "MLA in an unknown number of shards": ((UNKNOWN_MLA,), NONE),
    "MLA in known and unknown numbers of shards": ((MLA, UNKNOWN_MLA), alike(8, 1)),
    "... in one group": ((mixed(MLA, UNKNOWN_MLA),), NONE),
    "... in one group of two": ((mixed(MLA, UNKNOWN_MLA), MLA), alike(8, 0)),
    "MLA in one shard, and in two": ((MLA, replace(MLA, max_tp_shards=2)), alike(4)),
    "repeated heads": ((HEADS,), alike(4)),
    "repeated heads, windows": ((HEADS, WINDOW), alike(4)),
    "MLA and repeated heads": ((MLA, HEADS), alike(4)),
    "MLA and repeated heads in one group": ((mixed(MLA, HEADS),), alike(4)),
    "MLA, repeated heads, states": ((MLA, HEADS, STATES), alike(4, 2)),
    "MLA and several heads on a rank": ((MLA, replace(HEADS, num_kv_heads=2)), alike(8, 1)),
    "MLA and chunked local attention": ((MLA, CHUNKS), alike(8, 1)),
    "MLA and prompts that all answers read": ((MLA, PROMPT), alike(8, 1)),
    "MLA, and heads with a scale for each token": (
        (MLA, replace(HEADS, kv_quant_mode=KVQuantMode.FP8_PER_TOKEN_HEAD)),
        alike(8, 1),
    ),
    "MLA, and heads with one scale": (
        (MLA, replace(HEADS, kv_quant_mode=KVQuantMode.FP8_PER_TENSOR)),
        alike(4),
    ),
    "a stage without layers": ((mixed(),), NONE),
    "a stage with MLA layers only": ((MLA, mixed()), alike(8)),
}


@pytest.mark.parametrize("name", MODELS)
def test_layers(find: Find, name: str) -> None:
    specs, expected = MODELS[name]
    assert find(*specs) == expected


def test_groups_that_are_not_stored_are_left_out(find: Find) -> None:
    assert find(MLA, STATES, untransferred=(1,)) == alike(8)
    assert find(MLA, STATES, untransferred=(0,)) == NONE


# Ranks


@pytest.mark.parametrize(
    ("num_heads", "num_ranks", "count"),
    [(2, 8, 4), (1, 8, 8), (1, 2, 2), (4, 8, 2), (8, 8, 1), (2, 2, 1), (3, 8, 1), (3, 6, 2)],
)
def test_consecutive_ranks_repeat_a_kv_head(
    find: Find, num_heads: int, num_ranks: int, count: int
) -> None:
    found = find(HEADS, num_ranks=num_ranks, num_key_value_heads=num_heads)
    assert found == alike(count)


def test_one_rank_repeats_nothing(find: Find) -> None:
    assert find(MLA, HEADS, EQUAL_STATES, num_ranks=1) == NONE


def test_ranks_that_deal_out_the_tokens_of_a_block(find: Find) -> None:
    assert find(MLA, dcp=2) == find(HEADS, dcp=2) == NONE
    whole = replace(MLA, dcp_sharded=False)
    assert find(whole, dcp=2) == alike(8)
    assert find(whole, MLA, dcp=2) == alike(8, 1)


def test_ranks_that_deal_out_the_tokens_of_a_prompt(find: Find) -> None:
    assert find(MLA, pcp=2) == NONE


# Numbers of KV heads


@pytest.mark.parametrize(
    "model",
    [
        {"swa_num_key_value_heads": 4},
        {"num_key_value_heads_per_layer": [2, 2, 4, 2]},
        {"multi_query_group_num": 4},
        {"attention_other_setting": {"type": "window", "num_attention_groups": 4}},
        {"block_configs": [{"attention": {"n_heads_in_group": 12}}]},
        {"windows": {"kv_heads": {"local": 4, "global": 2}}},
        {"per_layer_config": {1: {"num_key_value_heads": 4}}},
    ],
    ids=lambda model: next(iter(model)),
)
def test_layers_that_may_have_other_numbers_of_kv_heads_are_private(
    find: Find, model: dict[str, Any]
) -> None:
    """Which layers have which number is for the model's code to say."""
    assert find(HEADS, WINDOW, **model) == NONE
    assert find(MLA, HEADS, WINDOW, **model) == alike(8, 1, 2)


@pytest.mark.parametrize(
    "model",
    [
        {"swa_num_key_value_heads": 2},
        {"num_key_value_heads_per_layer": [2, 2, 2, 2]},
        {"swa_num_attention_heads": 4},  # queries
        {"uses_kv_heads": True},
        {"swa_num_key_value_heads": None},
    ],
    ids=str,
)
def test_equal_numbers_of_kv_heads_in_several_places(find: Find, model: dict[str, Any]) -> None:
    assert find(HEADS, WINDOW, **model) == alike(4)


def test_a_drafter_may_have_another_number_of_kv_heads(find: Find) -> None:
    """Its layers may be in the model's groups. For MLA, vLLM says what each layer has."""
    assert find(HEADS, drafter=4) == NONE
    assert find(MLA, drafter=4) == alike(8)
    assert find(MLA, HEADS, drafter=4) == alike(8, 1)


def test_a_drafter_with_the_same_number_of_kv_heads(find: Find) -> None:
    """As MTP layers have it. Their ranks must be the model's."""
    assert find(HEADS, drafter=2) == alike(4)
    assert find(HEADS, drafter=2, draft_ranks=1) == NONE
    assert find(HEADS, drafter=0) == NONE, "it says nothing of heads"
