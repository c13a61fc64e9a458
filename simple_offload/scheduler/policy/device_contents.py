"""DeviceContents: what the device's blocks hold."""

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, KVCacheBlock, get_block_hash

from simple_offload import metrics
from simple_offload.scheduler.event_payload import payloads_of_host_block
from simple_offload.scheduler.policy.admission import Admission
from simple_offload.scheduler.policy.reuse import Reuse
from simple_offload.scheduler.stores import Stores
from simple_offload.scheduler.tier import block_pool
from simple_offload.scheduler.tier.cpu_tier import CpuTier
from simple_offload.scheduler.tier.groups import Groups
from simple_offload.scheduler.tier.leases import Lease
from simple_offload.scheduler.tier.run import PayloadsByKey, Run
from simple_offload.transfer import BlockIds, Transfer, as_array

if TYPE_CHECKING:
    from vllm.v1.request import Request


_MOST_LOOKED_AT = 64
"""Blocks that a lookup may look at, one by one: all unstored ones while stores are early."""


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
        self._unstored: dict[int, BlockHashWithGroupId] = {}
        """By id of a (last sub-) block, the key of contents that are to be stored. The tier may
        have them all the same."""
        self._skipped: dict[int, BlockHashWithGroupId] = {}
        """Likewise, contents that are not to be stored unless a request finds them."""
        self._found: set[int] = set()
        """Ids of blocks whose contents a request has found, but not the tier's copy of them."""
        self._found_lately: list[tuple[Sequence[int], list[BlockHashWithGroupId]]] = []
        """Ids and keys of blocks that requests have found, until ``note_found``."""
        self._ids_found_lately: set[int] = set()
        self._leases: dict[int, tuple[BlockHashWithGroupId, Lease]] = {}
        """By id of a (last sub-) block, its contents, and the lease that the tier's block gets when
        they are stored."""
        self._copies = np.zeros(len(device_pool.blocks), np.int64)
        """By id of a (last sub-) block, the id of the host block that has got the same contents,
        or that they were loaded from. It may have lost them since. 0: none."""
        self._copy_of = self._copies.data
        """The same. For the few blocks of a step, NumPy takes several times as long."""
        self._cached = block_pool.cached(device_pool)
        """The device's prefix cache, by key."""
        self._host_blocks: list[dict[_HostBlock, None]] = [{}] * len(device_pool.blocks)
        """By block id, the host blocks that it is a part of, if those have several sub-blocks:
        chains that fork inside a host block share device blocks. Most parts of a host block share
        one dict."""
        self._payloads: dict[int, PayloadsByKey] = {}
        """By id of a (last sub-) block, if KV events are wanted: it may outlive its request."""
        tier.on_removed(self._on_removed)
        if groups.num_sub_blocks == 1:
            tier.watch_device(lambda: block_pool.cached(device_pool))

    @property
    def are_stored(self) -> bool:
        """Whether the tier has, or gets, all contents that are to be stored."""
        return not self._unstored

    def may_lack_free(self) -> bool:
        """Whether free blocks may have contents that are to be stored. True, without a look, where
        many blocks have such contents."""
        if self._groups.num_sub_blocks > 1 or len(self._unstored) > _MOST_LOOKED_AT:
            return bool(self._unstored)
        blocks = self._device_pool.blocks
        return any(blocks[block_id].ref_cnt == 0 for block_id in self._unstored)

    def on_device_reset(self, reason: str) -> None:
        """The device's prefix cache has been reset: forget all contents. They count as dropped for
        ``reason`` if they are not in the tier."""
        self._cached = block_pool.cached(self._device_pool)
        lost = list(self._unstored.values())
        self.clear()
        self._tier.remove_all_copies()
        self._count_dropped(lost, reason)

    def on_allocated(self, block_ids: Sequence[int], reason: str) -> None:
        """Requests have got these blocks to fill them, in this order: the device has let go of
        their contents. These count as dropped for ``reason`` if they are not in the tier."""
        if self._ids_found_lately and not self._ids_found_lately.isdisjoint(block_ids):
            self.note_found()
        last_ids = block_ids
        if self._groups.num_sub_blocks > 1:
            # One of them may be the copy of a host block that was loaded and not recorded.
            last_ids = list(dict.fromkeys([*self._split(block_ids), *block_ids]))
        for block_id in last_ids if self._payloads else ():
            self._payloads.pop(block_id, None)
        lost = _pop_all(self._unstored, last_ids)
        skipped = _pop_all(self._skipped, last_ids)
        copies = [copy for block_id in last_ids if (copy := self._copy_of[block_id])]
        lacking = lost | skipped
        if lacking:  # other blocks may have had the same contents, and have been stored
            copies += self._tier.ids_of(lacking.values())
        if num_blocks := len(lacking) + len(copies):
            self._copies[as_array(last_ids)] = 0
            host_blocks = as_array(copies)
            self._tier.on_let_go(host_blocks)
            if self._reuse.on_let_go(num_blocks):
                self._follow(lacking, host_blocks)
            self._count_dropped(list(lost.values()), reason)
        self._found.difference_update(block_ids if self._found else ())
        self.forget_leases(block_ids)

    def on_found(self, block_ids: Sequence[int], *, stores: bool | None = True) -> bool:
        """A request has found the contents of these blocks on the device, parents before children.
        What the tier lacks is to be stored, whatever spoke against it before, unless ``stores`` is
        None: the request wants nothing stored. Returns whether there is any. ``note_found`` does
        what can wait."""
        blocks = [self._device_pool.blocks[block_id] for block_id in block_ids]
        keys: list[Any] = list(block_pool.keys_of(blocks))
        self._found_lately.append((block_ids, keys))
        self._ids_found_lately.update(block_ids)
        for block_id in self._leases.keys() & block_ids if self._leases else ():
            if self._leases[block_id][1].is_release:
                del self._leases[block_id]
        lacking: dict[int, BlockHashWithGroupId] = {}
        if stores is not None:
            copy_of, has = self._copy_of, self._tier.has
            pairs = zip(block_ids, keys, strict=True)
            lacking = {i: key for i, key in pairs if not copy_of[i] and not has(key)}
            self._found.update(lacking)
            for block_id in self._skipped.keys() & block_ids if self._skipped else ():
                self._unstored[block_id] = self._skipped.pop(block_id)
            if self._groups.num_sub_blocks == 1:
                self._unstored.update(lacking)
        return bool(lacking)

    def note_found(self) -> None:
        """What the tier has of the blocks that requests have found since the last call are copies,
        and the first to leave."""
        for block_ids, keys in self._found_lately:
            self._add_copies(block_ids, keys)
        self._found_lately.clear()
        self._ids_found_lately.clear()

    def on_copied(self, transfer: Transfer) -> None:
        """A load has filled device blocks, or a store host blocks, with the same contents."""
        count = self._groups.num_sub_blocks
        ids = transfer.device_blocks[count - 1 :: count]
        self._copies[ids] = transfer.host_blocks[count - 1 :: count] // count

    def record(
        self,
        blocks: Sequence[KVCacheBlock],
        keys: Sequence[BlockHashWithGroupId],
        request: "Request",
        *,
        stores: bool | None,
    ) -> None:
        """Record the contents of ``blocks`` of ``request``, all sub-blocks of whole host blocks.
        vLLM finds them by ``keys``. ``stores``: whether to store what the tier lacks; None:
        ``request`` wants nothing stored."""
        count = self._groups.num_sub_blocks
        if self._wants_events:
            self._add_payloads(blocks, keys, request)
        ids = [block.block_id for block in blocks]
        if count > 1:
            for start in range(0, len(ids), count):
                part = slice(start, start + count)
                known = self._host_blocks[ids[part][-1]]
                if all(each.keys[-1] != keys[part][-1] for each in known):
                    self._join(ids[part], _HostBlock(blocks[part], keys[part]))
            ids, keys = ids[count - 1 :: count], keys[count - 1 :: count]
        lacking, num_new = self._add_copies(ids, keys)
        self._meter.add(metrics.SKIPPED, num_new, "already_stored")  # loaded, or computed again
        if stores is None:
            return
        if not stores:
            skipped = {i: key for i, key in lacking.items() if i not in self._found}
            self._meter.add(metrics.SKIPPED, len(skipped), "overload")
            self._skipped.update(skipped)
            lacking = {i: key for i, key in lacking.items() if i not in skipped}
        self._unstored.update(lacking)

    def on_store_ended(
        self, blocks: Sequence[KVCacheBlock], transfer: Transfer | None, *, ok: bool
    ) -> None:
        """A store of ``blocks``, all sub-blocks of whole host blocks, has ended. ``transfer``: if
        the tier has got them. If it has failed, they are not to be stored again until a request
        finds them."""
        count = self._groups.num_sub_blocks
        last = blocks[count - 1 :: count]
        if transfer is not None:
            self.on_copied(transfer)
            if self._found:
                found = self._found.intersection([block.block_id for block in last])
                self._found -= found
                self._tier.on_copies_found(self._copies[list(found)])
            if self._leases:
                self._pass_on_leases(last)
        elif not ok:
            for block, key in zip(last, block_pool.keys_of(last), strict=True):
                if key is not None:
                    self._skipped[block.block_id] = key
        self.forget_leases([block.block_id for block in last])

    def choose(self, blocks: Sequence[KVCacheBlock]) -> dict[BlockHashWithGroupId, KVCacheBlock]:
        """Contents among ``blocks`` that are to be stored, and that the tier neither has nor gets:
        by key, the first block of each, in the same order."""
        unstored = self._unstored
        if self._groups.num_sub_blocks > 1:
            first = self._first_blocks(blocks)
            ids, blocks = list(first), list(first.values())
            keys: list[Any] = [unstored[block_id] for block_id in ids]
        else:
            ids = [block.block_id for block in blocks]
            keys = list(map(unstored.get, ids))
            if not all(keys) or keys != list(block_pool.keys_of(blocks)):
                # Not to be stored, or lost by the device.
                pairs = zip(keys, blocks, strict=True)
                blocks = [block for key, block in pairs if key and block.block_hash == key]
                ids = [block.block_id for block in blocks]
                keys = list(block_pool.keys_of(blocks))
        absent = self._stores.absent(keys)
        if len(absent) == len(keys):
            chosen = dict(zip(keys, blocks, strict=True))
        else:
            chosen = {}
            for key, block_id, block in zip(keys, ids, blocks, strict=True):
                if key in absent:
                    chosen.setdefault(key, block)
                elif copy := self._tier.ids_of([key]):
                    unstored.pop(block_id, None)
                    self._copies[block_id] = copy[0]
                    if self._leases:
                        self._pass_on_leases([block])
                        self.forget_leases([block_id])
        if self._admission.threshold > 1:
            for key in absent:
                if not self._admission.admits(key):
                    del chosen[key]
        return chosen

    def choose_parts(self, blocks: Sequence[KVCacheBlock]) -> list[Sequence[KVCacheBlock]]:
        """The same, each with all blocks of its host block."""
        chosen = self.choose(blocks)
        if self._groups.num_sub_blocks == 1:
            return [(block,) for block in chosen.values()]
        return [self._parts(key, block) for key, block in chosen.items()]

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
        for block in stored[count - 1 :: count]:
            self._unstored.pop(block.block_id, None)
        return stored

    def lease(
        self,
        blocks: Sequence[KVCacheBlock],
        keys: Sequence[BlockHashWithGroupId],
        lease: Lease,
    ) -> None:
        """Give a lease to the tier's blocks that will have the contents of these (last sub-)
        blocks, with ``keys``. What is released is not stored in a full tier, unless a request finds
        it."""
        skips = lease.is_release and not self._tier.num_empty
        for block, key in zip(blocks, keys, strict=True):
            block_id = block.block_id
            if skips:
                if self._unstored.get(block_id) == key:
                    self._skipped[block_id] = self._unstored.pop(block_id)
            elif not self._copies[block_id]:
                known = self._leases.get(block_id)
                if known is None or known[0] != key or known[1].until < lease.until:
                    self._leases[block_id] = key, lease

    def forget_leases(self, block_ids: Iterable[int]) -> None:
        """The tier does not get the contents of these blocks, or has got them."""
        if self._leases:
            for block_id in block_ids:
                self._leases.pop(block_id, None)

    def is_shared(self, block: KVCacheBlock) -> bool:
        """Whether ``block`` is a part of several host blocks."""
        return len(self._host_blocks[block.block_id]) > 1

    def clear(self) -> None:
        """Forget all contents."""
        self._unstored.clear()
        self._skipped.clear()
        self._found.clear()
        self._found_lately.clear()
        self._ids_found_lately.clear()
        self._leases.clear()
        self._copies[:] = 0
        self._host_blocks = [{}] * len(self._host_blocks)
        self._payloads.clear()

    # Details

    def _add_copies(
        self, block_ids: Sequence[int], keys: Sequence[BlockHashWithGroupId]
    ) -> tuple[dict[int, BlockHashWithGroupId], int]:
        """Requests have got contents with ``keys`` in these (last sub-) blocks. Returns what the
        tier lacks, and how many blocks have become known as copies."""
        found = self._tier.add_copies(keys)
        if not found:
            return dict(zip(block_ids, keys, strict=True)), 0
        lacking = {
            block_id: key
            for block_id, key, host_block in zip(block_ids, keys, found, strict=True)
            if host_block is None
        }
        ids = as_array([block_id for block_id in block_ids if block_id not in lacking])
        num_new = int(np.count_nonzero(self._copies[ids] == 0))
        self._copies[ids] = [block.block_id for block in found if block is not None]
        return lacking, num_new

    def _pass_on_leases(self, blocks: Sequence[KVCacheBlock]) -> None:
        """The tier has got the contents of ``blocks``, parents before children."""
        by_lease: dict[Lease, list[BlockHashWithGroupId]] = {}
        for block in blocks:
            if (known := self._leases.get(block.block_id)) is not None:
                by_lease.setdefault(known[1], []).append(known[0])
        for lease, keys in by_lease.items():
            self._tier.lease(self._tier.ids_of(keys), lease)

    def _follow(self, lost: dict[int, BlockHashWithGroupId], copies: BlockIds) -> None:
        """The device has let go of contents that the tier lacks, and of ``copies``. Follow one that
        no request has found."""
        unfound = [key for block_id, key in lost.items() if block_id not in self._found]
        unfound += self._tier.unfound(copies)
        if unfound:
            self._reuse.follow(get_block_hash(unfound[len(unfound) // 2]))

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

    def _on_removed(self, keys: Iterable[BlockHashWithGroupId]) -> None:
        """The tier has lost ``keys``. What it had got from the device, or the device from it, is
        to be stored again."""
        shared: set[Any] = self._cached.keys() & keys
        for key in shared:
            for block in block_pool.blocks_with(self._device_pool, key):
                block_id = block.block_id
                if copy := int(self._copies[block_id]):
                    self._copies[block_id] = 0
                    if self._tier.is_released(copy):
                        self._skipped[block_id] = key
                        continue
                    self._unstored[block_id] = key
                    if self._tier.was_found(copy):
                        self._found.add(block_id)
                    if (lease := self._tier.lease_of(copy)) is not None:
                        self._leases[block_id] = key, lease

    def _add_payloads(
        self,
        blocks: Sequence[KVCacheBlock],
        keys: Sequence[BlockHashWithGroupId],
        request: "Request",
    ) -> None:
        count = self._groups.num_sub_blocks
        inner_keys = self._device_pool.cached_block_hashes_by_block if count == 1 else {}
        for block, key in zip(blocks[count - 1 :: count], keys[count - 1 :: count], strict=True):
            if block.block_hash == key and block.block_hash_num_tokens is not None:
                self._payloads[block.block_id] = payloads_of_host_block(
                    self._groups,
                    key,
                    inner_keys.get(block.block_id, ()),
                    block.block_hash_num_tokens,
                    request,
                )

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

    def _count_dropped(self, keys: Sequence[BlockHashWithGroupId], reason: str) -> None:
        """Count contents that the device has lost and the tier lacks, unless another block has
        them or they are on their way."""
        if not keys:
            return
        dropped = self._stores.absent(keys).difference(block_pool.cached(self._device_pool))
        admitted = list(filter(self._admission.admits, dropped))
        self._meter.add(metrics.SKIPPED, len(dropped) - len(admitted), "below_threshold")
        self._meter.add(metrics.DROPPED, len(admitted), reason)


def _pop_all(
    keys: dict[int, BlockHashWithGroupId], block_ids: Sequence[int]
) -> dict[int, BlockHashWithGroupId]:
    """Remove the keys of these blocks, and return them by block id."""
    return {i: keys.pop(i) for i in keys.keys() & block_ids} if keys else {}
