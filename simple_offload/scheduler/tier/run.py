"""Run: blocks that are planned, stored and committed together."""

from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from vllm.v1.core.kv_cache_utils import BlockHash, BlockHashWithGroupId, KVCacheBlock
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
    """Contents of ``len(keys)`` host blocks that are planned, stored and committed together,
    parents before children. By column: a long prompt has thousands of blocks."""

    device_blocks: Sequence[KVCacheBlock]
    """Sources of the copy: for each host block its sub-blocks, in order."""
    keys: Sequence[BlockHashWithGroupId]
    """Keys that the host blocks will be found by."""
    num_tokens: Sequence[int] = ()
    """By block, the length of the prefix that ends with it; empty unless KV events are wanted."""
    payloads: Sequence[PayloadsByKey] = ()
    """By block, for KV events, where they are known before the commit; else empty."""
    request: Request | None = None
    """The request that the payloads are made from at the commit, unless they are known before."""
    on_device: bool = True
    """Whether the device finds these contents too."""
    host_blocks: list[KVCacheBlock] = field(default_factory=list)
    """Targets of the copy, once it is planned."""
    inner_keys: Sequence[Collection[BlockHashWithGroupId]] = ()
    """By block, keys of prefixes that end inside it, which it will be found by too; empty where
    no block has any. Host blocks with several sub-blocks have none."""

    def first(self, count: int) -> "Run":
        """Its first ``count`` blocks, before it is planned."""
        num_sub_blocks = len(self.device_blocks) // len(self.keys)
        return Run(
            self.device_blocks[: count * num_sub_blocks],
            self.keys[:count],
            self.num_tokens[:count],
            self.payloads[:count],
            self.request,
            self.on_device,
        )
