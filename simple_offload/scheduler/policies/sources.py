"""Sources: the device blocks that hold what host blocks are to be filled with."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    BlockHashWithGroupId,
    KVCacheBlock,
    get_block_hash,
)

from simple_offload.scheduler.tier.groups import Groups

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager


class Sources:
    """Tells by what a device block is known whether it is the one to be copied: a block table
    may have another block there, or none any more."""

    def __init__(self, groups: Groups, kv_cache_manager: "KVCacheManager") -> None:
        self._groups = groups
        self._device_pool: BlockPool = kv_cache_manager.block_pool

    def matching(
        self,
        block_hashes: list[BlockHash],
        group: int,
        first: int,
        blocks: Sequence[KVCacheBlock],
    ) -> list[BlockHashWithGroupId]:
        """The keys of a request's host blocks from ``first`` on, up to the first one of which
        ``blocks``, the parts that the block table has, at least one, are not all what they are
        taken for."""
        num_parts, end = self._groups.num_parts, self._groups.key_ends[group]
        last = first + len(blocks) // num_parts
        hashes = self._groups.part_hashes(block_hashes, group, first, last)
        held: list[Any] = [block._block_hash or b"" for block in blocks]
        # All at once, which makes no keys: each is as long as any other.
        if b"".join(held) == end.join(hashes) + end:
            return held[num_parts - 1 :: num_parts]
        count = next(i for i, each in enumerate(hashes) if held[i] != each + end) // num_parts
        return held[num_parts - 1 : count * num_parts : num_parts]

    def of(
        self,
        parts: Sequence[KVCacheBlock],
        block_hashes: list[BlockHash],
        index: int,
        key: BlockHashWithGroupId,
        group: int,
        own: bool,
    ) -> tuple[KVCacheBlock, ...] | None:
        """The device blocks to store under ``key``, the request's host block ``index``, where the
        block table has ``parts``; None unless all of them are there. ``own``: the table's may lack
        a hash."""
        keys = [key]
        if self._groups.num_parts > 1:
            keys = self._groups.part_keys(block_hashes, group, index, index + 1)
        sources = []
        for part, part_key in zip(parts, keys, strict=True):
            source = self._of_part(part, part_key, group, own)
            if source is None:
                return None
            sources.append(source)
        return tuple(sources)

    def _of_part(
        self, block: KVCacheBlock, key: BlockHashWithGroupId, group: int, own: bool
    ) -> KVCacheBlock | None:
        """The device block to store under ``key``, where the block table has ``block``."""
        if block.is_null:
            # The window has moved on. The block may still lie in the free queue, unharmed.
            cached = self._device_pool.get_cached_block(get_block_hash(key), [group])
            return cached[0] if cached is not None else None
        if own and block.block_hash is None and group in self._groups.stable_ids:
            return block
        return block if block.block_hash == key else None
