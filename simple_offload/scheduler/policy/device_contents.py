"""DeviceContents: what the device's blocks hold."""

from collections.abc import Collection, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, KVCacheBlock

from simple_offload import metrics
from simple_offload.scheduler.event_payload import payloads_of_host_block
from simple_offload.scheduler.policy.admission import Admission
from simple_offload.scheduler.policy.reuse import Reuse
from simple_offload.scheduler.stores import Stores
from simple_offload.scheduler.tier import block_pool
from simple_offload.scheduler.tier.cpu_tier import CpuTier
from simple_offload.scheduler.tier.groups import Groups
from simple_offload.scheduler.tier.run import PayloadsByKey, Run

if TYPE_CHECKING:
    from vllm.v1.request import Request


@dataclass(slots=True, eq=False)
class _HostBlock:
    """Device blocks that together have the contents of one host block."""

    blocks: Sequence[KVCacheBlock]
    keys: Sequence[BlockHashWithGroupId]
    """By sub-block; the last one is the key of the host block."""

    def is_whole(self) -> bool:
        """Whether the device still has all of it."""
        return list(block_pool.keys_of(self.blocks)) == self.keys


class DeviceContents:
    """Contents are recorded when a request has computed or loaded them, and stay until the device
    lets go of them: it allocates the block anew. The tier hears of both, since it need not keep
    what the device has. So a block of the free queue is stored only if its contents are known.

    The last sub-block stands for its host block: the key of both is the same.
    """

    def __init__(
        self,
        tier: CpuTier,
        groups: Groups,
        stores: Stores,
        admission: Admission,
        reuse: Reuse,
        device_pool: BlockPool,
        meter: metrics.Meter,
        wants_events: bool,
    ) -> None:
        self._tier = tier
        self._groups = groups
        self._stores = stores
        self._admission = admission
        self._reuse = reuse
        self._device_pool = device_pool
        self._meter = meter
        self._wants_events = wants_events
        self._keys: list[BlockHashWithGroupId | None] = [None] * len(device_pool.blocks)
        """By block id, the recorded key of its contents."""
        self._unstored: set[int] = set()
        """Ids of the (last sub-) blocks with contents that are to be stored. The tier may have them
        all the same."""
        self._cached = block_pool.cached(device_pool)
        """The device's prefix cache, by key."""
        self._found: set[int] = set()
        """Ids of blocks with contents that a request has found, in either cache."""
        self._host_blocks: list[dict[_HostBlock, None]] = [{}] * len(device_pool.blocks)
        """By block id, the host blocks that it is a part of, if those have several sub-blocks:
        chains that fork inside a host block share device blocks. Most parts of a host block share
        one dict."""
        self._skipped: set[int] = set()
        """Ids of the (last sub-) blocks with contents that are not to be stored unless a request
        finds them."""
        self._payloads: dict[int, PayloadsByKey] = {}
        """By id of a (last sub-) block, if KV events are wanted: it may outlive its request."""
        tier.on_removed(self._on_not_stored)

    @property
    def are_stored(self) -> bool:
        """Whether the tier has, or gets, all contents that are to be stored."""
        return not self._unstored

    def find_reset(self, reason: str) -> None:
        """Forget all contents if the device's prefix cache has been reset. They count as dropped
        for ``reason`` if they are not in the tier."""
        cached = block_pool.cached(self._device_pool)
        if self._cached is not cached:
            self._cached = cached
            lost = [key for i in self._unstored if (key := self._keys[i]) is not None]
            self.clear()
            self._tier.remove_all_copies()
            self._count_dropped(lost, reason)

    def on_allocated(self, block_ids: Sequence[int], reason: str) -> None:
        """Requests have got these blocks, to fill or because they have found their contents.
        Contents that the device has lost count as dropped for ``reason`` if they are not in the
        tier."""
        known, blocks = self._keys, self._device_pool.blocks
        recorded = [known[block_id] for block_id in block_ids]
        if not any(recorded):
            return
        current = list(block_pool.keys_of([blocks[block_id] for block_id in block_ids]))
        if recorded != current:
            changed = zip(block_ids, recorded, current, strict=True)
            lost = [i for i, old, new in changed if old is not None and old != new]
            self._count_dropped(self._forget(lost), reason)
        found = {i: key for i in block_ids if (key := known[i]) is not None}
        if found:
            self._found.update(found)
            wanted = self._skipped.intersection(found)
            self._skipped -= wanted
            self._unstored |= wanted
            keys = list(dict.fromkeys(found.values()))
            self._reuse.on_wanted(keys)
            self._tier.add_copies(keys)

    def record(
        self,
        blocks: Sequence[KVCacheBlock],
        keys: Sequence[BlockHashWithGroupId],
        request: "Request",
        *,
        stores: bool,
    ) -> None:
        """Record the contents of ``blocks`` of ``request``, all sub-blocks of whole host blocks, as
        ``keys``. Host blocks are left out if vLLM does not find all sub-blocks by their keys.
        ``stores``: whether to store what the tier lacks."""
        known, count = self._keys, self._groups.num_sub_blocks
        ids = [block.block_id for block in blocks]
        new_blocks, new_keys = blocks, keys
        recorded = [known[block_id] for block_id in ids]
        current = list(block_pool.keys_of(blocks))
        if any(recorded) or current != keys:
            places = [
                place
                for end in range(count, len(keys) + 1, count)
                if recorded[end - 1] != keys[end - 1]
                and current[end - count : end] == keys[end - count : end]
                for place in range(end - count, end)
            ]
            new_blocks, new_keys = [blocks[i] for i in places], [keys[i] for i in places]
            ids = [ids[i] for i in places]
        for block_id, key in zip(ids, new_keys, strict=True):
            known[block_id] = key
        if count > 1:
            for start in range(0, len(ids), count):
                part = slice(start, start + count)
                self._join(ids[part], _HostBlock(new_blocks[part], new_keys[part]))
            ids, new_keys = ids[count - 1 :: count], new_keys[count - 1 :: count]
        if self._wants_events:
            self._add_payloads(blocks, keys, request)
        self._reuse.on_wanted(new_keys)
        # What the tier has was loaded, or computed again.
        lacking = self._tier.add_copies(new_keys)
        self._meter.add(metrics.SKIPPED, len(ids) - len(lacking), "already_stored")
        if not stores:
            self._meter.add(metrics.SKIPPED, len(lacking), "overload")
        new = self._unstored if stores else self._skipped
        if len(lacking) == len(ids):
            new.update(ids)
        elif not lacking:
            self._found.update(ids)
        else:
            absent = set(lacking)
            for block_id, key in zip(ids, new_keys, strict=True):
                (new if key in absent else self._found).add(block_id)

    def on_store_failed(self, blocks: Sequence[KVCacheBlock]) -> None:
        """The contents of ``blocks``, all sub-blocks of whole host blocks, are not to be stored
        again until a request finds them."""
        count = self._groups.num_sub_blocks
        last_ids = [block.block_id for block in blocks[count - 1 :: count]]
        self._skipped.update([block_id for block_id in last_ids if self._keys[block_id]])

    def choose(self, blocks: Sequence[KVCacheBlock]) -> dict[BlockHashWithGroupId, KVCacheBlock]:
        """Contents among ``blocks`` that are to be stored, and that the tier neither has nor gets:
        by key, the first block of each, in the same order."""
        known, unstored = self._keys, self._unstored
        if self._groups.num_sub_blocks == 1:
            found = {block.block_id: block for block in blocks if block.block_id in unstored}
        else:
            found = self._first_blocks(blocks)
        if not found:
            return {}
        keys: list[Any] = [known[block_id] for block_id in found]
        if self._groups.num_sub_blocks == 1 and keys != list(block_pool.keys_of(found.values())):
            # The device has lost some.
            return self.choose([b for i, b in found.items() if b.block_hash == known[i]])
        absent = self._stores.absent(keys)
        if len(absent) == len(keys):
            chosen = dict(zip(keys, found.values(), strict=True))
        else:
            chosen = {}
            for key, (block_id, block) in zip(keys, found.items(), strict=True):
                if key in absent:
                    chosen.setdefault(key, block)
                else:
                    unstored.discard(block_id)
        if self._admission.threshold > 1:
            for key in absent:
                if not self._admission.admits(key):
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
        count = self._groups.num_sub_blocks
        if count > 1:
            pairs = zip(keys, blocks, strict=True)
            blocks = [part for key, block in pairs for part in self._parts(key, block)]
        run = Run(blocks, keys)
        if self._wants_events:
            last = blocks[count - 1 :: count]
            run.num_tokens = [block.block_hash_num_tokens or 0 for block in last]
            run.payloads = [self._payloads.get(block.block_id, {}) for block in last]
        stored = blocks[: count * self._stores.plan(run, keep, self._device_pool)]
        self._unstored.difference_update([block.block_id for block in stored[count - 1 :: count]])
        return stored

    def is_shared(self, block: KVCacheBlock) -> bool:
        """Whether ``block`` is a part of several host blocks."""
        return len(self._host_blocks[block.block_id]) > 1

    def clear(self) -> None:
        """Forget all contents."""
        self._keys = [None] * len(self._keys)
        self._unstored.clear()
        self._found.clear()
        self._host_blocks = [{}] * len(self._keys)
        self._skipped.clear()
        self._payloads.clear()

    # Details

    def _first_blocks(self, blocks: Iterable[KVCacheBlock]) -> dict[int, KVCacheBlock]:
        """Of each host block that the tier may lack, and that the device has all of, the first one
        of ``blocks``, by id of the last sub-block."""
        found: dict[int, KVCacheBlock] = {}
        previous: dict[_HostBlock, None] = {}
        for block in blocks:
            of_block = self._host_blocks[block.block_id]
            if of_block is not previous:
                for host_block in of_block:
                    last = host_block.blocks[-1].block_id
                    if last in self._unstored and last not in found and host_block.is_whole():
                        found[last] = block
                previous = of_block
        return found

    def _parts(self, key: BlockHashWithGroupId, block: KVCacheBlock) -> Sequence[KVCacheBlock]:
        """The blocks of the host block with ``key`` that ``block`` is a part of."""
        of_block = self._host_blocks[block.block_id]
        return next(each.blocks for each in of_block if each.keys[-1] == key and each.is_whole())

    def _join(self, block_ids: Iterable[int], host_block: _HostBlock) -> None:
        """Note that these are the parts of ``host_block``."""
        of, own = self._host_blocks, {host_block: None}
        for block_id in block_ids:
            others = of[block_id]
            if not others:
                of[block_id] = own
            elif len(others) == 1:
                of[block_id] = others | own
            else:
                others.update(own)

    def _on_not_stored(self, keys: Iterable[BlockHashWithGroupId]) -> None:
        """The tier does not have ``keys``, or no more."""
        shared: set[Any] = self._cached.keys() & keys
        for key in shared:
            for block in block_pool.blocks_with(self._device_pool, key):
                if self._keys[block.block_id] == key:
                    self._unstored.add(block.block_id)

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
        known = self._keys
        last_ids: Sequence[int] = block_ids
        lost: Collection[int] = block_ids
        if self._groups.num_sub_blocks > 1:
            last_ids = self._split(block_ids)
            lost = {*block_ids, *last_ids}
        unstored = self._unstored.intersection(last_ids)
        self._unstored -= unstored
        lacking = [key for i in unstored if (key := known[i]) is not None]
        found = self._found.intersection(last_ids)
        self._found.difference_update(lost)
        self._skipped.difference_update(lost)
        keys: dict[bool, list[Any]] = {bool(found): [known[block_id] for block_id in last_ids]}
        if 0 < len(found) < len(last_ids):
            keys[True] = [known[block_id] for block_id in last_ids if block_id in found]
            keys[False] = [known[block_id] for block_id in last_ids if block_id not in found]
        for block_id in lost:
            known[block_id] = None
        for block_id in lost if self._payloads else ():
            self._payloads.pop(block_id, None)
        for were_found, of_these in keys.items():
            self._remove_copies(of_these, found=were_found)
        return lacking

    def _split(self, block_ids: Iterable[int]) -> list[int]:
        """Forget the host blocks that these blocks are parts of. Returns the ids of their last
        sub-blocks."""
        of, last_ids = self._host_blocks, []
        for block_id in block_ids:
            for host_block in list(of[block_id]):
                last_ids.append(host_block.blocks[-1].block_id)
                for part in host_block.blocks:
                    of[part.block_id].pop(host_block, None)
        return last_ids

    def _remove_copies(self, keys: Sequence[BlockHashWithGroupId], *, found: bool) -> None:
        if not self._cached.keys().isdisjoint(keys):
            keys = [key for key in keys if not self._has_twin(key, found=found)]
        if keys:
            self._reuse.on_let_go(len(keys), None if found else keys[len(keys) // 2])
        self._tier.remove_copies(keys, found=found)

    def _has_twin(self, key: BlockHashWithGroupId, *, found: bool) -> bool:
        """Whether the device has the contents of ``key`` in other blocks too: a request that finds
        a whole prompt computes its last block again. They count as ``found`` if those were that it
        lets go of."""
        for block in block_pool.blocks_with(self._device_pool, key):
            if self._keys[block.block_id] == key:
                if found:
                    self._found.add(block.block_id)
                return True
        return False

    def _count_dropped(self, keys: Sequence[BlockHashWithGroupId], reason: str) -> None:
        """Count contents that the device has lost and the tier lacks, unless another block has
        them or they are on their way."""
        if not keys:
            return
        dropped = self._stores.absent(keys).difference(block_pool.cached(self._device_pool))
        admitted = list(filter(self._admission.admits, dropped))
        self._meter.add(metrics.SKIPPED, len(dropped) - len(admitted), "below_threshold")
        self._meter.add(metrics.DROPPED, len(admitted), reason)
