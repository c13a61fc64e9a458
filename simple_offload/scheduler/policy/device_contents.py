"""DeviceContents: what the device's blocks hold."""

from collections.abc import Collection, Container, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, KVCacheBlock

from simple_offload import metrics
from simple_offload.scheduler.event_payload import payloads_of_host_block
from simple_offload.scheduler.policy.admission import Admission
from simple_offload.scheduler.stores import Stores
from simple_offload.scheduler.tier import block_pool
from simple_offload.scheduler.tier.cpu_tier import CpuTier
from simple_offload.scheduler.tier.groups import Groups
from simple_offload.scheduler.tier.run import PayloadsByKey, Run

if TYPE_CHECKING:
    from vllm.v1.request import Request


class _HostBlock(NamedTuple):
    """Device blocks that together have the contents of one host block."""

    keys: Sequence[BlockHashWithGroupId]
    """By sub-block; the last one is the key of the host block."""
    blocks: tuple[KVCacheBlock, ...]


class DeviceContents:
    """Contents are recorded when a request has computed or loaded them, and stay until the device
    lets go of them: it allocates the block anew. The tier hears of both, since it need not keep
    what the device has. So a block of the free queue is stored only if its contents are known.
    """

    def __init__(
        self,
        tier: CpuTier,
        groups: Groups,
        stores: Stores,
        admission: Admission,
        device_pool: BlockPool,
        meter: metrics.Meter,
        wants_events: bool,
    ) -> None:
        self._tier = tier
        self._groups = groups
        self._stores = stores
        self._admission = admission
        self._device_pool = device_pool
        self._meter = meter
        self._wants_events = wants_events
        self._keys: list[BlockHashWithGroupId | None] = [None] * len(device_pool.blocks)
        """By block id, the recorded key of its contents."""
        self._unstored: set[int] = set()
        """Ids of the blocks with contents that the tier may lack; it has, or gets, all others."""
        self._cached = block_pool.cached(device_pool)
        """The device's prefix cache, by key."""
        self._found: set[int] = set()
        """Ids of blocks with contents that a request has found, in either cache."""
        self._host_blocks: dict[int, dict[BlockHashWithGroupId, _HostBlock]] = {}
        """By id of a block and key, if host blocks have several sub-blocks: chains that fork inside
        a host block share device blocks."""
        self._twins: set[BlockHashWithGroupId] = set()
        """Keys of contents that the device may have twice: a request that finds a whole prompt
        computes its last block again, in another block."""
        self._failed: set[BlockHashWithGroupId] = set()
        """Keys of host blocks whose store has failed, until the device lets go of the contents or a
        request finds them."""
        self._payloads: dict[int, PayloadsByKey] = {}
        """By id of a (last sub-) block, if KV events are wanted: it may outlive its request."""
        tier.on_removed(self._on_not_stored)

    @property
    def are_stored(self) -> bool:
        """Whether the tier has, or gets, all contents."""
        return not self._unstored

    def find_reset(self, reason: str) -> None:
        """Forget all contents if the device's prefix cache has been reset. They count as dropped
        for ``reason`` if they are not in the tier."""
        cached = block_pool.cached(self._device_pool)
        if self._cached is not cached:
            self._cached = cached
            lost = [key for block_id in self._unstored for key in self._recorded(block_id)]
            self.clear()
            self._tier.remove_all_copies()
            self._count_dropped(lost, reason)

    def on_allocated(self, blocks: Sequence[KVCacheBlock], reason: str) -> None:
        """Requests have got ``blocks``, to fill or because they have found their contents. Contents
        that the device has lost count as dropped for ``reason`` if they are not in the tier."""
        known = self._keys
        recorded = [known[block.block_id] for block in blocks]
        if not any(recorded):
            return
        current = list(block_pool.keys_of(blocks))
        lost: list[int] = []
        if recorded != current:
            lost = [
                block.block_id
                for block, old, new in zip(blocks, recorded, current, strict=True)
                if old is not None and old != new
            ]
            self._count_dropped(self._forget(lost), reason)
        if len(lost) < len(blocks):
            found = {b.block_id: b for b in blocks if known[b.block_id] is not None}
            self._found.update(found)
            if self._failed:  # worth another try
                self._failed.difference_update([known[block_id] for block_id in found])
            _, keys = self._host_keys(list(found.values()))
            self._tier.add_copies(list(dict.fromkeys(keys)))

    def record(
        self,
        blocks: Sequence[KVCacheBlock],
        keys: Sequence[BlockHashWithGroupId],
        request: "Request",
    ) -> None:
        """Record the contents of ``blocks`` of ``request``, all sub-blocks of whole host blocks, as
        ``keys``. Blocks that vLLM does not find by their key are left out."""
        known = self._keys
        new: Sequence[KVCacheBlock] = blocks
        new_keys = keys
        recorded = [known[block.block_id] for block in blocks]
        current = list(block_pool.keys_of(blocks))
        if any(recorded) or current != keys:
            places = [
                place
                for place, (found_by, key) in enumerate(zip(current, keys, strict=True))
                if found_by == key and recorded[place] != key
            ]
            new, new_keys = [blocks[i] for i in places], [keys[i] for i in places]
        for block, key in zip(new, new_keys, strict=True):
            known[block.block_id] = key
        if self._groups.num_sub_blocks > 1:
            self._join(blocks, keys)
            new, new_keys = self._host_keys(new)
        if self._wants_events:
            self._add_payloads(blocks, keys, request)
        held = [self._cached.get(key) for key in new_keys]
        if dict in set(map(type, held)):
            twins = zip(new_keys, held, strict=True)
            self._twins.update([key for key, blocks in twins if isinstance(blocks, dict)])
        # What the tier has was loaded, or computed again.
        unique = list(dict.fromkeys(new_keys))
        lacking = self._tier.add_copies(unique)
        self._meter.add(metrics.SKIPPED, len(unique) - len(lacking), "already_stored")
        if len(lacking) == len(unique) == len(new):
            self._unstored.update([block.block_id for block in new])
        elif not lacking:
            self._found.update([block.block_id for block in new])
        else:
            absent = set(lacking)
            for block, key in zip(new, new_keys, strict=True):
                if key in absent:
                    self._unstored.update([p.block_id for p in self._parts(block.block_id, key)])
                else:
                    self._found.add(block.block_id)

    def on_store_failed(self, blocks: Sequence[KVCacheBlock]) -> None:
        """The contents of ``blocks``, all sub-blocks of whole host blocks, are not to be stored
        again until a request finds them."""
        count = self._groups.num_sub_blocks
        keys = [self._keys[block.block_id] for block in blocks[count - 1 :: count]]
        failed = [key for key in keys if key is not None]
        self._failed.update(failed)
        self._on_not_stored(failed)

    def choose(self, blocks: Sequence[KVCacheBlock]) -> dict[BlockHashWithGroupId, KVCacheBlock]:
        """Contents among ``blocks`` that are to be stored, and that the tier neither has nor gets:
        by key, the first block of each, in the same order."""
        unstored = self._unstored
        candidates = [block for block in blocks if block.block_id in unstored]
        if not candidates:
            return {}
        blocks, keys = self._host_keys(candidates)
        absent = self._stores.absent(keys)
        if len(absent) < len(keys):
            unstored.difference_update([block.block_id for block in candidates])
            chosen: dict[BlockHashWithGroupId, KVCacheBlock] = {}
            for key, block in zip(keys, blocks, strict=True):
                if key in absent:
                    chosen.setdefault(key, block)
                    unstored.add(block.block_id)
        else:
            chosen = dict(zip(keys, blocks, strict=True))
        if self._failed or self._admission.threshold > 1:
            for key in absent:
                if key in self._failed or not self._admission.admits(key):
                    del chosen[key]
        return chosen

    def plan(
        self,
        chosen: dict[BlockHashWithGroupId, KVCacheBlock],
        keep: Container[BlockHashWithGroupId],
    ) -> list[KVCacheBlock]:
        """Plan stores of ``chosen``: by key one block of each, as ``choose`` returns them, children
        before parents. Stores parents first, as far as the tier has room without evicting a block
        with a key in ``keep``. Returns the device blocks of all stores planned, parents first."""
        keys, blocks = list(chosen)[::-1], list(chosen.values())[::-1]
        last = blocks
        if self._groups.num_sub_blocks > 1:
            parts = [
                self._host_blocks[b.block_id][k].blocks for k, b in zip(keys, blocks, strict=True)
            ]
            blocks, last = [b for part in parts for b in part], [part[-1] for part in parts]
        run = Run(blocks, keys)
        if self._wants_events:
            run.num_tokens = [block.block_hash_num_tokens or 0 for block in last]
            run.payloads = [self._payloads.get(block.block_id, {}) for block in last]
        count = self._stores.plan(run, keep, self._device_pool)
        stored = blocks[: count * self._groups.num_sub_blocks]
        if self._groups.num_sub_blocks == 1:  # else a block may be a part of others
            self._unstored.difference_update([block.block_id for block in stored])
        return stored

    def clear(self) -> None:
        """Forget all contents."""
        self._keys = [None] * len(self._keys)
        self._unstored.clear()
        self._found.clear()
        self._host_blocks.clear()
        self._twins.clear()
        self._failed.clear()
        self._payloads.clear()

    # Details

    def _host_keys(
        self, blocks: Sequence[KVCacheBlock]
    ) -> tuple[Sequence[KVCacheBlock], Sequence[BlockHashWithGroupId]]:
        """The blocks among ``blocks`` whose contents are recorded and still there, and the key of
        each. A block that is a part of several host blocks comes once with each."""
        if self._groups.num_sub_blocks == 1:
            keys: list[Any] = list(block_pool.keys_of(blocks))
            if keys == [self._keys[block.block_id] for block in blocks] and all(keys):
                return blocks, keys
        pairs = [
            (block, key)
            for block in blocks
            for key in self._recorded(block.block_id)
            if self._is_whole(block.block_id, key)
        ]
        return [block for block, _ in pairs], [key for _, key in pairs]

    def _recorded(self, block_id: int) -> Collection[BlockHashWithGroupId]:
        """Keys of the host blocks that a block is a part of."""
        if self._groups.num_sub_blocks == 1:
            key = self._keys[block_id]
            return () if key is None else (key,)
        return self._host_blocks.get(block_id, {}).keys()

    def _parts(self, block_id: int, key: BlockHashWithGroupId) -> Sequence[KVCacheBlock]:
        """The blocks of the host block with ``key`` that this block is a part of."""
        if self._groups.num_sub_blocks == 1:
            return (self._device_pool.blocks[block_id],)
        return self._host_blocks[block_id][key].blocks

    def _on_not_stored(self, keys: Iterable[BlockHashWithGroupId]) -> None:
        """The tier does not have ``keys``, or no more."""
        shared: set[Any] = self._cached.keys() & keys
        for key in shared:
            for block in block_pool.blocks_with(self._device_pool, key):
                if key in self._recorded(block.block_id):
                    parts = self._parts(block.block_id, key)
                    self._unstored.update([part.block_id for part in parts])

    def _is_whole(self, block_id: int, key: BlockHashWithGroupId) -> bool:
        """Whether the device still has all of a host block that this block is a part of."""
        if self._groups.num_sub_blocks == 1:
            return self._device_pool.blocks[block_id].block_hash == key
        host_block = self._host_blocks[block_id][key]
        recorded = [self._keys[block.block_id] for block in host_block.blocks]
        return recorded == list(block_pool.keys_of(host_block.blocks)) == host_block.keys

    def _join(self, blocks: Sequence[KVCacheBlock], keys: Sequence[BlockHashWithGroupId]) -> None:
        """Note which of ``blocks`` have the contents of one host block."""
        count = self._groups.num_sub_blocks
        for start in range(0, len(blocks), count):
            part = tuple(blocks[start : start + count])
            if all(self._keys[b.block_id] == k for b, k in zip(part, keys[start:], strict=False)):
                host_block = _HostBlock(list(keys[start : start + count]), part)
                for block in part:
                    of_block = self._host_blocks.setdefault(block.block_id, {})
                    of_block[host_block.keys[-1]] = host_block

    def _add_payloads(
        self,
        blocks: Sequence[KVCacheBlock],
        keys: Sequence[BlockHashWithGroupId],
        request: "Request",
    ) -> None:
        count = self._groups.num_sub_blocks
        inner_keys = self._device_pool.cached_block_hashes_by_block if count == 1 else {}
        for block, key in zip(blocks[count - 1 :: count], keys[count - 1 :: count], strict=True):
            if self._keys[block.block_id] == key and block.block_hash_num_tokens is not None:
                self._payloads[block.block_id] = payloads_of_host_block(
                    self._groups,
                    key,
                    inner_keys.get(block.block_id, ()),
                    block.block_hash_num_tokens,
                    request,
                )

    def _forget(self, block_ids: Sequence[int]) -> list[BlockHashWithGroupId]:
        """The device has let go of the contents of these blocks, in this order. Returns the keys of
        those that the tier may lack."""
        unstored = self._unstored.intersection(block_ids)
        self._unstored -= unstored
        recorded = (key for block_id in unstored for key in self._recorded(block_id))
        lacking = [key for key in recorded if key not in self._failed]
        were_found = self._found.intersection(block_ids)
        self._found -= were_found
        others: Sequence[int] = block_ids
        if were_found:
            others = [block_id for block_id in block_ids if block_id not in were_found]
            self._remove_copies([i for i in block_ids if i in were_found], found=True)
        if others:
            self._remove_copies(others, found=False)
        known = self._keys
        for block_id in block_ids:
            known[block_id] = None
        for block_id in block_ids if self._payloads else ():
            self._payloads.pop(block_id, None)
        return lacking

    def _remove_copies(self, block_ids: Iterable[int], *, found: bool) -> None:
        keys: Iterable[Any]
        if self._groups.num_sub_blocks == 1:
            keys = [self._keys[block_id] for block_id in block_ids]
        else:
            keys = dict.fromkeys(key for block_id in block_ids for key in self._split(block_id))
        if self._twins and (twins := self._twins.intersection(keys)):
            kept = {key for key in twins if self._has_twin(key, found=found)}
            self._twins -= twins - kept
            keys = [key for key in keys if key not in kept]
        if self._failed:
            self._failed.difference_update(keys)
        self._tier.remove_copies(keys, found=found)

    def _has_twin(self, key: BlockHashWithGroupId, *, found: bool) -> bool:
        """Whether the device has the contents of ``key`` in other blocks too. They count as
        ``found`` if those were that it lets go of."""
        for block in block_pool.blocks_with(self._device_pool, key):
            if self._groups.num_sub_blocks == 1:
                is_twin = self._keys[block.block_id] == key
            else:
                host_block = self._host_blocks.get(block.block_id, {}).get(key)
                is_twin = host_block is not None and self._is_whole(block.block_id, key)
                if host_block is not None and is_twin:
                    for part in host_block.blocks:
                        self._host_blocks.setdefault(part.block_id, {})[key] = host_block
            if is_twin:
                if found:
                    self._found.add(block.block_id)
                return True
        return False

    def _split(self, block_id: int) -> Iterable[BlockHashWithGroupId]:
        """Forget the host blocks that a block is a part of. Returns their keys."""
        host_blocks = self._host_blocks.pop(block_id, {})
        for key, host_block in host_blocks.items():
            for block in host_block.blocks:
                of_block = self._host_blocks.get(block.block_id)
                if of_block is not None and of_block.get(key) is host_block:
                    del of_block[key]
        return host_blocks

    def _count_dropped(self, keys: Sequence[BlockHashWithGroupId], reason: str) -> None:
        """Count contents that the device has lost and the tier lacks, unless another block has
        them or they are on their way."""
        if not keys:
            return
        dropped = self._stores.absent(keys).difference(block_pool.cached(self._device_pool))
        admitted = list(filter(self._admission.admits, dropped))
        self._meter.add(metrics.SKIPPED, len(dropped) - len(admitted), "below_threshold")
        self._meter.add(metrics.DROPPED, len(admitted), reason)
