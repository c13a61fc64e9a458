"""DeviceContents: what the device's blocks hold."""

from collections.abc import Container, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

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
        self._cached = block_pool.cached(device_pool)
        self._found: set[int] = set()
        """Ids of blocks with contents that a request has found, in either cache."""
        self._host_blocks: dict[int, dict[BlockHashWithGroupId, _HostBlock]] = {}
        """By id of a block and key, if host blocks have several sub-blocks: chains that fork inside
        a host block share device blocks."""
        self._failed: set[BlockHashWithGroupId] = set()
        """Keys of host blocks whose store has failed, until the device lets go of the contents or a
        request finds them."""
        self._payloads: dict[int, PayloadsByKey] = {}
        """By id of a (last sub-) block, if KV events are wanted: it may outlive its request."""

    def find_reset(self, reason: str) -> None:
        """Forget all contents if the device's prefix cache has been reset. They count as dropped
        for ``reason`` if they are not in the tier."""
        cached = block_pool.cached(self._device_pool)
        if self._cached is not cached:
            self._cached = cached
            self._count_dropped(self._forget(range(len(self._keys))), reason)

    def on_allocated(self, blocks: Sequence[KVCacheBlock], reason: str) -> None:
        """Requests have got ``blocks``, to fill or because they have found their contents. Contents
        that the device has lost count as dropped for ``reason`` if they are not in the tier."""
        keys = self._keys
        filled_anew = [
            block.block_id
            for block, key in zip(blocks, block_pool.keys_of(blocks), strict=True)
            if key is None or keys[block.block_id] != key
        ]
        self._count_dropped(self._forget(filled_anew), reason)
        if len(filled_anew) < len(blocks):
            found = [block for block in blocks if keys[block.block_id] is not None]
            self._found.update([block.block_id for block in found])
            if self._failed:  # worth another try
                self._failed.difference_update([keys[block.block_id] for block in found])
            self._add_copies(found)

    def record(
        self,
        blocks: Sequence[KVCacheBlock],
        keys: Sequence[BlockHashWithGroupId],
        request: "Request",
    ) -> None:
        """Record the contents of ``blocks`` of ``request``, all sub-blocks of whole host blocks, as
        ``keys``. Blocks that vLLM does not find by their key are left out."""
        known, new = self._keys, []
        for block, found_by, key in zip(blocks, block_pool.keys_of(blocks), keys, strict=True):
            if found_by == key and known[block.block_id] != key:
                known[block.block_id] = key
                new.append(block)
        if not new:
            return
        if self._groups.num_sub_blocks > 1:
            self._join(blocks, keys)
        if self._wants_events:
            self._add_payloads(blocks, keys, request)
        # What the tier has was loaded, or computed again.
        self._meter.add(metrics.SKIPPED, self._add_copies(new), "already_stored")

    def on_store_failed(self, blocks: Sequence[KVCacheBlock]) -> None:
        """The contents of ``blocks``, all sub-blocks of whole host blocks, are not to be stored
        again until a request finds them."""
        count = self._groups.num_sub_blocks
        keys = [self._keys[block.block_id] for block in blocks[count - 1 :: count]]
        self._failed.update([key for key in keys if key is not None])

    def choose(self, blocks: Sequence[KVCacheBlock]) -> dict[BlockHashWithGroupId, KVCacheBlock]:
        """Contents among ``blocks`` that are to be stored, and that the tier neither has nor gets:
        by key, one block of each, in the same order."""
        blocks, keys = self._host_keys(blocks)
        absent = self._stores.absent(keys)
        if self._failed:
            absent -= self._failed
        if self._admission.threshold > 1:
            absent = set(filter(self._admission.admits, absent))
        if not absent:
            return {}
        return {key: block for block, key in zip(blocks, keys, strict=True) if key in absent}

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
        return blocks[: count * self._groups.num_sub_blocks]

    def clear(self) -> None:
        """Forget all contents."""
        self._keys = [None] * len(self._keys)
        self._found.clear()
        self._host_blocks.clear()
        self._failed.clear()
        self._payloads.clear()

    # Details

    def _host_keys(
        self, blocks: Sequence[KVCacheBlock]
    ) -> tuple[Sequence[KVCacheBlock], list[BlockHashWithGroupId]]:
        """Those of ``blocks`` whose contents are known, and the key of each. A block that is a part
        of several host blocks comes once with each."""
        known = self._keys
        if self._groups.num_sub_blocks == 1:
            keys = [
                key if known[block.block_id] == key else None
                for block, key in zip(blocks, block_pool.keys_of(blocks), strict=True)
            ]
            pairs = zip(blocks, keys, strict=True)
            if None in keys:
                return [b for b, key in pairs if key is not None], [
                    k for k in keys if k is not None
                ]
            return blocks, cast(list[BlockHashWithGroupId], keys)
        parts = [
            (block, key)
            for block in blocks
            for key, host_block in self._host_blocks.get(block.block_id, {}).items()
            if self._is_whole(host_block)
        ]
        return [block for block, _ in parts], [key for _, key in parts]

    def _add_copies(self, blocks: Sequence[KVCacheBlock]) -> int:
        """Requests have got contents with ``blocks``, which are recorded. Returns how many of them
        the tier has too."""
        blocks, keys = self._host_keys(blocks)
        present = self._tier.present(keys)
        if not present:
            return 0
        if len(present) < len(keys):
            pairs = [pair for pair in zip(blocks, keys, strict=True) if pair[1] in present]
            blocks, keys = [block for block, _ in pairs], [key for _, key in pairs]
        self._found.update([block.block_id for block in blocks])
        return self._tier.add_copies(dict.fromkeys(keys))

    def _is_whole(self, host_block: _HostBlock) -> bool:
        """Whether the device still has all of a host block."""
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
        those that could be stored, and that the tier lacks."""
        known, found = self._keys, self._found
        were_found = found.intersection(block_ids)
        found -= were_found
        others: Sequence[int] = block_ids
        if were_found:
            others = [block_id for block_id in block_ids if block_id not in were_found]
        lacking: list[BlockHashWithGroupId] = []
        for ids, way in ((others, False), ([i for i in block_ids if i in were_found], True)):
            if self._groups.num_sub_blocks == 1:
                lost = dict.fromkeys([known[block_id] for block_id in ids])
            else:
                lost = dict.fromkeys(key for block_id in ids for key in self._split(block_id))
            keys = [key for key in lost if key is not None]
            if keys:
                lacking += self._tier.remove_copies(keys, found=way)
            if self._failed:
                lacking = [key for key in lacking if key not in self._failed]
                self._failed.difference_update(keys)
        for block_id in block_ids:
            known[block_id] = None
        for block_id in block_ids if self._payloads else ():
            self._payloads.pop(block_id, None)
        return lacking

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
