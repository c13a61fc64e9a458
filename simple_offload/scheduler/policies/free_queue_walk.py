"""QueueWalk: stores blocks at the front of the device's free queue before the device evicts
them."""

from collections import deque
from collections.abc import Collection, Container, Sequence, Set
from typing import TYPE_CHECKING, NamedTuple, cast

from vllm.utils.math_utils import cdiv
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, KVCacheBlock

from simple_offload import metrics
from simple_offload.scheduler.policies.device_contents import DeviceContents
from simple_offload.scheduler.stores import Stores
from simple_offload.scheduler.tier import block_pool
from simple_offload.scheduler.tier.cpu_tier import CpuTier

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class StepLimits(NamedTuple):
    """Upper limits of how many device blocks are needed how soon."""

    per_step: int
    """Blocks to schedule one step, without those that a load fills."""

    num_steps: int
    """Steps from the one that plans a store to the first that may use its blocks."""

    longest: int
    """Blocks to load the longest request."""

    reserve: int
    """Blocks for running requests to compute one token each."""

    @classmethod
    def from_config(cls, vllm_config: "VllmConfig", block_sizes: Sequence[int]) -> "StepLimits":
        """``block_sizes``: in tokens, by KV cache group."""
        scheduler_config = vllm_config.scheduler_config
        num_tokens = scheduler_config.max_num_batched_tokens
        num_requests = min(scheduler_config.max_num_seqs, num_tokens)
        return cls(
            per_step=sum(cdiv(num_tokens, size) + num_requests for size in block_sizes),
            # A store starts at its step's end. Its end is reported a step later at the earliest.
            num_steps=vllm_config.max_concurrent_batches + 2,
            longest=sum(cdiv(vllm_config.model_config.max_model_len, size) for size in block_sizes),
            reserve=num_requests * len(block_sizes),
        )


