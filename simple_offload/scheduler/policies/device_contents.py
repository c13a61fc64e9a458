"""What the device's blocks hold, and which of them a step gives to requests."""

from collections.abc import Container, Iterable, Sequence
from typing import TYPE_CHECKING, cast

from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, KVCacheBlock

from simple_offload import metrics
from simple_offload.scheduler.policies.admission import Admission
from simple_offload.scheduler.stores import Storable, Stores
from simple_offload.scheduler.tier.run import Run

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput


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
        nothing: list[BlockHashWithGroupId | None] = [None] * len(device_pool.blocks)
        self._keys = nothing.copy()
        """By block id, what the block has been filled with, as far as it has been recorded."""
        self._parents = nothing
        """By block id, the key of what that follows."""
        self._uncounted: set[int] = set()
        """Ids of those of which it has not been counted what becomes of what they hold."""

    def take(self, blocks: Iterable[KVCacheBlock], reason: str) -> list[int]:
        """Requests have been given ``blocks``. Returns the ids of those that do not hold what
        they did. That is counted, unless it is kept: as lost for ``reason``."""
        keys = self._keys
        filled_anew = [
            block.block_id
            for block in blocks
            if (key := block._block_hash) is None or keys[block.block_id] != key
        ]
        if lost := self._uncounted.intersection(filled_anew):
            self._uncounted -= lost
            self._count_lost([key for i in lost if (key := keys[i]) is not None], reason)
        for block_id in filled_anew:
            keys[block_id] = None
        return filled_anew

    def record(
        self,
        blocks: Iterable[KVCacheBlock],
        keys: Iterable[BlockHashWithGroupId],
        parent: BlockHashWithGroupId | None,
    ) -> None:
        """``blocks`` have been filled with what ``keys`` stand for, each the parent of the next;
        those aside that vLLM has not made findable by it."""
        known, parents = self._keys, self._parents
        recorded: list[int] = []
        for block, key in zip(blocks, keys, strict=False):
            block_id = block.block_id
            if block._block_hash == key and known[block_id] != key:
                known[block_id] = key
                parents[block_id] = parent
                recorded.append(block_id)
            parent = key
        self._uncounted.update(recorded)

    def storable(self, block: KVCacheBlock) -> Storable | None:
        """The block as what it is to be stored as; None if it is not, or is there already."""
        key = block.block_hash
        if key is None or self.stores.has(key) or not self.admission.admits(key):
            return None
        num_tokens = block.block_hash_num_tokens
        if self._keys[block.block_id] != key or num_tokens is None:
            return None
        return Storable((block,), key, self._parents[block.block_id], num_tokens, early=True)

    def parent_of(self, block: KVCacheBlock) -> BlockHashWithGroupId | None:
        """The key of what the block's content follows, as far as that has been recorded."""
        block_id = block.block_id
        return self._parents[block_id] if self._keys[block_id] is block._block_hash else None

    def holders(self, key: object) -> Iterable[int]:
        """Ids of the device blocks that hold ``key`` and can be found by it."""
        found = self._cached._cache.get(cast(BlockHashWithGroupId, key))
        if isinstance(found, dict):  # several
            return found.keys()
        return () if found is None else (found.block_id,)

    def plan(
        self, blocks: Sequence[Storable], keep: Container[BlockHashWithGroupId]
    ) -> list[Storable]:
        """Plan stores of ``blocks``, children before parents, as far as the tier has room without
        evicting what ``keep`` has. Those that it has no room for, which may yet be evicted
        unstored, are returned."""
        left: list[Storable] = []
        for chain in _chains(blocks):
            count = self._plan_run(chain, keep)
            self.settle([block.device_blocks[0].block_id for block in chain[:count]])
            left += chain[count:]
        return left

    def _plan_run(self, chain: Sequence[Storable], keep: Container[BlockHashWithGroupId]) -> int:
        head = chain[0]
        run = Run(
            [block.device_blocks[0] for block in chain],
            [block.key for block in chain],
            head.parent,
            head.num_tokens,
            size=chain[-1].num_tokens - chain[-2].num_tokens if len(chain) > 1 else 0,
            early=head.early,
        )
        return self.stores.plan_run(run, lambda: keep, self._device_pool)

    def settle(self, block_ids: Iterable[int]) -> int:
        """What these blocks hold needs no more counting. How many did."""
        before = len(self._uncounted)
        self._uncounted.difference_update(block_ids)
        return before - len(self._uncounted)

    def forget(self) -> None:
        """Nothing is to be stored of what the blocks hold now, nor counted."""
        self._keys = [None] * len(self._keys)
        self._parents = [None] * len(self._parents)
        self._uncounted.clear()

    def _count_lost(self, keys: Iterable[BlockHashWithGroupId], reason: str) -> None:
        """Count as lost what the device had by ``keys``, unless it is kept."""
        num_refused = num_lost = 0
        for key in keys:
            if self.stores.has(key) or self._cached.get_one_block(key) is not None:
                continue  # or another block of the device has it too
            if self.admission.admits(key):
                num_lost += 1
            else:
                num_refused += 1
        meter = self.stores.tier.meter
        meter.add(metrics.SKIPPED, num_refused, "below_threshold")
        meter.add(metrics.DROPPED, num_lost, reason)


def _chains(blocks: Iterable[Storable]) -> list[list[Storable]]:
    """``blocks``, children before parents, as chains whose blocks follow each other."""
    chains: list[list[Storable]] = []
    size = 0
    for block in blocks:
        child = chains[-1][-1] if chains else None
        distance = child.num_tokens - block.num_tokens if child is not None else 0
        if (
            child is not None
            and child.parent == block.key
            and (len(chains[-1]) == 1 or distance == size)
        ):
            chains[-1].append(block)
            size = distance
        else:
            chains.append([block])
    for chain in chains:
        chain.reverse()
    return chains


class GivenOut:
    """vLLM says which blocks a step adds to the tables of requests that run. Those of requests
    that wait for a load, or have waited, are found in their tables."""

    def __init__(self, kv_cache_manager: "KVCacheManager") -> None:
        self._managers = kv_cache_manager.coordinator.single_type_managers
        self._blocks = kv_cache_manager.block_pool.blocks
        self._starting: dict[str, list[int]] = {}
        """By request that has not run since it got blocks: how many of its table in each group
        have been seen."""

    def follow(self, request_id: str) -> None:
        """The request has got its first blocks in the step that is being scheduled."""
        self._starting[request_id] = [0] * len(self._managers)

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self._starting.pop(request_id, None)

    def clear(self) -> None:
        """All requests are to be forgotten."""
        self._starting.clear()

    def has_run(self, request_id: str) -> bool:
        """Whether a step with the request has been scheduled since it was followed."""
        return request_id not in self._starting

    def step(self, scheduled: "SchedulerOutput") -> list[KVCacheBlock]:
        """The blocks that the step has put into tables, new ones and those that a request has
        found. Null blocks are none of them."""
        given: list[KVCacheBlock] = []
        for request_id, num_seen in self._starting.items():
            for group, manager in enumerate(self._managers):
                table = manager.req_to_blocks.get(request_id, ())
                given += table[num_seen[group] :]
                num_seen[group] = len(table)
        running, blocks = scheduled.scheduled_cached_reqs, self._blocks
        for request_id, block_ids in zip(running.req_ids, running.new_block_ids, strict=True):
            if block_ids is not None and request_id not in self._starting:
                given += [blocks[block_id] for of_group in block_ids for block_id in of_group]
        for request_id in self._starting.keys() & scheduled.num_scheduled_tokens.keys():
            del self._starting[request_id]
        return [block for block in given if not block.is_null]
