"""Run: blocks of a request that follow each other, on their way to the tier or in it."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, KVCacheBlock

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from simple_offload.scheduler.event_payload import ByKey


@dataclass(slots=True, eq=False)
class Run:
    """The contents of ``len(keys)`` host blocks, each the parent of the next. By column: of a
    long prompt there are thousands of blocks."""

    device_blocks: Sequence[KVCacheBlock]
    """Where they are copied from: for each host block as many as it has parts, in order."""
    keys: Sequence[BlockHashWithGroupId]
    """By which they will be found."""
    parent: BlockHashWithGroupId | None
    """The key of the tokens just before the first one's own."""
    num_tokens: int
    """Of the prefix that ends with the first."""
    size: int = 0
    """Tokens that each of the others adds."""
    early: bool = False
    """Whether the first may be in the tier before its parent is: whoever stores it will store
    that too."""
    inner_keys: Sequence[Collection[BlockHashWithGroupId]] = ()
    """By host block: of prefixes that end inside it, by which it shall be found too; empty where
    there are none at all. Host blocks of several parts have none."""
    origins: "Sequence[Request | ByKey | None]" = ()
    """By host block, whose tokens they are, or what KV events say of them; empty unless somebody
    wants to know."""

    def __len__(self) -> int:
        return len(self.keys)

    def first(self, count: int) -> "Run":
        """Its first ``count`` host blocks, at least one."""
        if count == len(self.keys):
            return self
        num_parts = len(self.device_blocks) // len(self.keys)
        return Run(
            self.device_blocks[: count * num_parts],
            self.keys[:count],
            self.parent,
            self.num_tokens,
            self.size,
            self.early,
        )
