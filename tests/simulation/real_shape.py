"""RealShape: a real model's engine, with vLLM's own groups and placements in a smaller size.

One token here stands for ``RealModel.shrink`` tokens of the GPU's engine: in blocks, windows,
chunks, and in entries that stand for several tokens. Pages shrink too, all by the same factor.
The smallest page still has 8 bytes for each entry, and pages of equal size stay equal.
"""

import copy
import random
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.mamba.checkpoint import compute_mamba_prefill_checkpoints
from vllm.model_executor.models.utils import extract_layer_index
from vllm.utils.math_utils import cdiv, round_up
from vllm.v1.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    resolve_cache_hit_alignment_tokens,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from simple_offload.replicas import Replicas
from tests.simulation.device import SLOT, layer_spec, num_entries_of
from tests.simulation.groups import Group, Kind, Reach, is_ring
from tests.simulation.real_models import (
    REAL_MODELS,
    RealModel,
    configure,
    place_groups,
    plan_groups,
)
from tests.simulation.script import Script
from tests.simulation.shape import Shape
from tests.simulation.vllm_config import make_vllm_config

# The model, shrunk


def real_config(model: RealModel) -> VllmConfig:
    """vLLM's configuration when it plans the model's KV cache."""
    config = make_vllm_config(Shape())
    configure(config, model)
    return config


@lru_cache
def shrunk_groups(name: str) -> tuple[KVCacheGroupSpec, ...]:
    """vLLM's groups of a model of ``REAL_MODELS``, in the simulator's size."""
    model = REAL_MODELS[name]
    groups = plan_groups(model, real_config(model))
    specs = [layer_spec(group, layer) for group in groups for layer in group.layer_names]
    factor = min(
        spec.page_size_bytes // (SLOT * num_entries_of(spec, model.shrink)) for spec in specs
    )
    return tuple(_shrink_group(group, model.shrink, factor) for group in groups)


def _shrink_group(group: KVCacheGroupSpec, shrink: int, factor: int) -> KVCacheGroupSpec:
    names = group.layer_names
    specs = {name: _shrink_spec(layer_spec(group, name), shrink, factor) for name in names}
    spec = specs[names[0]]
    if isinstance(group.kv_cache_spec, UniformTypeKVCacheSpecs):
        spec = UniformTypeKVCacheSpecs(spec.block_size, specs)
    return replace(group, kv_cache_spec=spec)


