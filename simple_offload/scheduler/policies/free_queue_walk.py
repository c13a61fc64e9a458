"""QueueWalk: along the device's free queue, to store blocks before the device evicts them."""

from collections import deque
from collections.abc import Collection, Container, Sequence, Set
from typing import TYPE_CHECKING, NamedTuple

from vllm.utils.math_utils import cdiv
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, KVCacheBlock

from simple_offload import metrics
from simple_offload.scheduler.policies.device_contents import Residents
from simple_offload.scheduler.stores import Storable, Stores
from simple_offload.scheduler.tier.cpu_tier import CpuTier

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class StepLimits(NamedTuple):
    """How many device blocks may be needed how soon, at most."""

    per_step: int
    """To schedule one step, those aside that a load fills."""

    num_steps: int
    """From the step that plans a store to the first that may have its blocks."""

    longest: int
    """To load the longest request."""

    reserve: int
    """For running requests to go on, a token each."""

    @classmethod
    def of(cls, vllm_config: "VllmConfig", block_sizes: Sequence[int]) -> "StepLimits":
        """``block_sizes``: in tokens, by KV cache group."""
        scheduler_config = vllm_config.scheduler_config
        num_tokens = scheduler_config.max_num_batched_tokens
        num_requests = min(scheduler_config.max_num_seqs, num_tokens)
        return cls(
            per_step=sum(cdiv(num_tokens, size) + num_requests for size in block_sizes),
            # A store starts with its step's end, and is heard of a step later at the earliest.
            num_steps=vllm_config.max_concurrent_batches + 2,
            longest=sum(cdiv(vllm_config.model_config.max_model_len, size) for size in block_sizes),
            reserve=num_requests * len(block_sizes),
        )


