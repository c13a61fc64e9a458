"""Run: consecutive blocks of a request, planned, stored and committed together."""

from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from vllm.v1.core.kv_cache_utils import BlockHash, BlockHashWithGroupId, KVCacheBlock

if TYPE_CHECKING:
    from vllm.v1.request import Request


class EventPayload(NamedTuple):
    """The tokens of one key: of a block, of a sub-block, or of a prefix that ends inside a
    block."""

    token_ids: "array[int]"
    parent: BlockHash | None
    """The hash of the prefix before them."""
    extra_keys: list[tuple[object, ...] | None] | None
    session_id: str | None
    lora_id: int | None
    lora_name: str | None


PayloadsByKey = dict[BlockHashWithGroupId, EventPayload]
"""Payloads of a host block: of its sub-blocks in order; or its own, then those of prefixes that end
inside it."""


@dataclass(slots=True, eq=False)
class Run:
    """The contents of ``len(keys)`` host blocks, each the parent of the next. By column: a long
    prompt has thousands of blocks."""

    device_blocks: Sequence[KVCacheBlock]
    """Sources of the copy: for each host block its sub-blocks, in order."""
    keys: Sequence[BlockHashWithGroupId]
    """Keys that the host blocks will be found by."""
    parent: BlockHashWithGroupId | None
    """Key of the block before the first one; None for a chain's head."""
    num_tokens: int
    """Length of the prefix that ends with the first block."""
    size: int = 0
    """Tokens that each further block adds."""
    early: bool = False
    """Whether the first block may be committed before its parent: the parent will be stored
    too."""
    request: "Request | None" = None
    """The request whose tokens these are, if KV events are wanted."""
    payloads: "Sequence[PayloadsByKey]" = ()
    """By block, for KV events of blocks that outlived their request; else empty."""
    host_blocks: Sequence[KVCacheBlock] = ()
    """Targets of the copy, once it is planned."""
    inner_keys: Sequence[Collection[BlockHashWithGroupId]] = ()
    """By block, keys of prefixes that end inside it, which it will be found by too; empty where
    no block has any. Host blocks with several sub-blocks have none."""

    def __len__(self) -> int:
        return len(self.keys)

    def slice(self, start: int, stop: int) -> "Run":
        """Its blocks ``start`` to ``stop``, at least one, as a run before it is planned."""
        num_sub_blocks = len(self.device_blocks) // len(self.keys)
        return Run(
            self.device_blocks[start * num_sub_blocks : stop * num_sub_blocks],
            self.keys[start:stop],
            self.keys[start - 1] if start else self.parent,
            self.num_tokens + start * self.size,
            self.size,
            self.early,
            self.request,
            self.payloads[start:stop],
        )


def stretches(places: Sequence[int]) -> list[tuple[int, int]]:
    """Consecutive numbers among ``places``, which are sorted, as (start, stop)."""
    if isinstance(places, range):
        return [(places.start, places.stop)] if places else []
    found = []
    for _, pairs in groupby(enumerate(places), lambda pair: pair[1] - pair[0]):
        consecutive = [place for _, place in pairs]
        found.append((consecutive[0], consecutive[-1] + 1))
    return found
