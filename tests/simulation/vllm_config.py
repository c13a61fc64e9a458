"""vLLM's configuration for the engine of a given shape."""

import os
from functools import cache, lru_cache
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

from transformers import LlamaConfig
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import init_none_hash

from tests.simulation.shape import NUM_LAYERS, Shape


@cache
def _model_directory() -> TemporaryDirectory[str]:
    """Removed when Python exits. The workers of pytest-xdist leave it."""
    directory = TemporaryDirectory(prefix="simple-offload-sim-")
    LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=128,
        hidden_size=64,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=4096,
    ).save_pretrained(directory.name)
    return directory


@lru_cache(maxsize=4)
def _model_config(max_model_len: int) -> ModelConfig:
    return ModelConfig(
        model=_model_directory().name,
        skip_tokenizer_init=True,
        max_model_len=max_model_len,
        dtype="float32",
    )


class _Config(VllmConfig):
    """A config with a script as its model runner."""

    v2_runner = False

    @property
    def use_v2_model_runner(self) -> bool:
        return self.v2_runner


def make_vllm_config(
    shape: Shape, kv_transfer_config: KVTransferConfig | None = None
) -> VllmConfig:
    """The configuration that ``vllm serve`` would make. Ranks are not processes here, so their
    number is set directly."""
    with patch.dict(os.environ, PYTHONHASHSEED="0"):  # else vLLM draws what all hashes start from
        init_none_hash(sha256)
    cache_config = CacheConfig(block_size=shape.block_size, enable_prefix_caching=True)
    cache_config.num_gpu_blocks = shape.num_device_blocks
    config = _Config(
        model_config=_model_config(shape.max_model_len),
        cache_config=cache_config,
        scheduler_config=SchedulerConfig(
            max_num_seqs=shape.max_num_seqs,
            max_num_batched_tokens=shape.max_num_batched_tokens,
            max_model_len=shape.max_model_len,
            is_encoder_decoder=False,
            enable_chunked_prefill=shape.chunked_prefill,
            disable_chunked_mm_input=shape.whole_pictures,
            async_scheduling=shape.async_scheduling,
            disable_hybrid_kv_cache_manager=False,
            policy="priority" if shape.priority else "fcfs",
            long_prefill_token_threshold=shape.long_prefill,
            watermark=shape.watermark,
            scheduler_reserve_full_isl=shape.reserves_prompts,
        ),
        parallel_config=ParallelConfig(),
        device_config=DeviceConfig("cpu"),
        kv_transfer_config=kv_transfer_config,
    )
    shape.configure(config)
    config.scheduler_config.async_scheduling = shape.async_scheduling
    config.v2_runner = shape.v2_runner
    if shape.max_loras:
        config.lora_config = cast(Any, SimpleNamespace(max_loras=shape.max_loras))
    config.parallel_config.world_size = shape.num_ranks
    config.parallel_config.tensor_parallel_size = shape.tensor_parallel_size
    config.parallel_config.pipeline_parallel_size = shape.num_stages
    config.parallel_config.decode_context_parallel_size = shape.num_shards
    return config