class Lookahead:
    """Blocks stored too late are lost. Blocks stored too early are in both caches, and the tier
    has room for as many fewer (Wong and Wilkes, "My cache or yours?", 2002).

    So it is the most that may be needed until what is stored now has been released, where that
    is a small part of the device, or as long as the tier has room to spare. Otherwise it is the
    most that was needed lately.
    """

    def __init__(self, limits: StepLimits, num_device_blocks: int) -> None:
        self._most = limits.num_steps * limits.per_step + min(
            limits.longest, num_device_blocks // 4
        )
        is_small = 3 * self._most <= num_device_blocks
        self._least = self._most if is_small else num_device_blocks // 16
        self._horizon = num_device_blocks
        """Blocks that are taken until a need is forgotten; after twice as many at the latest."""
        self._taken: deque[int] = deque([0], limits.num_steps)
        """In each of the last steps; the last is the one that is being scheduled."""
        self._peak = self._peak_before = 0
        """The most in as many steps: since the horizon was last reached, and before that, since
        the time before."""
        self._num_taken = 0
        """Since the horizon was last reached."""

    def num_blocks(self, num_empty: int) -> int:
        """How many blocks at the front of the free queue should hold nothing that only the
        device has, while ``num_empty`` host blocks hold nothing."""
        return max(self._least, self._peak, self._peak_before, min(self._most, num_empty // 4))

    def take(self, count: int) -> None:
        """So many blocks have been taken to be filled."""
        self._taken[-1] += count

    def end_step(self) -> None:
        """A step has been scheduled."""
        self._peak = max(self._peak, sum(self._taken))
        self._num_taken += self._taken[-1]
        self._taken.append(0)
        if self._num_taken >= self._horizon:
            self._num_taken = 0
            self._peak, self._peak_before = sum(self._taken), self._peak


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
        self._num_lost = 0
        """Blocks that the tier had lost by then."""
        self._num_held = 0
        """Blocks that have ever been held from the queue."""
        self._num_tries: dict[int, int] = {}
        """By id of a device block, how often what it holds was to be stored from the queue."""
        self._num_failed = 0
        """Stores that had failed when the walk was last taken up."""
        self._tier_is_full = False
        """Whether the last walk has stopped because every host block is held."""
        self._num_left = 0
        """Blocks that the last walk has found no room for in the tier, which was full of what
        stands as near to the front."""

    @property
    def num_ahead(self) -> int:
        """How many blocks at the front of the queue are to be safe to evict."""
        # At least as many hold nothing: some that hold something may be pinned.
        num_empty = self.tier.pool.get_num_free_blocks() - self.tier.num_used
        return self._lookahead.num_blocks(num_empty)

    @property
    def drop_reason(self) -> str:
        """Why a block is lost that is filled anew now, for the meter."""
        return "tier_full" if self._tier_is_full or self._num_left else "too_late"

    def take(self, taken: Collection[int], filled_anew: Collection[int]) -> None:
        """Requests have been given the blocks with the ids ``taken``, which have left the queue;
        ``filled_anew`` are those of them that do not hold any more what they did there."""
        self._passed.difference_update(taken)
        for block_id in self.stores.first_to_go.keys() & taken:
            del self.stores.first_to_go[block_id]
        for block_id in self._num_tries.keys() & filled_anew:
            del self._num_tries[block_id]
        self._lookahead.take(len(filled_anew))

    def go_on(self) -> None:
        """The blocks of a step have been given out: go on along the queue, and store what only the
        device has."""
        self._lookahead.end_step()
        num_ahead = self.num_ahead
        lost_place = self._cursor is not None and self._cursor.ref_cnt > 0
        # What could not be copied has come back to the front.
        has_failed = self.stores.num_failed > self._num_failed
        self._num_failed = self.stores.num_failed
        # Others may have displaced in the tier what has been passed.
        is_old = self._num_walked > 2 * num_ahead and self.tier.num_lost > self._num_lost
        if lost_place or has_failed or self._num_left or is_old:
            self._start_over()
        self._meet_newcomers()
        self._walk_on(num_ahead)
        # Every free block has been passed, but not so many are known: some left unnoticed.
        num_free = self._device_pool.get_num_free_blocks()
        if self._num_safe < min(num_ahead, num_free) and self._at_end():
            self._start_over()

    def _start_over(self) -> None:
        self._cursor = None
        self._num_walked = 0
        self._num_lost = self.tier.num_lost
        self._passed = set(self.stores.first_to_go)

    def _meet_newcomers(self) -> None:
        """vLLM puts blocks that hold nothing before all others: those have been passed too."""
        if self._cursor is not None:
            for block in self._device_pool.free_block_queue.iter_blocks_after(None):
                if block.block_id in self._passed or block is self._cursor:
                    return
                if block._block_hash is not None:  # nobody knows where it comes from
                    self._start_over()
                    return
                self._passed.add(block.block_id)

    def _at_end(self) -> bool:
        queue = self._device_pool.free_block_queue
        return next(queue.iter_blocks_after(self._cursor), None) is None

    @property
    def _num_safe(self) -> int:
        """Blocks of the queue that have been passed; those that are held will come back."""
        return len(self._passed) - len(self.stores.first_to_go)

    def _walk_on(self, num_ahead: int) -> None:
        chosen = self._pass(num_ahead)
        # The tier may be full of what stands as near to the front.
        front = _FrontKeys(self._residents, self._passed)
        left = self._residents.plan(list(chosen.values()), front)
        self._num_left = len(left)
        for storable in left:
            del chosen[storable.key]
            self._passed.discard(storable.device_blocks[0].block_id)
        for place, storable in enumerate(chosen.values(), self._num_held):
            block_id = storable.device_blocks[0].block_id
            self.stores.first_to_go[block_id] = place
            self._num_tries[block_id] = self._num_tries.get(block_id, 0) + 1
        self._num_held += len(chosen)

    def _pass(self, num_ahead: int) -> dict[BlockHashWithGroupId, Storable]:
        """Go on until ``num_ahead`` blocks are safe, or as far as there is room to store what is
        not: that is returned, in the order of the queue."""
        pool, tier_pool = self._device_pool, self.tier.pool
        num_host_blocks = tier_pool.get_num_free_blocks()
        room = min(
            pool.get_num_free_blocks() - self.limits.reserve,
            num_ahead - len(self.stores.first_to_go),
            num_host_blocks,
        )
        num_lacking = num_ahead - self._num_safe
        in_tier = tier_pool.cached_block_hash_to_block._cache
        # What precedes a block of a chain is there too, unless some have come before their parents.
        is_whole = self.tier.groups.all_chained and not self.tier.order.early
        parent: BlockHashWithGroupId | None = None
        chosen: dict[BlockHashWithGroupId, Storable] = {}
        skipped: list[KVCacheBlock] = []
        others: list[KVCacheBlock] = []
        self._tier_is_full = False
        for block in pool.free_block_queue.iter_blocks_after(self._cursor):
            if num_lacking <= 0:
                break
            key = block._block_hash
            if key is None:
                others.append(block)
            elif key is parent or key in in_tier:
                skipped.append(block)
                parent = self._residents.parent_of(block) if is_whole else None
            elif self.stores.has(key):  # on its way, and what precedes it perhaps not
                skipped.append(block)
            elif key in chosen or (storable := self._storable(block)) is None:
                others.append(block)
            elif len(chosen) < room:
                chosen[key] = storable
                continue
            else:
                self._tier_is_full = len(chosen) >= num_host_blocks
                break
            num_lacking -= 1
            self._cursor = block
        self._skip(skipped)
        ids = [block.block_id for block in others]
        ids += [storable.device_blocks[0].block_id for storable in chosen.values()]
        self._passed.update(ids)
        self._num_walked += len(skipped) + len(ids)
        return chosen

    def _skip(self, blocks: list[KVCacheBlock]) -> None:
        """Pass blocks whose contents the tier has."""
        if self.tier.order.demoted:
            for block in blocks:
                if (key := block._block_hash) is not None:
                    self.tier.promote(key)
        ids = [block.block_id for block in blocks]
        self._passed.update(ids)
        for block_id in self._num_tries.keys() & ids:
            del self._num_tries[block_id]
        self.tier.meter.add(metrics.SKIPPED, self._residents.settle(ids), "already_stored")

    def _storable(self, block: KVCacheBlock) -> Storable | None:
        """The block as what it is to be stored as; None if it is not, or copies have failed too
        often."""
        storable = self._residents.storable(block)
        if self._num_tries.get(block.block_id, 0) >= _MAX_TRIES:
            return None
        return storable
