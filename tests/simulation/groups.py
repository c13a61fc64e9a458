"""The kinds of KV cache groups that a scripted model may have."""

from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)


class Kind(Enum):
    """What a group's block holds."""

    ATTENTION = "keys and values of the block's own tokens"
    DRAFT = "a drafter's, which at each position has seen one token more (EAGLE)"
    STATE = "all that remains of every token up to the block's end (Mamba)"


@dataclass(frozen=True)
class Group:
    """One group of a model. ``window``: how many tokens attention reads back, 0 for all."""

    kind: Kind
    window: int = 0

    def spec(self, block_size: int, width: int) -> KVCacheSpec:
        """What vLLM is told of a layer with a page of ``block_size * width`` slots of 8 bytes."""
        if self.kind is Kind.STATE:
            return MambaSpec(
                block_size=block_size,
                shapes=((2 * block_size * width,),),
                dtypes=(torch.float32,),
                mamba_cache_mode="align",
            )
        common: dict[str, Any] = dict(
            block_size=block_size, num_kv_heads=1, head_size=width, dtype=torch.float32
        )
        if self.window:
            return SlidingWindowSpec(sliding_window=self.window, **common)
        return FullAttentionSpec(**common)


class Drafter:
    """What vLLM's scheduler wants to know of a speculative config: EAGLE. Its KV pages are
    filled here, but no drafted token is ever scheduled."""

    num_speculative_tokens = 0
    num_speculative_tokens_per_batch_size = None
    max_num_new_slots_for_drafting = 0
    disable_eagle_block_drop = False
    disable_lookahead_block_hashes = False

    def use_eagle(self) -> bool:
        return True

    needs_eagle_block_drop = use_eagle_block_drop = use_eagle

    def use_dflash(self) -> bool:
        return False

    use_dspark = uses_draft_model = use_multi_module_mtp = use_dflash


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
    "a drafter, states, and hits inside blocks": {
        "windows": (0,),
        "draft": True,
        "num_states": 1,
        "match_unit": 2,
    },
    "hashes finer than blocks, and windows": {"windows": (0, 8), "num_states": 1, "match_unit": 2},
    "pages of two sizes": {"windows": (0,), "mixed_pages": True},
    "pages of two sizes, windows": {"windows": (0, 8), "mixed_pages": True},
}
"""What models may consist of, as keywords of a Shape."""
