"""DeviceContents: the contents of the device's blocks, and the blocks that a step allocates."""

from collections.abc import Container, Iterable, Sequence
from typing import TYPE_CHECKING

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, KVCacheBlock

from simple_offload import metrics
from simple_offload.scheduler.event_payload import payloads_of_device_block
from simple_offload.scheduler.policies.admission import Admission
from simple_offload.scheduler.stores import Stores
from simple_offload.scheduler.tier import block_pool
from simple_offload.scheduler.tier.groups import Groups
from simple_offload.scheduler.tier.run import PayloadsByKey, Run

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


class DeviceContents:
    """A free block has its key, but not its parent's. That is recorded while the block is in a
    block table: one entry for each device block. For KV events, so are its payloads: the block may
    outlive its request.

    Contents are counted once: as stored (by ``Stores``), skipped or dropped.
    """

    def __init__(
        self,
        groups: Groups,
        stores: Stores,
        admission: Admission,
        device_pool: BlockPool,
        meter: metrics.Meter,
        wants_events: bool = False,
    ) -> None:
        self._groups = groups
        self._stores = stores
        self._admission = admission
        self._device_pool = device_pool
        self._meter = meter
        self._wants_events = wants_events
        nothing: list[BlockHashWithGroupId | None] = [None] * len(device_pool.blocks)
        self._keys = nothing.copy()
        """By block id, the recorded key of its contents."""
        self._parents = nothing
        """By block id, the parent's key."""
        self._payloads: dict[int, PayloadsByKey] = {}
        """By block id, if KV events are wanted."""
        self._uncounted: set[int] = set()
        """Blocks whose contents are not yet counted as stored, skipped or dropped."""

    def on_allocated(self, blocks: Sequence[KVCacheBlock], reason: str) -> list[int]:
        """Requests have got ``blocks``. Returns the ids of those that have lost their contents,
        and counts these as dropped for ``reason`` if they are not in the tier."""
        keys = self._keys
        filled_anew = [
            block.block_id
            for block, key in zip(blocks, block_pool.keys_of(blocks), strict=True)
            if key is None or keys[block.block_id] != key
        ]
        if lost := self._uncounted.intersection(filled_anew):
            self._uncounted -= lost
            self._count_dropped([key for i in lost if (key := keys[i]) is not None], reason)
        for block_id in filled_anew:
            keys[block_id] = None
        if self._payloads:
            for block_id in filled_anew:
                self._payloads.pop(block_id, None)
        return filled_anew

    def record(
        self,
        blocks: Sequence[KVCacheBlock],
        keys: Sequence[BlockHashWithGroupId],
        parent: BlockHashWithGroupId | None,
        request: "Request",
    ) -> None:
        """Record the contents of ``blocks`` of ``request``, each the parent of the next, as
        ``keys``. Blocks that vLLM does not find by their key are left out."""
        known, parents = self._keys, self._parents
        recorded: list[int] = []
        for block, found_by, key in zip(blocks, block_pool.keys_of(blocks), keys, strict=False):
            block_id = block.block_id
            if found_by == key and known[block_id] != key:
                known[block_id] = key
                parents[block_id] = parent
                recorded.append(block_id)
                if self._wants_events:
                    self._payloads[block_id] = self._payloads_of(block, key, request)
            parent = key
        self._uncounted.update(recorded)

    def is_storable(self, block: KVCacheBlock) -> bool:
        """Whether the block has contents to be stored, which the tier does not have or get."""
        key = block.block_hash
        return (
            key is not None
            and not self._stores.has(key)
            and self._admission.admits(key)
            and self._keys[block.block_id] == key
            and block.block_hash_num_tokens is not None
        )

    def parent_of(
        self, block: KVCacheBlock, key: BlockHashWithGroupId
    ) -> BlockHashWithGroupId | None:
        """The key of the parent of a block with ``key``, if it has been recorded."""
        block_id = block.block_id
        return self._parents[block_id] if self._keys[block_id] is key else None

    def holders(self, key: BlockHashWithGroupId) -> Iterable[int]:
        """Ids of the device blocks that are found by ``key``."""
        found = block_pool.cached(self._device_pool).get(key)
        if isinstance(found, dict):  # several
            return found.keys()
        return () if found is None else (found.block_id,)

    def plan(
        self, blocks: Sequence[KVCacheBlock], keep: Container[BlockHashWithGroupId]
    ) -> list[KVCacheBlock]:
        """Plan stores of ``blocks``, storable and children before parents, as far as the tier has
        room without evicting a block with a key in ``keep``. Returns those without room, which
        may yet be evicted unstored."""
        left: list[KVCacheBlock] = []
        for chain in self._chains(blocks):
            count = self._stores.plan(self._run(chain), lambda: keep, self._device_pool)
            self.settle([block.block_id for block in chain[:count]])
            left += chain[count:]
        return left

    def settle(self, block_ids: Iterable[int]) -> int:
        """Count the contents of these blocks no more. Returns how many were uncounted."""
        before = len(self._uncounted)
        self._uncounted.difference_update(block_ids)
        return before - len(self._uncounted)

    def clear(self) -> None:
        """Neither store nor count the contents of now."""
        self._keys = [None] * len(self._keys)
        self._parents = [None] * len(self._parents)
        self._payloads.clear()
        self._uncounted.clear()

    def _chains(self, blocks: Iterable[KVCacheBlock]) -> list[list[KVCacheBlock]]:
        """``blocks``, children before parents, as chains of equally large blocks, parents
        first."""
        chains: list[list[KVCacheBlock]] = []
        size = 0
        for block in blocks:
            child = chains[-1][-1] if chains else None
            if child is not None and self._parents[child.block_id] == block.block_hash:
                distance = _num_tokens(child) - _num_tokens(block)
                if len(chains[-1]) == 1 or distance == size:
                    chains[-1].append(block)
                    size = distance
                    continue
            chains.append([block])
        for chain in chains:
            chain.reverse()
        return chains

    def _run(self, chain: Sequence[KVCacheBlock]) -> Run:
        head = chain[0]
        ids = [block.block_id for block in chain]
        keys = [key for key in block_pool.keys_of(chain) if key is not None]
        return Run(
            chain,
            keys,
            self._parents[head.block_id],
            _num_tokens(head),
            size=_num_tokens(chain[-1]) - _num_tokens(chain[-2]) if len(chain) > 1 else 0,
            early=True,
            payloads=[self._payloads.get(i, {}) for i in ids] if self._wants_events else (),
        )

    def _payloads_of(
        self, block: KVCacheBlock, key: BlockHashWithGroupId, request: "Request"
    ) -> PayloadsByKey:
        if (num_tokens := block.block_hash_num_tokens) is None:
            return {}
        inner_keys = self._device_pool.cached_block_hashes_by_block.get(block.block_id, ())
        return payloads_of_device_block(self._groups, key, inner_keys, num_tokens, request)

    def _count_dropped(self, keys: Iterable[BlockHashWithGroupId], reason: str) -> None:
        """Count contents that the device has lost, unless the tier or another block has them."""
        num_refused = num_dropped = 0
        cached = block_pool.cached(self._device_pool)
        for key in keys:
            if self._stores.has(key) or key in cached:
                continue
            if self._admission.admits(key):
                num_dropped += 1
            else:
                num_refused += 1
        self._meter.add(metrics.SKIPPED, num_refused, "below_threshold")
        self._meter.add(metrics.DROPPED, num_dropped, reason)


