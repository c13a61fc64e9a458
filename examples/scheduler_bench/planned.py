"""Planned: a model's engine and KV cache, as vLLM configures and plans them."""

import json
import tempfile
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.model_executor.models import ModelRegistry
from vllm.v1.attention.backends.mla.sparse_swa import DeepseekV4SWACache
from vllm.v1.kv_cache_interface import KVCacheConfig, iter_layer_specs

from examples.scheduler_bench.hybrids import Model
from examples.scheduler_bench.plan import BLOCK_SIZE, CHUNK_TOKENS
from simple_offload.replicas import Replicas
from simple_offload.sizing.model_bytes import ModelBytes, parse_plan

MAX_MODEL_LEN = 135_168
"""A prompt of 128K tokens and its answer, of the model that has one group."""


@dataclass(frozen=True)
class Planned:
    """vLLM's configuration, and a rank's KV cache of any size."""

    config: VllmConfig
    kv_cache: KVCacheConfig

    @property
    def block_bytes(self) -> int:
        """Of a block of any group, on a rank."""
        return int(self.kv_cache.kv_cache_tensors[0].size // self.kv_cache.num_blocks)

    @property
    def num_ranks(self) -> int:
        """Of the server."""
        return int(self.config.parallel_config.world_size)

    def num_bytes(self, num_blocks: int) -> int:
        """Host memory of the whole server for ``num_blocks`` blocks a rank."""
        return num_blocks * self.block_bytes * self.num_ranks

    @property
    def replicas(self) -> Replicas:
        """The ranks that have the same KV."""
        return Replicas.find(self.config, self.kv_cache)

    @property
    def is_replicated(self) -> bool:
        """Whether vLLM's OffloadingConnector keeps one copy for all (offloading/config.py)."""
        is_latent = self.config.model_config.use_mla
        return is_latent and self.num_ranks > 1 and self.kv_cache.kv_tp_replicas == self.num_ranks

    def with_blocks(self, num_blocks: int) -> KVCacheConfig:
        """The KV cache with this many blocks. Where its tensors lie does not follow: scheduler
        sides read sizes only."""
        size = num_blocks * self.block_bytes
        tensors = [replace(each, size=size) for each in self.kv_cache.kv_cache_tensors]
        return replace(self.kv_cache, num_blocks=num_blocks, kv_cache_tensors=tensors)

    def least_bytes(self, num_tokens: int) -> float:
        """Host bytes of a token that the server needs for a prefix: its chain in whole blocks and
        one boundary, pages without padding, one copy of what ranks share."""
        total = 0
        cacheable = self.kv_cache.prefix_cacheable_group_ids
        for group, sizes in zip(cacheable, self.sizes.groups, strict=True):
            described = self.kv_cache.kv_cache_groups[group]
            specs: list[Any] = list(iter_layer_specs(described.kv_cache_spec))
            if len(specs) == 1:
                specs *= len(described.layer_names)  # all alike
            num_blocks = sizes.num_boundary_blocks or num_tokens // sizes.block_tokens
            page = sum(spec.real_page_size_bytes for spec in specs)
            total += num_blocks * page * sizes.num_host_copies
        return total / num_tokens

    @property
    def sizes(self) -> ModelBytes:
        """Of its groups."""
        from simple_offload.sizing.planning import describe

        return parse_plan(describe(self.config, self.kv_cache))


_ONE_GROUP = Model(
    "a layer of attention",
    {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 1024,
        "hidden_size": 1024,
        "num_hidden_layers": 1,
        "num_attention_heads": 8,
        "max_position_embeddings": MAX_MODEL_LEN,
        "torch_dtype": "bfloat16",
    },
    num_ranks=1,
    options={"block_size": BLOCK_SIZE},
)


@lru_cache(maxsize=1)
def one_group() -> Planned:
    """Of a model with a layer of attention in blocks of ``BLOCK_SIZE`` tokens."""
    (planned,) = plan_models([_ONE_GROUP])
    return planned


def plan_models(models: Iterable[Model]) -> list[Planned]:
    """vLLM's plans, of a process that is forked from this one: the planner changes vLLM's platform.
    Raises what vLLM raises."""
    with ProcessPoolExecutor(1, get_context("fork")) as executor:
        return list(executor.map(_plan, models))


def _plan(model: Model) -> Planned:
    from simple_offload.sizing.planning import plan_engine

    ModelRegistry.register_model("DeepSeekV4MTPModel", _DeepseekV4Drafter)
    with tempfile.TemporaryDirectory(prefix="simple-offload-bench-") as folder:
        config = Path(folder) / "config.json"
        config.write_text(json.dumps(model.config))
        planned = Planned(
            *plan_engine(
                str(config),
                tensor_parallel_size=model.num_ranks,
                max_num_batched_tokens=CHUNK_TOKENS,
                **model.options,
            )
        )
    # The layers, which cannot be sent to another process.
    planned.config.compilation_config.static_forward_context.clear()
    return planned


class _DeepseekV4Drafter(torch.nn.Module):
    """The KV of DeepSeek-V4's MTP layer, a window of latents (vllm/models/deepseek_v4/nvidia/
    mtp.py). vLLM's CPU build has no such layer."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        self.window = DeepseekV4SWACache(
            head_dim=512,
            window_size=128,
            dtype=torch.uint8,
            prefix=f"{prefix}mtp.swa_cache",
            cache_config=vllm_config.cache_config,
        )
