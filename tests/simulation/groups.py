"""The kinds of KV cache groups that a scripted model may have."""

from dataclasses import dataclass
from enum import Enum
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    RSWASpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)

DRAFT = "draft."
"""Prefix of the names of a drafter's layers."""


class Kind(Enum):
    """The contents of a group's block."""

    ATTENTION = "keys and values of the block's own tokens"
    DRAFT = "a drafter's, which depend on one more token at each position (EAGLE)"
    STATE = "the state after the last token of the block (Mamba)"
    RING = "the last tokens of a request, in its only block, which no other one finds"


class Reach(Enum):
    """Which earlier tokens attention reads. With a size of 0, it reads all."""

    WINDOW = "the last ones, its own included"
    CHUNK = "those of its own chunk (Llama 4's local layers)"
    PROMPT = "the whole prompt, and the last ones behind it (R-SWA)"


@dataclass(frozen=True)
class Group:
    """One group of a model. ``window``: the number of tokens for ``reach``. ``scale``: tokens in
    its blocks, as a multiple of the smallest blocks'. ``replays``: no hit finds its blocks, and a
    request computes the last window of its hit again (DeepSeek-V4.1)."""

    kind: Kind
    window: int = 0
    scale: int = 1
    reach: Reach = Reach.WINDOW
    replays: bool = False

    def read(self, start: int, num_prompt_tokens: int) -> "np.ndarray[Any, np.dtype[np.int64]]":
        """Positions before ``start`` that attention reads from ``start`` on."""
        first = max(0, start - self.window + 1) if self.window else 0
        if self.reach is Reach.CHUNK:
            first = start // self.window * self.window
        if self.reach is Reach.PROMPT:
            prompt = np.arange(min(start, num_prompt_tokens))
            return np.concatenate([prompt, np.arange(max(first, len(prompt)), start)])
        return np.arange(first, start)

    def spec(self, block_size: int, width: int, num_drafted: int) -> KVCacheSpec:
        """The spec of a layer whose page has ``block_size * width`` slots of 8 bytes. A step may
        have ``num_drafted`` drafted tokens."""
        if self.kind is Kind.STATE:
            return MambaSpec(
                block_size=block_size * self.scale,
                shapes=((2 * block_size * width,),),
                dtypes=(torch.float32,),
                mamba_cache_mode="align",
                num_speculative_blocks=num_drafted,
            )
        common: dict[str, Any] = dict(
            block_size=block_size * self.scale,
            num_kv_heads=1,
            head_size=width // self.scale,
            dtype=torch.float32,
        )
        if self.reach is Reach.CHUNK:
            return ChunkedLocalAttentionSpec(attention_chunk_size=self.window, **common)
        if self.reach is Reach.PROMPT:
            return RSWASpec(rswa_window=self.window, **common)
        if not self.window:
            is_ring = self.kind is Kind.RING
            return CircularBufferSpec(**common) if is_ring else FullAttentionSpec(**common)
        common["sliding_window"] = self.window
        if not self.replays:
            return SlidingWindowSpec(**common)
        common["head_size"] *= 2  # no values beside keys
        return SlidingWindowMLASpec(bounded_replay=True, **common)


def is_ring(spec: KVCacheSpec) -> bool:
    """Whether a layer keeps the last tokens only, in one block."""
    return isinstance(spec, CircularBufferSpec)