def _num_tokens(block: KVCacheBlock) -> int:
    """Tokens of the prefix that ends with the block, which is storable."""
    return block.block_hash_num_tokens or 0


class NewlyAllocated:
    """Finds the blocks that each step adds to block tables. vLLM's output names those of running
    requests. Those of requests that wait for a load, or did, are found in their tables."""

    def __init__(self, kv_cache_manager: "KVCacheManager") -> None:
        self._managers = kv_cache_manager.coordinator.single_type_managers
        self._blocks = kv_cache_manager.block_pool.blocks
        self._starting: dict[str, list[int]] = {}
        """By request that has not run since it got blocks: entries of its table in each group that
        have been seen."""

    def on_allocated(self, request_id: str) -> None:
        """The request has got its first blocks in the step that is being scheduled."""
        self._starting[request_id] = [0] * len(self._managers)

    def on_request_finished(self, request_id: str) -> None:
        """The request has ended."""
        self._starting.pop(request_id, None)

    def clear(self) -> None:
        """Forget all requests."""
        self._starting.clear()

    def has_run(self, request_id: str) -> bool:
        """Whether a step with the request has been scheduled since it got its first blocks."""
        return request_id not in self._starting

    def on_step(self, scheduled: "SchedulerOutput") -> list[KVCacheBlock]:
        """A step has been scheduled. Returns the blocks that it has added to tables, newly filled
        or found; without null blocks."""
        added: list[KVCacheBlock] = []
        for request_id, num_seen in self._starting.items():
            for group, manager in enumerate(self._managers):
                table = manager.req_to_blocks.get(request_id, ())
                added += table[num_seen[group] :]
                num_seen[group] = len(table)
        running, blocks = scheduled.scheduled_cached_reqs, self._blocks
        for request_id, block_ids in zip(running.req_ids, running.new_block_ids, strict=True):
            if block_ids is not None and request_id not in self._starting:
                added += [blocks[block_id] for of_group in block_ids for block_id in of_group]
        for request_id in self._starting.keys() & scheduled.num_scheduled_tokens.keys():
            del self._starting[request_id]
        return [block for block in added if not block.is_null]
