"""Shape: the description of a world's engine."""

import math
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import chain, repeat
from typing import Any, Literal, cast

from vllm.config import VllmConfig
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from simple_offload.vllm_compat import vllm_version
from tests.simulation.device import SLOT, layer_spec
from tests.simulation.groups import DRAFT, Group, Kind, Layer, Reach, SpeculativeConfig

NUM_LAYERS = 2
SAYS_REPLICAS = "max_tp_shards" in {field.name for field in fields(AttentionSpec)}
"""Whether vLLM says which ranks have the same KV: from 0.31 on."""
SERVES_HOLDERS_FIRST = "kv_holding_waiting" in Scheduler.__init__.__code__.co_names
"""Whether vLLM serves waiting requests with blocks before others: from 0.31 on. Without, it stands
still by itself where a streaming-input session waits with blocks behind a request without."""


@dataclass(frozen=True)
class Shape:
    """An engine: its pools, its model's groups, and how it is run.

    ``windows``: one group of attention layers each: 0 for full attention, else a window in tokens.
    ``chunks``, ``prompt_windows``: groups of attention layers of other reaches (``Reach``).
    ``num_states``: number of groups of state layers. ``draft``: whether there is a drafter's group,
    with attention over ``draft_window`` tokens. ``chained``: its layers are MTP modules, and each
    reads one token further ahead. ``ring``: a group before all others keeps a request's last tokens
    in a block that no other request finds. ``replay_window``: so does one with such a window
    (``Group.replays``). ``retention``: vLLM keeps a window or a state after each multiple
    of this many scheduler blocks; 0, its default: at the ends of prompts; None: everywhere.
    ``mixed_pages``: the layers of each group have pages of different sizes. ``match_unit``: the
    tokens that a hash covers, if fewer than a block: with states, hits may end inside a block.
    ``lazy``, ``store_threshold``: the policy and admission of stores. ``num_sub_blocks``: device
    blocks in a host block. ``num_host_blocks`` and ``chunk_blocks`` still count blocks of a device
    block's size.
    """

    num_device_blocks: int = 24
    num_host_blocks: int = 40
    block_size: int = 4
    windows: tuple[int, ...] = (0,)
    num_ranks: int = 1
    async_scheduling: bool = False
    block_outermost: bool = False
    max_num_seqs: int = 4
    max_num_batched_tokens: int = 32
    kv_role: Literal["kv_both", "kv_producer", "kv_consumer"] = "kv_both"
    load_failures: Literal["recompute", "fail"] = "recompute"
    max_model_len: int = 80
    num_states: int = 0
    chunks: tuple[int, ...] = ()
    prompt_windows: tuple[int, ...] = ()
    draft: bool = False
    draft_window: int = 0
    chained: bool = False
    ring: bool = False
    replay_window: int = 0
    retention: int | None = 0
    v2_runner: bool = False
    """Whether steps run in the order of vLLM's V2 runner: it returns a step's output before its
    drafter has run."""
    saves_without_tokens: bool = vllm_version() >= (0, 31)
    """Whether vLLM's runner calls ``wait_for_save`` in steps without tokens too. 0.30 does not."""
    num_stages: int = 1
    """Number of pipeline parallel stages of the ranks."""
    priority: bool = False
    """Whether requests have priorities."""
    num_stop_tokens: int = 0
    """Number of tokens, the first of the vocabulary, that end an answer."""
    long_prefill: int = 0
    """The most tokens of a prompt in a step with others; 0: no limit."""
    watermark: float = 0.0
    """Share of the device's blocks that waiting requests leave to running ones."""
    reserves_prompts: bool = True
    """Whether a request starts only if there are blocks for its whole prompt (the default)."""
    chunked_prefill: bool = True
    """Whether a prompt may begin with a part in a step (the default)."""
    whole_pictures: bool = False
    """Whether a step computes no part of a picture, unless its beginning was found."""
    max_loras: int = 0
    """The most LoRA adapters in a step; 0: requests have none."""
    mixed_pages: bool = False
    match_unit: int | None = None
    lazy: bool | None = None
    store_threshold: int = 1
    num_sub_blocks: int = 1
    chunk_blocks: int | None = None
    """Host blocks that a rank opens at a time; None: all at start."""
    early_chunks: tuple[int, ...] = ()
    """By rank, the number of chunks beyond the first that are open before the handshake. Default
    0."""
    num_handshakes: int | None = None
    """Number of ranks whose handshake reaches the scheduler before the first step. None: all."""
    num_drafted: int = 0
    """Tokens drafted for each step of a decoding request. Some are accepted."""
    scales: tuple[int, ...] = ()
    """By group of attention layers, tokens of its blocks in multiples of ``block_size``. Default 1.
    State groups have the smallest blocks: vLLM ends chunks of a prompt at their ends."""
    kv_events: bool = False
    """Whether KV events are wanted, if the scheduler side is this project's."""
    context_parallel: bool = False
    """Whether each block's tokens are distributed over the ranks (DCP)."""
    num_replicas: int = 1
    """Consecutive ranks of a stage that have the same KV. They share their host memory."""
    private: tuple[int, ...] = ()
    """Groups, by place in ``groups``, whose pages differ between these ranks all the same."""
    keeps_on_reset: bool = True
    """Whether the host tier stays when the device's cache alone is reset (not the default)."""
    allows_reports: bool = True
    """Whether requests may ask where their prompt came from (not the default)."""
    second_tier: bool = False
    """Whether there are objects behind host memory (``ScriptedDisk``)."""
    uneven_ranks: bool = False
    """Whether every other rank's pages are twice as large. All ranks have the same number of bytes.
    These have room for ``num_host_blocks``, and the others for more."""

    @property
    def hash_size(self) -> int:
        """Tokens that a hash covers."""
        return self.match_unit or math.gcd(*self.block_sizes)

    @cached_property
    def block_sizes(self) -> list[int]:
        """By group, the tokens of a block on all ranks together."""
        return [self.block_size * group.scale * self.num_shards for group in self.groups]

    @property
    def scheduler_block_size(self) -> int:
        """Distance in tokens between ends of hits, if hits end with blocks."""
        return math.lcm(*self.block_sizes)

    @property
    def num_shards(self) -> int:
        """Number of ranks that a block's tokens are distributed over."""
        return self.num_ranks if self.context_parallel else 1

    @property
    def retention_interval(self) -> int | None:
        """``retention`` in tokens. vLLM refuses one for models without windows and states."""
        windows = any(g.window and g.reach is Reach.WINDOW for g in self.groups)
        if self.retention and (self.mixed_pages or not (windows or self.num_states)):
            return 0
        return self.retention and self.retention * self.scheduler_block_size

    @property
    def tensor_parallel_size(self) -> int:
        """Number of ranks of a stage."""
        return self.num_ranks // self.num_stages

    def replica_of(self, rank: int, group: int) -> int:
        """The first rank that has the same pages of ``group`` as ``rank``."""
        if group in self.private:
            return rank
        in_stage = rank % self.tensor_parallel_size
        return rank - in_stage % self.num_replicas

    @property
    def allows_sessions(self) -> bool:
        """Whether streaming-input sessions are tried. Where a state, a drafter or a prompt's end
        matters, what becomes of it when the prompt grows is vLLM's."""
        if not SERVES_HOLDERS_FIRST:
            return False
        windows = all(g.kind is Kind.ATTENTION and g.reach is Reach.WINDOW for g in self.groups)
        plain = self.match_unit is None and not self.replay_window
        return windows and plain and not self.num_drafted

    @property
    def num_reprefilled(self) -> int:
        """Number of earlier tokens that chained drafters compute again in each step."""
        return max(0, self.num_drafted - 1) if self.chained else 0

    def skips_store_hooks(self, rank: int, num_tokens: int) -> bool:
        """Whether vLLM's runner skips ``wait_for_save`` on this rank, in a step with this many
        tokens. The V1 runner calls it after drafting, on the last stage only."""
        if not num_tokens and not self.saves_without_tokens:
            return True
        is_last = rank >= self.num_ranks - self.tensor_parallel_size
        return self.polls_before_drafts and not is_last

    @property
    def polls_before_drafts(self) -> bool:
        """Whether vLLM's runner asks for results of transfers before it drafts: the V1 runner."""
        return bool(self.num_drafted) and not self.v2_runner

    @cached_property
    def groups(self) -> list[Group]:
        """The model's groups, in vLLM's order."""
        attention = [
            Group(Kind.ATTENTION, window, reach=reach)
            for reach, windows in (
                (Reach.WINDOW, self.windows),
                (Reach.CHUNK, self.chunks),
                (Reach.PROMPT, self.prompt_windows),
            )
            for window in windows
        ]
        drafts = [Group(Kind.DRAFT, self.draft_window)] if self.draft else []
        unfound = [Group(Kind.RING)] if self.ring else []
        if self.replay_window:
            unfound.append(Group(Kind.ATTENTION, self.replay_window, replays=True))
        scales = chain(self.scales, repeat(1))
        scaled = [
            replace(group, scale=scale)
            for group, scale in zip([*attention, *drafts], scales, strict=False)
        ]
        return [*unfound, *scaled, *[Group(Kind.STATE)] * self.num_states]

    @property
    def layers(self) -> list[list[Layer]]:
        """By group, its layers. Those of chained drafters draft in the order of their names, and
        each reads one token further ahead."""
        groups = self.kv_cache_config().kv_cache_groups
        names = [name for group in groups for name in group.layer_names]
        drafters = sorted(
            (name for name in names if name.startswith(DRAFT)), key=extract_layer_index
        )
        ahead = {name: index if self.num_reprefilled else 0 for index, name in enumerate(drafters)}
        return [
            [
                Layer.of(name, layer_spec(group, name), 1 + ahead.get(name, 0))
                for name in group.layer_names
            ]
            for group in groups
        ]

    def checkpoint(self, group: int, start: int, end: int) -> tuple[int, int] | None:
        """The extra state that a step over tokens ``start`` to ``end`` leaves, beside the one at
        its end: the number of tokens before it, and its column in the group's block table."""
        return None

    def widths(self, rank: int = 0) -> tuple[int, ...]:
        """By layer, slots of 8 bytes per token on a rank, in blocks of ``block_size`` tokens.
        Larger blocks have fewer per token, because the pages of all groups have equal size."""
        unit = math.lcm(*self.scales) * (2 if self.uneven_ranks and rank % 2 else 1)
        return tuple(unit * (layer + 1 if self.mixed_pages else 1) for layer in range(NUM_LAYERS))

    def block_bytes(self, rank: int = 0) -> int:
        """Bytes of a block of all layers on a rank."""
        return self.block_size * SLOT * sum(self.widths(rank))

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory for each rank."""
        largest = max(self.block_bytes(rank) for rank in range(self.num_ranks))
        return self.num_host_blocks * largest

    def configure(self, config: VllmConfig) -> None:
        """Change ``config`` as for this model."""
        cache = config.cache_config
        cache.block_size = self.block_size * min(group.scale for group in self.groups)
        cache.prefix_match_unit = self.match_unit
        cache.mamba_cache_mode = "align" if self.num_states else "none"
        if self.draft or self.num_drafted:
            config.speculative_config = cast(
                Any, SpeculativeConfig(self.num_drafted, self.draft, self.chained)
            )

    def kv_cache_config(self, rank: int = 0) -> KVCacheConfig:
        """A worker's configuration: the groups, with their layers over each other."""
        groups = [self._group_spec(index, group, rank) for index, group in enumerate(self.groups)]
        num_blocks, block_bytes = self.num_device_blocks, self.block_bytes(rank)
        tensors, before = [], 0
        for layer, width in enumerate(self.widths(rank)):
            page_bytes = self.block_size * width * SLOT
            tensors += [
                KVCacheTensor(
                    size=num_blocks * block_bytes,
                    layers=[group.layer_names[layer]],
                    layer_stride=page_bytes * (1 if self.block_outermost else num_blocks),
                    block_stride=block_bytes if self.block_outermost else page_bytes,
                    offset=before * (1 if self.block_outermost else num_blocks),
                )
                for group in groups
            ]
            before += page_bytes
        return KVCacheConfig(
            num_blocks=num_blocks,
            kv_cache_tensors=tensors,
            kv_cache_groups=groups,
            prefix_cache_retention_interval=self.retention_interval,
        )

    def _group_spec(self, index: int, group: Group, rank: int) -> KVCacheGroupSpec:
        prefix = DRAFT if group.kind is Kind.DRAFT else ""
        specs: dict[str, KVCacheSpec] = {}
        for layer, width in enumerate(self.widths(rank)):
            spec = group.spec(self.block_size, width, self.num_drafted)
            if isinstance(spec, SlidingWindowSpec):  # as vLLM's get_kv_cache_configs does
                spec = replace(spec, extra_retained_tokens=self.num_reprefilled)
            num_shards = self.tensor_parallel_size
            if index not in self.private:
                num_shards //= self.num_replicas
            if isinstance(spec, AttentionSpec) and SAYS_REPLICAS:
                spec = replace(spec, max_tp_shards=num_shards)
            if isinstance(spec, MambaSpec):
                spec = replace(spec, tp_replicated=self.tensor_parallel_size > num_shards == 1)
            specs[f"{prefix}group{index}.layer.{layer}"] = spec
        common, *_ = specs.values()
        if self.mixed_pages:
            common = UniformTypeKVCacheSpecs(common.block_size, specs)
        return KVCacheGroupSpec(list(specs), common, is_eagle_group=group.kind is Kind.DRAFT)