@dataclass(frozen=True)
class Layer:
    """The contents of a layer's pages. ``ahead``: how many later tokens each position depends on.
    ``tokens_per_entry``: tokens for each entry of a page."""

    kind: Kind
    ahead: int = 0
    tokens_per_entry: int = 1

    @classmethod
    def of(cls, name: str, spec: KVCacheSpec, ahead: int) -> "Layer":
        """The layer of this name and spec. ``ahead``: if it is a drafter's."""
        if isinstance(spec, MambaSpec):
            return cls(Kind.STATE)
        if is_ring(spec):
            return cls(Kind.RING)
        is_draft = name.startswith(DRAFT)
        kind = Kind.DRAFT if is_draft else Kind.ATTENTION
        return cls(kind, ahead if is_draft else 0, int(spec.tokens_per_state))

    def ends(self, positions: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
        """Those of ``positions`` that complete an entry's tokens."""
        if self.tokens_per_entry == 1:
            return positions
        ends: np.ndarray[Any, Any] = positions[(positions + 1) % self.tokens_per_entry == 0]
        return ends


class SpeculativeConfig:
    """vLLM's, as far as its planner and scheduler read it: EAGLE or chained MTP modules with KV
    pages of their own, or drafts without pages (n-grams)."""

    num_speculative_tokens_per_batch_size = None
    max_num_new_slots_for_drafting = 0
    disable_eagle_block_drop = False
    disable_lookahead_block_hashes = False

    def __init__(
        self, num_drafted: int, eagle: bool, chained: bool, method: str | None = None
    ) -> None:
        self.num_speculative_tokens = num_drafted
        self.method = method
        self.draft_model_config = SimpleNamespace(hf_config=SimpleNamespace())
        # Shapes say themselves which ranks have the same KV (``max_tp_shards``).
        self.draft_parallel_config = SimpleNamespace(tensor_parallel_size=0)
        self._eagle = eagle
        self._chained = chained

    def use_eagle(self) -> bool:
        return self._eagle

    needs_eagle_block_drop = use_eagle_block_drop = use_eagle

    def use_dflash(self) -> bool:
        return False

    uses_draft_model = use_dflash

    def use_dspark(self) -> bool:
        return self.method == "dspark"

    def use_multi_module_mtp(self) -> bool:
        return self._chained


PLAIN: dict[str, Any] = {
    "num_states": 0,
    "chunks": (),
    "prompt_windows": (),
    "draft": False,
    "draft_window": 0,
    "chained": False,
    "ring": False,
    "replay_window": 0,
    "mixed_pages": False,
    "match_unit": None,
    "num_drafted": 0,
    "scales": (),
    "context_parallel": False,
    "uneven_ranks": False,
    "num_stages": 1,
    "num_replicas": 1,
    "private": (),
}
"""Keywords of a Shape that has only groups of attention layers."""

_CHAINED = {"draft": True, "chained": True, "num_drafted": 3}
_DEALT_OUT = {"context_parallel": True, "num_ranks": 2}

MODELS: dict[str, dict[str, Any]] = {
    "states and full attention": {"windows": (0,), "num_states": 1},
    "states and sliding windows": {"windows": (8,), "num_states": 1},
    "states of two kinds, full attention, windows": {"windows": (0, 8), "num_states": 2},
    "states only": {"windows": (), "num_states": 1},
    "a drafter": {"windows": (0,), "draft": True},
    "a drafter and windows only": {"windows": (8,), "draft": True},
    "a drafter and states": {"windows": (0,), "draft": True, "num_states": 1},
    "states, and hits inside blocks": {"windows": (0,), "num_states": 1, "match_unit": 2},
    "states only, and hits inside blocks": {"windows": (), "num_states": 2, "match_unit": 1},
    "a drafter, states, and hits inside blocks": {"windows": (0,), "num_states": 1, "match_unit": 2}
    | {"draft": True},
    "hashes finer than blocks, and windows": {"windows": (0, 8), "num_states": 1, "match_unit": 2},
    "drafts without a drafter's pages": {"windows": (0, 8), "num_drafted": 3},
    "drafts, and states": {"windows": (0,), "num_states": 2, "num_drafted": 2},
    "a drafter that drafts": {"windows": (0, 8), "draft": True, "num_drafted": 2},
    "a drafter with a window": {"windows": (0,), "draft": True, "draft_window": 8},
    "chained drafters": _CHAINED | {"windows": (0,)},
    "chained drafters and windows": _CHAINED | {"windows": (0, 8)},
    "chained drafters with a window": _CHAINED | {"windows": (0,), "draft_window": 8},
    "chunked local attention": {"windows": (0,), "chunks": (8,)},
    "chunked local attention, windows": {"windows": (8,), "chunks": (16,)},
    "prompts that all answers read": {"windows": (), "prompt_windows": (8,)},
    "prompts that all answers read, windows": {"windows": (0, 8), "prompt_windows": (6,)},
    "blocks of two sizes": {"windows": (0, 0), "scales": (1, 2)},
    "blocks of three sizes, windows, states": {
        "windows": (0, 8),
        "num_states": 1,
        "scales": (2, 4),
    },
    "blocks of two sizes, drafts": {"windows": (0, 8), "scales": (2, 1), "num_drafted": 3},
    "blocks dealt out to two ranks": _DEALT_OUT | {"windows": (0,)},
    "blocks of two sizes dealt out to two ranks, drafts": _DEALT_OUT
    | {"windows": (0, 0), "scales": (1, 2), "num_drafted": 2},
    "ranks with room for unlike numbers of blocks": {"windows": (0, 8), "num_ranks": 3}
    | {"uneven_ranks": True},
    "pages of two sizes": {"windows": (0,), "mixed_pages": True},
    "pages of two sizes, windows": {"windows": (0, 8), "mixed_pages": True},
}
"""The groups of all models, as keywords of a Shape."""
