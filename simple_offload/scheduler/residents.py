"""Residents: what the device's blocks hold, and what becomes of it when they are filled anew."""

from collections.abc import Container, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, KVCacheBlock

from simple_offload import metrics
from simple_offload.scheduler.admission import Admission
from simple_offload.scheduler.stores import Storable, Stores

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool


class _Origin(NamedTuple):
    """What a device block has been filled with."""

    key: BlockHashWithGroupId
    parent: BlockHashWithGroupId | None


class Residents:
    """A free block says what it holds, but not what it follows. That is recorded while it is in a
    block table: one entry for each device block.

    What has been filled once is counted once: as stored (by ``Stores``), skipped or dropped.
    """

    def __init__(self, stores: Stores, admission: Admission, device_pool: "BlockPool") -> None:
        self.stores = stores
        self.admission = admission
        self._device_pool = device_pool
        self._cached = device_pool.cached_block_hash_to_block
        self._origins: list[_Origin | None] = [None] * len(device_pool.blocks)
        self._settled: set[int] = set()
        """Ids of blocks that have been counted, or will be when their store ends."""

    def record(
        self,
        block: KVCacheBlock,
        key: BlockHashWithGroupId,
        parent: BlockHashWithGroupId | None,
    ) -> None:
        """``block`` has been filled with what ``key`` stands for."""
        if not self._has(block, key):
            self._settled.discard(block.block_id)
        self._origins[block.block_id] = _Origin(key, parent)

    def storable(self, block: KVCacheBlock) -> Storable | None:
        """The block as what it is to be stored as; None if it is not, or is there already."""
        key = block.block_hash
        if key is None or self.stores.has(key) or not self.admission.admits(key):
            return None
        origin = self._origins[block.block_id]
        num_tokens = block.block_hash_num_tokens
        if origin is None or origin.key != key or num_tokens is None:
            return None
        return Storable((block,), key, origin.parent, num_tokens, early=True)

    def holders(self, key: object) -> Iterable[int]:
        """Ids of the device blocks that hold ``key`` and can be found by it."""
        found = self._cached._cache.get(cast(BlockHashWithGroupId, key))
        if isinstance(found, dict):  # several
            return found.keys()
        return () if found is None else (found.block_id,)

    def refilled(self, blocks: Iterable[KVCacheBlock]) -> list[KVCacheBlock]:
        """Those of ``blocks``, just taken by a request, that do not hold what they did."""
        return [
            block
            for block in blocks
            if not block.is_null
            and (block.block_hash is None or not self._has(block, block.block_hash))
        ]

    def plan(self, blocks: Sequence[Storable], keep: Container[BlockHashWithGroupId]) -> int:
        """``Stores.plan``; what it has no room for may yet be evicted unstored."""
        num_planned = self.stores.plan(blocks, lambda: keep, self._device_pool)
        self.settle(block.device_blocks[0] for block in blocks[:num_planned])
        return num_planned

    def settle(self, blocks: Iterable[KVCacheBlock]) -> int:
        """What these blocks hold needs no more counting. How many did."""
        before = len(self._settled)
        self._settled.update(block.block_id for block in blocks)
        return len(self._settled) - before

    def evict(self, blocks: Sequence[KVCacheBlock], reason: str) -> None:
        """Count what these blocks held until now, unless it is kept; lost for ``reason``."""
        num_refused = num_lost = 0
        for block in blocks:
            origin, self._origins[block.block_id] = self._origins[block.block_id], None
            if block.block_id in self._settled:
                self._settled.discard(block.block_id)
            elif origin is None or self.stores.has(origin.key):
                continue
            elif self._cached.get_one_block(origin.key) is not None:
                continue  # another block of the device has it too
            elif self.admission.admits(origin.key):
                num_lost += 1
            else:
                num_refused += 1
        meter = self.stores.tier.meter
        meter.add(metrics.SKIPPED, num_refused, "below_threshold")
        meter.add(metrics.DROPPED, num_lost, reason)

    def forget(self) -> None:
        """Nothing is to be stored of what the blocks hold now, nor counted."""
        self._origins = [None] * len(self._origins)
        self._settled.clear()

    def _has(self, block: KVCacheBlock, key: BlockHashWithGroupId) -> bool:
        origin = self._origins[block.block_id]
        return origin is not None and origin.key == key