def _shrink_spec(spec: KVCacheSpec, shrink: int, factor: int) -> KVCacheSpec:
    """The same kind of spec with 1 token for each ``shrink`` tokens. The page has ``factor`` times
    fewer bytes, rounded up to whole slots."""
    page_bytes = round_up(-(-spec.page_size_bytes // factor), SLOT)
    sizes: dict[str, Any] = {"block_size": _divide(spec.block_size, shrink)}
    for key in ("sliding_window", "attention_chunk_size"):
        if size := getattr(spec, key, None):
            sizes[key] = _divide(size, shrink)
    if isinstance(spec, MambaSpec):
        if alignment := spec.prefill_checkpoint_alignment:
            # Checkpoints lie at ends of blocks, whose sizes are multiples of this.
            sizes["prefill_checkpoint_alignment"] = max(1, alignment // shrink)
        return replace(
            spec, **sizes, shapes=((page_bytes,),), dtypes=(torch.uint8,), page_size_padded=None
        )
    assert isinstance(spec, AttentionSpec)
    tokens_per_state = spec.tokens_per_state
    assert isinstance(tokens_per_state, int)
    if tokens_per_state > 1:
        tokens_per_state = _divide(tokens_per_state, shrink)
    if hasattr(spec, "alignment"):
        sizes["alignment"] = None
    width = page_bytes // (SLOT * num_entries_of(spec, shrink))
    return replace(
        spec,
        **sizes,
        tokens_per_state=tokens_per_state,
        num_kv_heads=1,
        num_head_slots=1,
        state_content_bytes=SLOT * width,
        page_size_padded=page_bytes,
        block_stride_alignment=None,
    )


def _divide(size: int, shrink: int) -> int:
    assert size % shrink == 0, f"{size} tokens are not a multiple of {shrink}"
    return size // shrink


# Its engine


@dataclass(frozen=True)
class RealShape(Shape):
    """The engine of a model of ``REAL_MODELS``. ``draft``, ``chained``, ``num_drafted`` and
    ``num_states`` describe that model. Other fields that describe a Shape's model have no
    effect."""

    name: str = ""

    @classmethod
    def of(cls, name: str, **keywords: Any) -> "RealShape":
        """``keywords``: of a Shape, without those that describe its model."""
        drafter = REAL_MODELS[name].drafter
        return cls(
            name=name,
            draft=drafter is not None,
            chained=drafter is not None and drafter.num_modules > 1,
            num_drafted=drafter.num_drafted if drafter else 0,
            num_states=sum(isinstance(spec, MambaSpec) for spec in _specs(name)),
            **keywords,
        )

    def with_replicas(self) -> "RealShape":
        """The same engine, with the ranks and groups that share host memory."""
        found = Replicas.find(make_vllm_config(self), self._placed)
        private = tuple(sorted(found.private_groups))
        return replace(self, num_replicas=found.count, private=private)

    def configure(self, config: VllmConfig) -> None:
        model = REAL_MODELS[self.name]
        configure(config, model, model.shrink)
        cache = config.cache_config
        cache.block_size = cache.mamba_block_size = model.block_size // model.shrink

    def kv_cache_config(self, rank: int = 0) -> KVCacheConfig:
        return copy.deepcopy(self._placed)

    @cached_property
    def _placed(self) -> KVCacheConfig:
        config = make_vllm_config(self)
        placed = place_groups(list(shrunk_groups(self.name)), config, self.num_device_blocks)
        assert placed.num_blocks == self.num_device_blocks
        # As EngineCore does: workers get the block sizes and flags of the scheduler's groups.
        of_scheduler = generate_scheduler_kv_cache_config([placed])
        sizes = resolve_kv_cache_block_sizes(of_scheduler, config)
        placed.hash_block_size = sizes[1]
        placed.cache_hit_alignment_tokens = resolve_cache_hit_alignment_tokens(
            of_scheduler, config, *sizes
        )
        placed.prefix_cache_retention_interval = self.retention and self.retention * sizes[0]
        return placed

    @property
    def groups(self) -> list[Group]:
        return [
            _group(spec, group.layer_names[0], REAL_MODELS[self.name])
            for spec, group in zip(_specs(self.name), shrunk_groups(self.name), strict=True)
        ]

    @property
    def block_sizes(self) -> list[int]:
        return [spec.block_size for spec in _specs(self.name)]

    @property
    def hash_size(self) -> int:
        hash_size = self._placed.hash_block_size
        assert hash_size is not None
        return hash_size

    def checkpoint(self, group: int, start: int, end: int) -> tuple[int, int] | None:
        spec = _specs(self.name)[group]
        assert isinstance(spec, MambaSpec)
        alignment = self._placed.cache_hit_alignment_tokens
        assert alignment is not None
        (offset,), (column,) = compute_mamba_prefill_checkpoints(
            [end],
            [end - start],
            hash_block_size=self.hash_size,
            mamba_block_size=spec.block_size,
            checkpoint_alignment=spec.prefill_checkpoint_alignment,
            drop_eagle_block=self.draft,
            cache_hit_alignment_tokens=alignment,
        )
        return (start + offset, column) if offset else None

    def block_bytes(self, rank: int = 0) -> int:
        return self._placed.kv_cache_tensors[0].size // self.num_device_blocks

    def num_blocks_of_a_request(self) -> int:
        """The most device blocks that a request has."""
        in_flight = 2 * self.max_num_batched_tokens
        return sum(
            spec.max_admission_blocks_per_request(in_flight, self.max_model_len)
            if isinstance(spec, SlidingWindowSpec | ChunkedLocalAttentionSpec)
            else 4 + self.num_drafted
            if isinstance(spec, MambaSpec)
            # vLLM keeps blocks for drafts free beside a load, also of a ring, which has one.
            else cdiv(2 * self.num_drafted + 2, spec.block_size)
            if is_ring(spec)
            else cdiv(self.max_model_len, spec.block_size)
            for spec in _specs(self.name)
        )


def _specs(name: str) -> list[KVCacheSpec]:
    """The first layer's spec of each group, which vLLM's scheduler uses."""
    return [layer_spec(group, group.layer_names[0]) for group in shrunk_groups(name)]


def _group(spec: KVCacheSpec, layer: str, model: RealModel) -> Group:
    if isinstance(spec, MambaSpec):
        return Group(Kind.STATE)
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return Group(Kind.ATTENTION, spec.attention_chunk_size, reach=Reach.CHUNK)
    if isinstance(spec, SlidingWindowSpec):
        window = spec.sliding_window
        is_compressor = layer.endswith("compressor.state_cache")
        ratio = model.compress_ratios[extract_layer_index(layer)] if is_compressor else None
        if ratio == window * model.shrink:
            # Kernels read the states of one entry's tokens. Of ratio 4, entries overlap.
            return Group(Kind.ATTENTION, window, reach=Reach.CHUNK)
        return Group(Kind.ATTENTION, window)
    if is_ring(spec):
        return Group(Kind.RING)
    assert isinstance(spec, FullAttentionSpec), spec
    return Group(Kind.ATTENTION)


# Its scripts


def has_intervals(name: str) -> bool:
    """Whether vLLM allows a retention interval for the model: only with windows or states."""
    return any(isinstance(spec, SlidingWindowSpec | MambaSpec) for spec in _specs(name))


def draw(seed: int, name: str, **changes: Any) -> Script:
    """A script for a model of ``REAL_MODELS`` with prompts longer than its windows. ``changes``: to
    the shape."""
    drawn = Script.draw(seed)
    rng = random.Random(f"{seed}: {name}")
    windows = [group.window for group in RealShape.of(name).groups]
    unit = RealShape.of(name).scheduler_block_size
    stretch = max(1, unit // 16, max(windows) // 16)
    shape = RealShape.of(
        name,
        max_model_len=60 * stretch,
        max_num_batched_tokens=stretch * rng.choice([8, 16, 32]),
        max_num_seqs=rng.randint(1, 4),
        num_ranks=rng.choice([1, 1, 2]),
        lazy=True if rng.random() < 0.3 else None,
        async_scheduling=drawn.shape.async_scheduling,
        v2_runner=rng.random() < 0.5,
        load_failures=drawn.shape.load_failures,
    )
    shape = replace(shape, **changes).with_replicas()
    needed = shape.num_blocks_of_a_request()
    return replace(drawn, shape=shape, stretch=stretch).varied(
        num_device_blocks=needed * rng.choice([5, 6, 8]) // 4,
        num_host_blocks=rng.choice([4, 10, 30]) * needed,
        num_requests=24,
        arrivals=0.9,
        copy_speed=rng.choice([0.5, 0.9]),
        max_answer_tokens=12,
    )
