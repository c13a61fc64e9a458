"""QueueWalk: along the device's free queue, to store what is about to be evicted."""

from collections.abc import Collection, Container, Set

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, KVCacheBlock

from simple_offload import metrics
from simple_offload.scheduler.cpu_tier import CpuTier
from simple_offload.scheduler.lookahead import Lookahead, StepLimits
from simple_offload.scheduler.residents import Residents
from simple_offload.scheduler.stores import Storable, Stores

_MAX_TRIES = 3
"""How often a block is stored whose copies fail."""


class _FrontKeys(Container[BlockHashWithGroupId]):
    """What the blocks hold that the walk has passed: they are safe because the tier has it."""

    def __init__(self, residents: Residents, passed: Set[int]) -> None:
        self._residents = residents
        self._passed = passed

    def __contains__(self, key: object) -> bool:
        return not self._passed.isdisjoint(self._residents.holders(key))


class QueueWalk:
    """Goes on where it has stopped, until there are as many blocks before it that may be evicted
    without loss as the Lookahead says. What only the device has is held while it is stored, and
    comes back to the front. Blocks of a chain come tail first, so one may come to the tier before
    its parent does, which the device still has.
    """

    def __init__(
        self,
        tier: CpuTier,
        stores: Stores,
        residents: Residents,
        limits: StepLimits,
        device_pool: BlockPool,
    ) -> None:
        self.tier = tier
        self.stores = stores
        self.limits = limits
        self._residents = residents
        self._device_pool = device_pool
        self._lookahead = Lookahead(limits, len(device_pool.blocks))
        self._cursor: KVCacheBlock | None = None
        """The last block of the queue that the walk has passed and left there; None: go on from
        the front."""
        self._passed: set[int] = set()
        """Ids of the blocks before the cursor, and of those held from there."""
        self._num_walked = 0
        """Since the walk started from the front."""
        self._num_held = 0
        """Blocks that have ever been held from the queue."""
        self._num_tries: dict[int, int] = {}
        """By id of a device block, how often what it holds was to be stored from the queue."""
        self._num_failed = 0
        """Stores that had failed when the walk was last taken up."""
        self._tier_was_full = False
        """Whether the last walk has found no room for what should have been stored."""

    @property
    def num_ahead(self) -> int:
        """How many blocks at the front of the queue are to be safe to evict."""
        # At least as many hold nothing: some that hold something may be pinned.
        num_empty = self.tier.pool.get_num_free_blocks() - self.tier.num_used
        return self._lookahead.num_blocks(num_empty)

    @property
    def drop_reason(self) -> str:
        """Why a block is lost that is filled anew now, for the meter."""
        return "tier_full" if self._tier_was_full else "too_late"

    def take(self, taken: Collection[KVCacheBlock], refilled: Collection[KVCacheBlock]) -> None:
        """A request has been given the blocks ``taken``, which have left the queue; those
        ``refilled`` do not hold any more what they did there."""
        for block in taken:
            self._passed.discard(block.block_id)
            self.stores.first_to_go.pop(block.block_id, None)
        for block in refilled:
            self._num_tries.pop(block.block_id, None)
        self._lookahead.take(len(refilled))

    def go_on(self) -> None:
        """The blocks of a step have been given out: go on along the queue, and store what only the
        device has."""
        self._lookahead.end_step()
        lost_place = self._cursor is not None and self._cursor.ref_cnt > 0
        # What could not be copied has come back to the front.
        has_failed = self.stores.num_failed > self._num_failed
        self._num_failed = self.stores.num_failed
        if lost_place or has_failed or self._num_walked > self.num_ahead:
            self._start_over()
        self._walk_on()
        # Every free block has been passed, but not so many are known: some left unnoticed.
        num_free = self._device_pool.get_num_free_blocks()
        num_safe = len(self._passed) - len(self.stores.first_to_go)
        if num_safe < min(self.num_ahead, num_free) and self._at_end():
            self._start_over()

    def _start_over(self) -> None:
        self._cursor = None
        self._num_walked = 0
        self._passed = set(self.stores.first_to_go)

    def _at_end(self) -> bool:
        queue = self._device_pool.free_block_queue
        return next(queue.iter_blocks_after(self._cursor), None) is None

    def _walk_on(self) -> None:
        held = self.stores.first_to_go
        num_free = self._device_pool.get_num_free_blocks()
        num_ahead = self.num_ahead
        room = min(
            num_free - self.limits.reserve,
            num_ahead - len(held),
            self.tier.pool.get_num_free_blocks(),
        )
        num_safe = len(self._passed) - len(held)
        chosen: dict[BlockHashWithGroupId, Storable] = {}
        skipped: list[KVCacheBlock] = []
        self._tier_was_full = False
        for block in self._device_pool.free_block_queue.iter_blocks_after(self._cursor):
            if num_safe >= num_ahead:
                break
            storable = self._residents.storable(block)
            if storable is not None and self._num_tries.get(block.block_id, 0) >= _MAX_TRIES:
                storable = None
            if storable is None or storable.key in chosen:
                key = block.block_hash
                if key is not None and self.stores.has(key):
                    self.tier.promote(key)
                    self._num_tries.pop(block.block_id, None)
                    skipped.append(block)
                self._cursor = block
                num_safe += block.block_id not in self._passed
            elif len(chosen) < room:
                chosen[storable.key] = storable
            else:
                self._tier_was_full = len(chosen) >= self.tier.pool.get_num_free_blocks()
                break
            self._passed.add(block.block_id)
            self._num_walked += 1
        self.tier.meter.add(metrics.SKIPPED, self._residents.settle(skipped), "already_stored")
        # A parent that comes with its child should come before it.
        head_first = sorted(chosen.values(), key=lambda block: block.num_tokens)
        num_planned = self._residents.plan(head_first, _FrontKeys(self._residents, self._passed))
        for storable in head_first[num_planned:]:
            del chosen[storable.key]
            self._passed.discard(storable.device_blocks[0].block_id)
        if num_planned < len(head_first):
            # The tier is full of what stands as near to the front.
            self._tier_was_full = True
            self._num_walked = num_ahead + 1
        for place, storable in enumerate(chosen.values(), self._num_held):
            block_id = storable.device_blocks[0].block_id
            held[block_id] = place
            self._num_tries[block_id] = self._num_tries.get(block_id, 0) + 1
        self._num_held += len(chosen)
