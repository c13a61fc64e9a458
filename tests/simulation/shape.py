"""Shape: what engine a world has."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from tests.simulation.device import KVMemory
from tests.simulation.groups import Group, Kind, Layer, Reach
from tests.simulation.identity import Identities

NUM_LAYERS = 2


@dataclass(frozen=True)
class Shape:
    """An engine: its pools, its model's groups, and how it is run.

    ``windows``: a group of attention layers each, 0 for full attention, else a window in tokens.
    ``chunks``, ``prompt_windows``: groups of attention layers of other reaches (``Reach``).
    ``num_states``: that many groups of state layers. ``draft``: a drafter's group as well, of
    attention over ``draft_window`` tokens; ``chained``: its layers are MTP modules, each of which
    looks a token further ahead. ``retention``: after how many scheduler blocks each vLLM keeps a
    window, or a state; 0, its default: at the ends of prompts; None: everywhere.
    ``mixed_pages``: the layers of each group have pages of different sizes. ``match_unit``: how
    many tokens a hash covers, if fewer than a block: with states, hits may end inside a block.
    ``lazy`` and ``store_threshold``: which blocks are stored.
    ``num_sub_blocks``: how many device blocks a host block holds; ``num_host_blocks`` and
    ``chunk_blocks`` count blocks of a device block's size all the same.
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
    retention: int | None = 0
    v2_runner: bool = False
    """Whether steps run in the order of vLLM's V2 runner: a step's output is processed before its
    drafter has run."""
    num_stages: int = 1
    """Pipeline parallel stages that the ranks are dealt out to."""
    priority: bool = False
    """Whether requests have priorities."""
    mixed_pages: bool = False
    match_unit: int | None = None
    lazy: bool = False
    store_threshold: int = 1
    num_sub_blocks: int = 1
    chunk_blocks: int | None = None
    """Host blocks that a rank opens at a time; None: all at start."""
    early_chunks: tuple[int, ...] = ()
    """By rank, how many chunks beyond the first are open before the handshake, none if not said."""
    num_handshakes: int | None = None
    """Of how many ranks the scheduler hears before the first step; None: of all."""
    num_drafted: int = 0
    """Tokens drafted for each step of a request that decodes, some of which are accepted."""
    scales: tuple[int, ...] = ()
    """By group of attention layers, how many times ``block_size`` tokens its blocks have; 1 where
    not said. Those of states have the fewest: where they end, vLLM ends chunks of a prompt."""
    context_parallel: bool = False
    """Whether the tokens of each block are dealt out to the ranks (DCP)."""
    uneven_ranks: bool = False
    """Whether every other rank's pages are twice as large. With the same number of bytes for
    each rank, those have room for ``num_host_blocks`` and the others for more."""

    @property
    def hash_size(self) -> int:
        """Tokens that a hash covers."""
        return self.match_unit or math.gcd(*self.block_sizes)

    @property
    def block_sizes(self) -> list[int]:
        """By group, the tokens of a block of all ranks together."""
        return [self.block_size * group.scale * self.num_shards for group in self.groups]

    @property
    def scheduler_block_size(self) -> int:
        """Tokens between the ends of two hits, if hits end with blocks."""
        return math.lcm(*self.block_sizes)

    @property
    def num_shards(self) -> int:
        """Ranks that the tokens of a block are dealt out to."""
        return self.num_ranks if self.context_parallel else 1

    @property
    def retention_interval(self) -> int | None:
        """``retention`` in tokens. vLLM refuses one for models without windows and states."""
        windows = any(g.window and g.reach is Reach.WINDOW for g in self.groups)
        if self.retention and (self.mixed_pages or not (windows or self.num_states)):
            return 0
        return self.retention and self.retention * self.scheduler_block_size

    @property
    def num_reprefilled(self) -> int:
        """Tokens before those of a step that chained drafters compute once more."""
        return max(0, self.num_drafted - 1) if self.chained else 0

    def _ahead(self, layer: int) -> int:
        """How many tokens more than its own a drafter's layer has seen at each position."""
        return 1 + min(layer, self.num_reprefilled)

    def skips_store_hooks(self, rank: int) -> bool:
        """Whether vLLM's runner does not call the hooks after drafting on this rank: the V1
        runner, with drafts, on all stages but the last."""
        is_last = rank >= self.num_ranks - self.num_ranks // self.num_stages
        return bool(self.num_drafted) and not self.v2_runner and not is_last

    @property
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
        scaled = _with_scales([*attention, *drafts], self.scales)
        return [*scaled, *[Group(Kind.STATE)] * self.num_states]

    @property
    def layers(self) -> list[list[Layer]]:
        """By group, its layers."""
        return [
            [
                Layer(group.kind, self._ahead(layer) if group.kind is Kind.DRAFT else 0)
                for layer in range(NUM_LAYERS)
            ]
            for group in self.groups
        ]

    def pages(self, memory: KVMemory) -> list[list[Identities]]:
        """Memory as the groups see it: by group and layer ``[num_blocks, entries, width]``."""
        return [
            [
                page.reshape(len(page), page.shape[1] * group.scale, page.shape[2] // group.scale)
                for page in memory.pages
            ]
            for group in self.groups
        ]

    def checkpoint(self, group: int, start: int, end: int) -> tuple[int, int] | None:
        """Where a step over tokens ``start`` to ``end`` leaves the state of a group beside the one
        at its end: after how many tokens, and in which block of its table."""
        return None

    def widths(self, rank: int = 0) -> tuple[int, ...]:
        """By layer, the slots of 8 bytes that a token takes on a rank, in blocks of
        ``block_size`` tokens. In larger ones it takes fewer: the pages of all groups are alike."""
        unit = math.lcm(*self.scales) * (2 if self.uneven_ranks and rank % 2 else 1)
        return tuple(unit * (layer + 1 if self.mixed_pages else 1) for layer in range(NUM_LAYERS))

    def block_bytes(self, rank: int = 0) -> int:
        """Bytes of a block of all layers on a rank."""
        return self.block_size * 8 * sum(self.widths(rank))

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory for each rank."""
        largest = max(self.block_bytes(rank) for rank in range(self.num_ranks))
        return self.num_host_blocks * largest

    def make_memory(self, rank: int = 0) -> KVMemory:
        """One rank's KV cache."""
        return KVMemory(
            self.num_device_blocks,
            self.block_size,
            self.widths(rank),
            len(self.groups),
            self.block_outermost,
        )


def _with_scales(groups: Sequence[Group], scales: Sequence[int]) -> list[Group]:
    ones = [1] * (len(groups) - len(scales))
    return [
        replace(group, scale=scale)
        for group, scale in zip(groups, [*scales[: len(groups)], *ones], strict=True)
    ]
