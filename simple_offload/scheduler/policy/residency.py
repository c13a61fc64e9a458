"""Residency: which device blocks have contents that the tier has too, or is to get."""

from collections.abc import Iterable, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, KVCacheBlock, get_block_hash

from simple_offload import metrics
from simple_offload.miss_reason import MissReason
from simple_offload.scheduler.event_payload import payloads_of_host_block
from simple_offload.scheduler.policy.admission import Admission
from simple_offload.scheduler.policy.reuse import Reuse
from simple_offload.scheduler.tier import block_pool
from simple_offload.scheduler.tier.run import PayloadsByKey, Run
from simple_offload.transfer import Transfer, as_array

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from simple_offload.scheduler.policy.store_policy import PolicyParts


_MOST_LOOKED_AT = 64
"""Blocks that a lookup may look at, one by one: all unstored ones while stores are early."""

_COMING = -1
"""In place of a host block's id: a store is planned or in flight."""


class StoreRule(Enum):
    """The contents of a request that are stored."""

    ALL = 1
    """Contents that it computes or hits on the device."""
    HITS = 2
    """Contents that it hits on the device."""
    NONE = 3


class Residency:
    """By device block: the host block with the same contents, and whether the tier is to get them.

    ::

        filled ──► to store ──► coming ──► in both ──► lost by the device
                      ▲ │ hit      │failed    │ lost by the tier
                      │ ▼          ▼          ▼
                   bypassed ◄──────┘       to store

    Contents are known from the step that computes or loads them, until the device gives the block
    away. A mistake costs a hit or a second store, never a token: a store takes its key from the
    device block.
    """

    def __init__(self, parts: "PolicyParts", admission: Admission, reuse: Reuse) -> None:
        self._tier, self._groups, self._stores = parts.tier, parts.groups, parts.stores
        self._admission = admission
        self._reuse = reuse
        self._device_pool = parts.kv_cache_manager.block_pool
        self._managers = parts.kv_cache_manager.coordinator.single_type_managers
        self._meter = parts.meter
        self._wants_events = parts.wants_events
        num_blocks = len(self._device_pool.blocks)
        self._host_of = np.zeros(num_blocks, np.int64)
        """By device block, the host block with the same contents; 0: none known."""
        self._is_hit = np.zeros(num_blocks, np.bool_)
        """By device block, whether a request has hit its contents."""
        self._host_at, self._is_hit_at = self._host_of.data, self._is_hit.data
        """The same. For the few blocks of a step, numpy takes several times as long."""
        self._to_store: dict[int, BlockHashWithGroupId] = {}
        """By device block, contents that the tier is to get. It may have them all the same."""
        self._bypassed: dict[int, BlockHashWithGroupId] = {}
        """By device block, contents that it gets, or keeps, only after a hit. Released ones may be
        on their way there."""
        self._payloads: dict[int, PayloadsByKey] = {}
        """By device block, if KV events are wanted: it may outlive its request."""
        self._allocated: dict[int, None] = {}
        """Device blocks that vLLM has given away to be filled since the last step."""
        self._hits: dict[str, list[int]] = {}
        """By request, device blocks whose contents it has hit since the last step."""
        self._cached = block_pool.cached(self._device_pool)
        """The device's prefix cache, by key."""
        self.safe: set[int] = set()
        """Device blocks that must stay safe, as long as the tier has their contents."""
        self._tier.on_removed(self._on_removed)
        block_pool.on_new_blocks(self._device_pool, self._on_new_blocks)

    @property
    def are_stored(self) -> bool:
        """Whether the tier has, or gets, all contents that it is to get."""
        return not self._to_store

    def may_lack_free(self) -> bool:
        """Whether free blocks may have contents that are to be stored. True, without a look, where
        many blocks have such contents."""
        if len(self._to_store) > _MOST_LOOKED_AT:
            return True
        blocks = self._device_pool.blocks
        return any(blocks[block_id].ref_cnt == 0 for block_id in self._to_store)

    # What vLLM does with the device's blocks

    def on_allocated(self, request_id: str, num_hit_tokens: int) -> None:
        """The request has got its first blocks, and the device had ``num_hit_tokens`` of its
        tokens. Some groups are not a part of a hit (a ring, a window that is computed again): their
        blocks are new, and no other request uses them."""
        allocated = self._allocated
        self._hits[request_id] = [
            block.block_id
            for manager in self._managers
            for block in manager.req_to_blocks[request_id][: num_hit_tokens // manager.block_size]
            if not (block.is_null or (block.ref_cnt == 1 and block.block_id in allocated))
        ]

    def drain_used(self) -> tuple[list[int], dict[str, list[int]]]:
        """Two answers since the last call: ids of the blocks that vLLM has given away to be filled,
        in this order; and, by request, ids of the blocks that it has hit. Null blocks are left
        out."""
        allocated, hits = [*self._allocated], self._hits
        self._allocated.clear()
        self._hits = {}
        return allocated, hits

    def on_lost(self, block_ids: Sequence[int]) -> list[BlockHashWithGroupId]:
        """Requests fill these blocks now: the device has lost their contents, in this order.
        Returns those that were to be stored."""
        for block_id in block_ids if self._payloads else ():
            self._payloads.pop(block_id, None)
        lost, bypassed = _pop_all(self._to_store, block_ids), _pop_all(self._bypassed, block_ids)
        released = [
            bypassed.pop(i)
            for i in (reversed(block_ids) if bypassed else ())
            if i in bypassed and self._host_of[i] > 0
        ]
        ids = as_array(block_ids)
        hosts, hit = np.maximum(self._host_of[ids], 0), self._is_hit[ids]
        self._host_of[ids], self._is_hit[ids] = 0, False
        if num_resident := int(np.count_nonzero(hosts)):
            self._tier.device_lost(hosts, hit)  # the null block is no duplicate
        if released:
            self._tier.release(released)
        lacking = lost | bypassed
        if self._reuse.advance(num_resident + len(lacking)):
            new = hosts[(hosts > 0) & ~hit].tolist()
            self._follow(lacking.values(), new)
        return list(lost.values())

    def on_hit(self, block_ids: Sequence[int], rule: StoreRule) -> bool:
        """A request has hit these blocks on the device, parents before children. Contents that the
        tier lacks are to be stored, also bypassed ones. Returns whether there are any."""
        ids = as_array(block_ids)
        self._is_hit[ids] = True
        if rule is StoreRule.NONE:
            return False
        _pop_all(self._bypassed, block_ids)
        lacking = [self._device_pool.blocks[i] for i in ids[self._host_of[ids] == 0].tolist()]
        for block in lacking:
            if block.block_hash is not None:
                self._to_store[block.block_id] = block.block_hash
        return bool(lacking)

    def on_device_reset(self) -> list[BlockHashWithGroupId]:
        """The device's prefix cache has been reset: forget all contents. Returns those that were to
        be stored."""
        self._cached = block_pool.cached(self._device_pool)
        lost = list(self._to_store.values())
        self.clear()
        self._tier.on_device_reset()
        return lost

    def count_dropped(self, keys: Sequence[BlockHashWithGroupId], reason: str) -> None:
        """Count contents that the device has lost, and that were to be stored, as dropped for
        ``reason``, unless the tier or another block has them or they are on their way."""
        absent = self._stores.absent(keys)
        admitted = self._admission.admitted(absent)
        # A request that computes them again has blocks with their keys already.
        self._tier.history.note(MissReason.NOT_STORED, admitted)
        self._tier.history.note(MissReason.BELOW_THRESHOLD, absent - admitted)
        dropped = absent.difference(block_pool.cached(self._device_pool))
        self._meter.add(metrics.SKIPPED, len(dropped - admitted), "below_threshold")
        self._meter.add(metrics.DROPPED, len(dropped & admitted), reason)

    # What has become of contents

    def on_computed(
        self,
        blocks: Sequence[KVCacheBlock],
        keys: Sequence[BlockHashWithGroupId],
        request: "Request",
        rule: StoreRule,
    ) -> Iterable[BlockHashWithGroupId]:
        """``request`` has filled ``blocks``, parents before children. vLLM finds them by
        ``keys``. Returns the keys that the tier neither has nor gets."""
        if self._wants_events:
            self._add_payloads(blocks, keys, request)
        ids, host_at = [block.block_id for block in blocks], self._host_at
        if found := self._tier.device_got(keys):
            there = {i: block.block_id for i, block in zip(ids, found, strict=True) if block}
            num_new = sum(host_at[block_id] == 0 for block_id in there)
            self._meter.add(metrics.SKIPPED, num_new, "already_stored")  # loaded, or computed again
            for block_id, host in there.items():
                host_at[block_id], self._is_hit_at[block_id] = host, True
            _pop_all(self._bypassed, list(there))
        lacking = {i: key for i, key in zip(ids, keys, strict=True) if host_at[i] == 0}
        new = lacking.values()
        if rule is StoreRule.HITS:
            bypassed = {i: key for i, key in lacking.items() if not self._is_hit[i]}
            self._meter.add(metrics.SKIPPED, len(bypassed), "overload")
            self._tier.history.note(MissReason.OVERLOAD, list(bypassed.values()))
            self._bypassed |= bypassed
            lacking = {i: key for i, key in lacking.items() if i not in bypassed}
        if rule is StoreRule.NONE:
            self._tier.history.note(MissReason.WISH, [*new])
        else:
            self._to_store |= lacking
        return new

    def on_loaded(self, transfer: Transfer) -> None:
        """A load has filled device blocks with the contents of host blocks."""
        self._host_of[transfer.device_blocks] = transfer.host_blocks
        self._is_hit[transfer.device_blocks] = True
        self._meter.add(metrics.SKIPPED, len(transfer.device_blocks), "already_stored")

    def on_store_ended(
        self, blocks: Sequence[KVCacheBlock], transfer: Transfer | None, *, ok: bool
    ) -> None:
        """A store of ``blocks`` has ended. ``transfer``: if the tier has got them. If it has
        failed, they are not to be stored again until a request hits them."""
        if transfer is not None:
            self._host_of[transfer.device_blocks] = transfer.host_blocks
            return
        ids = as_array([block.block_id for block in blocks])
        self._host_of[ids] = 0
        for block in blocks if not ok else ():
            if block.block_hash is not None:
                self._bypassed[block.block_id] = block.block_hash
                self._tier.history.note(MissReason.NOT_STORED, [block.block_hash])

    def release(self, released: Iterable[tuple[KVCacheBlock, BlockHashWithGroupId]]) -> None:
        """A request releases contents, which it has in these blocks. The tier evicts them first
        once the device has lost them, and gets, while it is full, no contents anew."""
        is_full = not self._tier.num_empty
        for block, key in released:
            block_id = block.block_id
            if block.block_hash == key:
                self._is_hit[block_id] = False
                if self._host_of[block_id] or block_id in self._to_store:
                    self._bypassed[block_id] = key
                if is_full:
                    self._to_store.pop(block_id, None)

    def clear(self) -> None:
        self._host_of[:] = 0
        self._is_hit[:] = False
        self._to_store.clear()
        self._bypassed.clear()
        self._payloads.clear()

    # Stores

    def choose(self, blocks: Sequence[KVCacheBlock]) -> dict[BlockHashWithGroupId, KVCacheBlock]:
        """Contents among ``blocks`` that are to be stored, and that the tier neither has nor gets:
        by key, the first block of each, in the same order."""
        to_store = self._to_store
        ids = [block.block_id for block in blocks]
        if to_store.keys().isdisjoint(ids):
            return {}
        keys: list[Any] = list(block_pool.keys_of(blocks))
        known = list(map(to_store.get, ids))
        if known != keys or None in keys:
            # Not to be stored, or lost by the device.
            pairs = zip(known, keys, blocks, strict=True)
            blocks = [block for key, now, block in pairs if key is not None and key == now]
            keys = list(block_pool.keys_of(blocks))
        chosen = dict(zip(keys, blocks, strict=True))
        if len(chosen) < len(keys) or not self._stores.lacks(chosen.keys()):
            absent = self._stores.absent(keys)
            chosen = {}
            for key, block in zip(keys, blocks, strict=True):
                if key in absent:
                    chosen.setdefault(key, block)
                elif found := self._tier.ids_of([key]):
                    to_store.pop(block.block_id, None)
                    self._host_of[block.block_id] = found[0]
        admitted = self._admission.admitted(chosen.keys())
        if len(admitted) < len(chosen):
            chosen = {key: block for key, block in chosen.items() if key in admitted}
        return chosen

    def plan(self, chosen: dict[BlockHashWithGroupId, KVCacheBlock]) -> Sequence[KVCacheBlock]:
        """Plan stores of ``chosen``: by key one block of each, as ``choose`` returns them, children
        before parents. Stores parents first, as far as the tier has room without evicting what a
        ``safe`` block holds too. Returns the device blocks of the planned stores, parents first."""
        keys, blocks = [*reversed(chosen)], [*reversed(chosen.values())]
        run = Run(blocks, keys)
        if self._wants_events:
            run.num_tokens = [block.block_hash_num_tokens or 0 for block in blocks]
            run.payloads = [self._payloads.get(block.block_id, {}) for block in blocks]
        may_leave = self._tier.first_out(len(keys))
        covered = block_pool.ids_with_keys_of(may_leave, self._device_pool, self.safe)
        stored = blocks[: len(self._stores.plan(run, covered, self._device_pool))]
        for block in stored:
            self._to_store.pop(block.block_id, None)
            self._host_at[block.block_id] = _COMING
        return stored

    # Details

    def _on_new_blocks(self, blocks: list[KVCacheBlock]) -> None:
        self._allocated.update(dict.fromkeys([block.block_id for block in blocks]))

    def _follow(self, lacking: Iterable[BlockHashWithGroupId], hosts: Sequence[int]) -> None:
        """The device has lost contents that the tier lacks, and those of ``hosts``, which no
        request has hit. Follow one of them."""
        keys = [*lacking, *self._tier.keys_at(hosts)]
        if keys:
            self._reuse.follow(get_block_hash(keys[len(keys) // 2]))

    def _on_removed(self, keys: Iterable[BlockHashWithGroupId]) -> None:
        """The tier has lost ``keys``. Contents that the device still has are to be stored again."""
        shared: set[Any] = self._cached.keys() & keys
        for block in block_pool.blocks_with(self._device_pool, shared) if shared else ():
            block_id, key = block.block_id, block.block_hash
            if self._host_of[block_id] > 0 and key is not None:
                self._host_of[block_id] = 0
                if block_id not in self._bypassed:
                    self._to_store[block_id] = key

    def _add_payloads(
        self,
        blocks: Sequence[KVCacheBlock],
        keys: Sequence[BlockHashWithGroupId],
        request: "Request",
    ) -> None:
        inner_keys = self._device_pool.cached_block_hashes_by_block
        for block, key in zip(blocks, keys, strict=True):
            if block.block_hash == key and block.block_hash_num_tokens is not None:
                self._payloads[block.block_id] = payloads_of_host_block(
                    self._groups,
                    key,
                    inner_keys.get(block.block_id, ()),
                    block.block_hash_num_tokens,
                    request,
                )


def _pop_all(
    keys: dict[int, BlockHashWithGroupId], block_ids: Sequence[int]
) -> dict[int, BlockHashWithGroupId]:
    """Remove the keys of these blocks, and return them by block id."""
    return {i: keys.pop(i) for i in keys.keys() & block_ids} if keys else {}
