"""FreeQueueScan: stores blocks at the front of the device's free queue before the device evicts
them."""

from collections.abc import Collection, Container, Sequence
from itertools import islice

from vllm.config import VllmConfig
from vllm.utils.math_utils import cdiv
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, KVCacheBlock

from simple_offload.scheduler.policy.residency import Residency
from simple_offload.scheduler.tier import block_pool
from simple_offload.scheduler.tier.cpu_tier import CpuTier
from simple_offload.scheduler.tier.eviction_order import DUPLICATES_SHARE


def num_running_blocks(vllm_config: VllmConfig, num_groups: int) -> int:
    """Device blocks for running requests to compute one token each, at most."""
    config = vllm_config.scheduler_config
    return num_groups * min(config.max_num_seqs, config.max_num_batched_tokens)


class FreeQueueScan:
    """Goes along the free queue from where it stopped, until enough blocks before it are safe to
    evict. Blocks that only the device has are pinned while they are stored, and return to their
    place: the device evicts the blocks before them first."""

    def __init__(
        self,
        tier: CpuTier,
        residency: Residency,
        device_pool: BlockPool,
        vllm_config: VllmConfig,
        block_sizes: Sequence[int],
    ) -> None:
        """``block_sizes``: of the device, in tokens, by KV cache group."""
        self._tier = tier
        self._residency = residency
        self._device_pool = device_pool
        num_tokens = vllm_config.scheduler_config.max_num_batched_tokens
        num_running = num_running_blocks(vllm_config, len(block_sizes))
        self._per_step = sum(cdiv(num_tokens, size) for size in block_sizes) + num_running
        """Upper limit of the blocks to schedule one step, but for those that a load fills."""
        # A store starts at its step's end. Its end is reported a step later at the earliest.
        num_steps = vllm_config.max_concurrent_batches + 2
        self._peak_demand = min(num_steps * self._per_step, len(device_pool.blocks) // 4)
        """Upper limit of the blocks to schedule, without loads, until a store that is planned now
        has ended."""
        self._reserve = min(num_running, self._peak_demand)
        """Free blocks that are not pinned, for running requests."""
        self._cursor: KVCacheBlock | None = None
        """The last block that was passed and left in the queue; None: start at the front."""
        self._passed = residency.safe
        """Ids of the blocks before the cursor, and of pinned blocks from there. They are safe
        because the tier has, or gets, their contents, or there are none."""
        self._pinned: set[int] = set()
        """Ids of blocks pinned from the queue."""
        self._return_behind: KVCacheBlock | None = None
        """The block before those that were last pinned. They return behind it, or to the front if
        it has left the queue."""
        self._withheld: list[KVCacheBlock] = []
        """Blocks taken out of the queue's front since the last step, which stores them."""
        self._from_front: set[int] = set()
        """Ids of withheld blocks that are pinned. They return to the front."""
        self._tier_is_full = False
        """Whether the last scan found no room in the tier."""
        self.is_behind = False
        """Whether the scan would go on in a further step, though nothing else happens."""

    @property
    def min_ahead(self) -> int:
        """Target number of safe blocks."""
        return min(self._peak_demand, int(DUPLICATES_SHARE * self._tier.max_contents))

    @property
    def num_short(self) -> int:
        """Blocks that the free queue is short of ``min_ahead``. As many blocks of running requests
        should be safe: the queue may give them to others before a scan meets them."""
        return max(0, self.min_ahead - self._device_pool.get_num_free_blocks())

    @property
    def num_safe(self) -> int:
        """Blocks at the front of the queue that are known to be safe."""
        if self._residency.are_stored:
            return self._device_pool.get_num_free_blocks()
        return len(self._passed) - len(self._pinned)  # pinned ones will return

    @property
    def drop_reason(self) -> str:
        """Why contents are lost that the device overwrites now, for the meter."""
        is_small = self.min_ahead < self._peak_demand
        return "tier_full" if self._tier_is_full or is_small else "too_late"

    def withhold(self, num_blocks: int, hits: Container[BlockHashWithGroupId | None]) -> int:
        """Take blocks that only the device has out of the queue, until its first ``num_blocks``
        without those of ``hits`` are safe, or only the reserve is left. ``on_step`` stores them.
        Returns how many it took."""
        room = self._device_pool.get_num_free_blocks() - self._reserve
        queue = block_pool.free_blocks_after(self._device_pool, None)
        unsafe: list[KVCacheBlock] = []
        num_lacking = num_blocks
        while num_lacking > 0 and (blocks := list(islice(queue, num_lacking))):
            others = [block for block in blocks if block.block_hash not in hits]
            unknown = [block for block in others if block.block_id not in self._passed]
            chosen = list(self._residency.choose(unknown).values())[: max(0, room - len(unsafe))]
            unsafe += chosen
            num_lacking = len(chosen) + len(blocks) - len(others)
        block_pool.touch(self._device_pool, unsafe)
        self._withheld += unsafe
        return len(unsafe)

    def on_used(self, block_ids: Collection[int]) -> None:
        """Requests have got these blocks, which have left the queue."""
        for known in (self._passed, self._pinned, self._from_front):
            if known:
                known.difference_update(block_ids)
        if self._return_behind is not None and self._return_behind.ref_cnt > 0:
            self._return_behind = None

    def free_blocks(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Drop a reference to each block, last block first, as vLLM frees a request's. Blocks
        pinned from the queue return to their place in it."""
        pinned = self._pinned
        if pinned and not pinned.isdisjoint([block.block_id for block in blocks]):
            self._return([b for b in reversed(blocks) if b.block_id in pinned and b.ref_cnt == 1])
            pinned.difference_update([block.block_id for block in blocks])
            blocks = [block for block in blocks if block.ref_cnt > 0]
        block_pool.free_blocks(self._device_pool, reversed(blocks))

    def on_step(self, may_store_early: bool) -> None:
        """A step has got its blocks: go on until ``min_ahead`` blocks are safe.
        ``may_store_early``: go on while the tier has empty blocks, in small parts, while no store
        from the queue is in flight."""
        self._store_withheld()
        if self._residency.are_stored:
            self.is_behind = False
            return
        if self._tier_is_full or (
            # The cursor has been used. It may be free again, in another place.
            self._cursor is not None and self._cursor.block_id not in self._passed
        ):
            self._start_over()
        min_ahead = self.min_ahead
        self._pass_newcomers(min_ahead)
        self._go_on(min_ahead)
        # Goes on when the stores in flight have ended.
        self.is_behind = may_store_early and bool(self._pinned) and not self._tier_is_full
        if may_store_early and not self._pinned and not self._tier_is_full:
            num_passed = len(self._passed)
            self._go_on(self.num_safe + min(self._tier.num_empty, self._per_step))
            self.is_behind = len(self._passed) > num_passed and not self._is_at_end()

    # Details

    def _store_withheld(self) -> None:
        """Put the withheld blocks back to the queue's front, and store them from there."""
        withheld, self._withheld = self._withheld, []
        if not withheld:
            return
        used = [block for block in withheld if block.ref_cnt > 1]  # a request has hit them
        free = [block for block in withheld if block.ref_cnt == 1]
        block_pool.return_blocks(self._device_pool, free, None)
        block_pool.free_blocks(self._device_pool, used)
        if chosen := self._residency.choose(withheld):
            before = self._pinned.copy()
            self._store(chosen)
            self._from_front |= self._pinned - before

    def _return(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Free passed blocks that were pinned from the queue."""
        if self._from_front:
            front = [block for block in blocks if block.block_id in self._from_front]
            block_pool.return_blocks(self._device_pool, front, None)
            self._from_front.difference_update([block.block_id for block in front])
            blocks = [block for block in blocks if block.ref_cnt > 0]
        behind = self._return_behind
        if behind is not None and behind.ref_cnt > 0:
            behind = None
        block_pool.return_blocks(self._device_pool, blocks, behind)
        if not blocks:
            return
        self._return_behind = blocks[-1]
        if behind is not None and behind.block_id not in self._passed:
            # The scan has started over, and has not come so far again.
            self._passed.difference_update([block.block_id for block in blocks])
        elif self._cursor is behind:
            self._cursor = blocks[-1]

    def _start_over(self) -> None:
        self._cursor = None
        self._passed.intersection_update(self._pinned)

    def _pass_newcomers(self, most: int) -> None:
        """Pass the empty blocks that vLLM has put before all others. Start over if there are more
        than ``most``, or others from an unknown place."""
        if self._cursor is None:
            return
        for block in block_pool.free_blocks_after(self._device_pool, None, most + 1):
            if block.block_id in self._passed or block is self._cursor:
                return
            if block.block_hash is not None:
                break
            self._passed.add(block.block_id)
        self._start_over()

    def _is_at_end(self) -> bool:
        return next(block_pool.free_blocks_after(self._device_pool, self._cursor), None) is None

    def _go_on(self, num_ahead: int) -> None:
        """Go on until ``num_ahead`` blocks are safe, or will be when their stores end; or as far as
        there is room to store blocks that only the device has."""
        self._tier_is_full = False
        num_lacking = num_ahead - self.num_safe
        if num_lacking <= 0:
            return
        blocks = list(block_pool.free_blocks_after(self._device_pool, self._cursor, num_lacking))
        chosen = self._residency.choose(blocks)
        num_host_blocks = self._tier.num_free
        room = self._device_pool.get_num_free_blocks() - self._reserve
        room = max(0, min(room, num_ahead - len(self._pinned)))
        if len(chosen) > min(room, num_host_blocks):
            self._tier_is_full = num_host_blocks <= room
            beyond = list(chosen)[min(room, num_host_blocks) :]
            stop = next(i for i, block in enumerate(blocks) if block is chosen[beyond[0]])
            blocks = blocks[:stop]
            for key in beyond:
                del chosen[key]
        self._passed.update([block.block_id for block in blocks])
        if chosen:
            self._store(chosen)
            pinned = next((i for i, block in enumerate(blocks) if block.ref_cnt > 0), None)
            if pinned is not None:
                self._return_behind = blocks[pinned - 1] if pinned else self._cursor
        # The last one that stays in the queue.
        self._cursor = next((b for b in reversed(blocks) if b.ref_cnt == 0), self._cursor)

    def _store(self, chosen: dict[BlockHashWithGroupId, KVCacheBlock]) -> None:
        """Plan stores of ``chosen``, passed and pinned until they have ended."""
        stored = self._residency.plan(chosen)
        if len(stored) < len(chosen):
            # The tier is full of contents as close to eviction. The first of these stay unsafe.
            self._tier_is_full = True
            unsafe = list(chosen.values())[: len(chosen) - len(stored)]
            self._passed.difference_update([block.block_id for block in unsafe])
        ids = [block.block_id for block in stored if block.ref_cnt == 1]  # from the queue
        self._passed.update(ids)
        self._pinned.update(ids)