class EvictionHorizon:
    """How far ahead of the device's evictions blocks are stored. Blocks stored too late are lost.
    Blocks stored too early are in both caches, and take the tier's room from others (Wong and
    Wilkes, "My cache or yours?", 2002).

    The horizon is the upper limit of blocks needed until the stores of now have ended. If that is
    no small part of the device, and the tier has no room to spare, it is the recent peak instead.
    """

    def __init__(self, limits: StepLimits, num_device_blocks: int) -> None:
        self._most = limits.num_steps * limits.per_step + min(
            limits.longest, num_device_blocks // 4
        )
        is_small = 3 * self._most <= num_device_blocks
        self._least = self._most if is_small else num_device_blocks // 16
        self._period = num_device_blocks
        """Allocations until a peak is forgotten; after twice as many at the latest."""
        self._allocated: deque[int] = deque([0], limits.num_steps)
        """Blocks allocated by each of the last steps, the one being scheduled last."""
        self._peak = self._peak_before = 0
        """Peak demand over ``num_steps`` steps, in the current and in the previous period."""
        self._num_allocated = 0
        """In the current period."""

    def num_blocks(self, num_empty: int) -> int:
        """Blocks at the front of the free queue that should be safe to evict, while ``num_empty``
        host blocks are empty."""
        return max(self._least, self._peak, self._peak_before, min(self._most, num_empty // 4))

    def on_allocated(self, count: int) -> None:
        """``count`` blocks have been allocated to be filled."""
        self._allocated[-1] += count

    def on_step(self) -> None:
        """A step has been scheduled."""
        self._peak = max(self._peak, sum(self._allocated))
        self._num_allocated += self._allocated[-1]
        self._allocated.append(0)
        if self._num_allocated >= self._period:
            self._num_allocated = 0
            self._peak, self._peak_before = sum(self._allocated), self._peak


_MAX_TRIES = 3
"""Stores of a block's contents that may fail."""


class _PassedKeys(Container[BlockHashWithGroupId]):
    """Keys of the blocks that the walk has passed: they are safe because the tier has them."""

    def __init__(self, contents: DeviceContents, passed: Set[int]) -> None:
        self._contents = contents
        self._passed = passed

    def __contains__(self, key: object) -> bool:
        holders = self._contents.holders(cast(BlockHashWithGroupId, key))
        return not self._passed.isdisjoint(holders)


class QueueWalk:
    """Walks on along the free queue from where it stopped, until as many blocks before it are safe
    to evict as the EvictionHorizon asks for. Blocks that only the device has are pinned while they
    are stored, and return to the front. Blocks of a chain come tail first, so a block may come to
    the tier before its parent, which the device still has.
    """

    def __init__(
        self,
        tier: CpuTier,
        stores: Stores,
        contents: DeviceContents,
        limits: StepLimits,
        device_pool: BlockPool,
        meter: metrics.Meter,
    ) -> None:
        self._tier = tier
        self._stores = stores
        self._contents = contents
        self._limits = limits
        self._device_pool = device_pool
        self._meter = meter
        self._horizon = EvictionHorizon(limits, len(device_pool.blocks))
        self._cursor: KVCacheBlock | None = None
        """The last block that the walk has passed and left in the queue; None: start at the
        front."""
        self._passed: set[int] = set()
        """Ids of the blocks before the cursor, and of pinned blocks from there."""
        self._pinned: dict[int, int] = {}
        """By id of a block pinned from the queue: its rank among blocks that return to the
        front."""
        self._num_pinned = 0
        """Blocks pinned from the queue since the start."""
        self._num_walked = 0
        """Blocks passed since the walk started at the front."""
        self._num_lost = 0
        """Blocks that the tier had lost by then."""
        self._num_tries: dict[int, int] = {}
        """By device block id, stores of its contents from the queue."""
        self._num_failed = 0
        """Failed stores when the walk last went on."""
        self._tier_is_full = False
        """Whether the last walk stopped because every host block is pinned."""
        self._num_left = 0
        """Blocks the last walk could not store: the tier held only contents as close to
        eviction."""

    @property
    def num_ahead(self) -> int:
        """Blocks at the front of the queue that should be safe to evict."""
        # At least this many are empty: some of the others may be pinned.
        return self._horizon.num_blocks(self._tier.num_free - self._tier.num_used)

    @property
    def drop_reason(self) -> str:
        """Why contents are lost that the device overwrites now, for the meter."""
        return "tier_full" if self._tier_is_full or self._num_left else "too_late"

    def on_allocated(self, block_ids: Collection[int], filled_anew: Collection[int]) -> None:
        """Requests have got these blocks, which have left the queue; ``filled_anew``: those that
        have lost their contents."""
        self._passed.difference_update(block_ids)
        for block_id in self._pinned.keys() & block_ids:
            del self._pinned[block_id]
        for block_id in self._num_tries.keys() & filled_anew:
            del self._num_tries[block_id]
        self._horizon.on_allocated(len(filled_anew))

    def free_blocks(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Drop a reference to each block, last block first, as vLLM frees a request's. Blocks
        pinned from the queue return to its front."""
        if self._pinned:
            ranks = {
                block.block_id: rank
                for block in blocks
                if (rank := self._pinned.pop(block.block_id, None)) is not None
            }
            first = [b for b in blocks if b.block_id in ranks and b.ref_cnt == 1]
            first.sort(key=lambda block: ranks[block.block_id])
            block_pool.free_blocks_first(self._device_pool, first)
            blocks = [block for block in blocks if block.ref_cnt > 0]
        block_pool.free_blocks(self._device_pool, reversed(blocks))

    def on_step(self) -> None:
        """A step has got its blocks: walk on, and store blocks that only the device has."""
        self._horizon.on_step()
        num_ahead = self.num_ahead
        lost_place = self._cursor is not None and self._cursor.ref_cnt > 0
        # Blocks whose copy failed have returned to the front.
        has_failed = self._stores.num_failed > self._num_failed
        self._num_failed = self._stores.num_failed
        # The tier may have evicted contents of passed blocks.
        is_old = self._num_walked > 2 * num_ahead and self._tier.num_lost > self._num_lost
        if lost_place or has_failed or self._num_left or is_old:
            self._start_over()
        self._pass_newcomers()
        self._walk_on(num_ahead)
        # Every free block has been passed, but too few are known: some left unnoticed.
        num_free = self._device_pool.get_num_free_blocks()
        if self._num_safe < min(num_ahead, num_free) and self._is_at_end():
            self._start_over()

    def _start_over(self) -> None:
        self._cursor = None
        self._num_walked = 0
        self._num_lost = self._tier.num_lost
        self._passed = set(self._pinned)

    def _pass_newcomers(self) -> None:
        """Pass the empty blocks that vLLM has put before all others."""
        if self._cursor is not None:
            for block, key in block_pool.free_blocks_after(self._device_pool, None):
                if block.block_id in self._passed or block is self._cursor:
                    return
                if key is not None:  # from an unknown place
                    self._start_over()
                    return
                self._passed.add(block.block_id)

    def _is_at_end(self) -> bool:
        return next(block_pool.free_blocks_after(self._device_pool, self._cursor), None) is None

    @property
    def _num_safe(self) -> int:
        """Passed blocks in the queue; pinned ones will return."""
        return len(self._passed) - len(self._pinned)

    def _walk_on(self, num_ahead: int) -> None:
        chosen = self._pass(num_ahead)
        self._num_left = 0
        if not chosen:
            return
        # The tier may be full of contents as close to eviction.
        keep = _PassedKeys(self._contents, self._passed)
        left = {block.block_id for block in self._contents.plan(list(chosen.values()), keep)}
        self._num_left = len(left)
        self._passed -= left
        stored = [block.block_id for block in chosen.values() if block.block_id not in left]
        for rank, block_id in enumerate(stored, self._num_pinned):
            self._pinned[block_id] = rank
            self._num_tries[block_id] = self._num_tries.get(block_id, 0) + 1
        self._num_pinned += len(stored)

    def _pass(self, num_ahead: int) -> dict[BlockHashWithGroupId, KVCacheBlock]:
        """Walk on until ``num_ahead`` blocks are safe, or as far as there is room to store the
        others. Returns those by key, in the order of the queue."""
        num_host_blocks = self._tier.num_free
        room = min(
            self._device_pool.get_num_free_blocks() - self._limits.reserve,
            num_ahead - len(self._pinned),
            num_host_blocks,
        )
        num_lacking = num_ahead - self._num_safe
        in_tier = self._tier.has
        # The tier has the ancestors of its blocks too, unless some came before their parents.
        has_all_parents = self._tier.has_all_parents
        parent: BlockHashWithGroupId | None = None
        chosen: dict[BlockHashWithGroupId, KVCacheBlock] = {}
        skipped: list[KVCacheBlock] = []
        others: list[KVCacheBlock] = []
        self._tier_is_full = False
        for block, key in block_pool.free_blocks_after(self._device_pool, self._cursor):
            if num_lacking <= 0:
                break
            if key is None:
                others.append(block)
            elif key is parent or in_tier(key):
                skipped.append(block)
                parent = self._contents.parent_of(block, key) if has_all_parents else None
            elif self._stores.has(key):  # on its way; its parent may not be
                skipped.append(block)
            elif key in chosen or not self._is_storable(block):
                others.append(block)
            elif len(chosen) < room:
                chosen[key] = block
                continue
            else:
                self._tier_is_full = len(chosen) >= num_host_blocks
                break
            num_lacking -= 1
            self._cursor = block
        if skipped:
            self._skip(skipped)
        ids = [block.block_id for block in (*others, *chosen.values())]
        self._passed.update(ids)
        self._num_walked += len(skipped) + len(ids)
        return chosen

    def _skip(self, blocks: list[KVCacheBlock]) -> None:
        """Pass blocks whose contents the tier has."""
        self._tier.promote(key for key in block_pool.keys_of(blocks) if key is not None)
        ids = [block.block_id for block in blocks]
        self._passed.update(ids)
        for block_id in self._num_tries.keys() & ids:
            del self._num_tries[block_id]
        self._meter.add(metrics.SKIPPED, self._contents.settle(ids), "already_stored")

    def _is_storable(self, block: KVCacheBlock) -> bool:
        """Whether the block has contents to be stored whose stores have not failed too often."""
        has_tries = self._num_tries.get(block.block_id, 0) < _MAX_TRIES
        return self._contents.is_storable(block) and has_tries
