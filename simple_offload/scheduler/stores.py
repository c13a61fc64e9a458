"""Stores: device blocks on their way to the host, across ranks."""

from collections.abc import Collection, Container, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, KVCacheBlock

from simple_offload import metrics
from simple_offload.logs import get_logger
from simple_offload.metadata import Transfer
from simple_offload.scheduler.cpu_tier import CpuTier
from simple_offload.scheduler.events import KVEvents, Origins
from simple_offload.scheduler.in_flight import Ended, InFlight

if TYPE_CHECKING:
    from vllm.v1.request import Request

logger = get_logger(__name__)


class Storable(NamedTuple):
    """A host block's worth of device blocks to be stored: what they will be known by, and their
    place in a chain."""

    device_blocks: tuple[KVCacheBlock, ...]
    """As many as a host block has parts, in order."""
    key: BlockHashWithGroupId
    parent: BlockHashWithGroupId | None
    num_tokens: int
    """Of the prefix that ends with it."""
    inner_keys: tuple[BlockHashWithGroupId, ...] = ()
    """Of prefixes that end inside the block, by which the device finds it too. ``Stores.plan``
    fills them in. Host blocks of several parts have none."""
    early: bool = False
    """Whether it may be committed before its parent is: whoever stores it will store that too."""
    request: "Request | None" = None
    """Whose tokens they are, for KV events. ``Stores.plan`` fills it in, if there are any."""


@dataclass(slots=True, eq=False)
class _Store:
    pairs: list[tuple[Storable, KVCacheBlock]] = field(default_factory=list)
    """Each with the host block that it is copied to."""
    abandoned: bool = False


class Stores:
    """Planned (paired, both blocks held), in flight, and then committed or released.

    One transfer a step carries the blocks of all requests.
    """

    def __init__(self, tier: CpuTier, in_flight: InFlight) -> None:
        self.tier = tier
        self._numbering = in_flight
        self.events: KVEvents | None = None
        self.origins: Origins | None = None
        self._planned = _Store()
        self._in_flight: dict[int, _Store] = {}
        self._keys: set[BlockHashWithGroupId] = set()
        """Keys on their way."""
        self.num_failed = 0
        """Stores that have failed."""
        self.first_to_go: dict[int, int] = {}
        """By id of a device block that is to be evicted first once it is released: its place
        among those. Of no other meaning, so whoever plans a store may add and remove blocks."""

    @property
    def idle(self) -> bool:
        """Whether no store is planned or in flight."""
        return not self._planned.pairs and not self._in_flight

    def has(self, key: BlockHashWithGroupId) -> bool:
        """Whether ``key`` is in the tier or on its way there."""
        return key in self._keys or self.tier.get(key) is not None

    def has_none(self, keys: Collection[BlockHashWithGroupId]) -> bool:
        """Whether none of ``keys`` is in the tier or on its way there."""
        return self._keys.isdisjoint(keys) and self.tier.has_none(keys)

    def plan(
        self, blocks: Sequence[Storable], keep: Container[BlockHashWithGroupId], pool: BlockPool
    ) -> int:
        """Pair device blocks, whose bytes are computed by the end of this step, with host
        blocks, and hold both. Returns for how many of them, from the first on, the tier had
        room without evicting one that holds a key in ``keep``."""
        host_blocks = self.tier.allocate(len(blocks), keep)
        taken = blocks[: len(host_blocks)]
        pool.touch([part for block in taken for part in block.device_blocks])
        inner_keys = pool.cached_block_hashes_by_block
        if inner_keys and self.tier.num_parts == 1:
            taken = [
                block._replace(
                    inner_keys=tuple(inner_keys.get(block.device_blocks[0].block_id, ()))
                )
                for block in taken
            ]
        if self.origins is not None:
            taken = [
                block._replace(request=self.origins.of(block.device_blocks[-1])) for block in taken
            ]
        self._planned.pairs.extend(zip(taken, host_blocks, strict=True))
        self._keys.update([block.key for block in taken])
        return len(taken)

    def submit(self) -> list[Transfer]:
        """The planned store as a transfer (none if nothing is planned), in flight from now on."""
        if not self._planned.pairs:
            return []
        store, self._planned = self._planned, _Store()
        transfer_id = self._numbering.begin()
        self._in_flight[transfer_id] = store
        return [
            Transfer.pairing(
                transfer_id,
                [part.block_id for block, _ in store.pairs for part in block.device_blocks],
                self.tier.slots([host_block for _, host_block in store.pairs]),
            )
        ]

    def finish(self, ended: Ended, device_pool: BlockPool) -> bool:
        """Commit a store that succeeded on every rank, forget one that failed, release both
        sides; False when ``ended`` is not a store."""
        store = self._in_flight.pop(ended.id, None)
        if store is None:
            return False
        keep = ended.ok and not store.abandoned
        meter = self.tier.meter
        if keep:
            kept = self.tier.commit_all(store.pairs)
            meter.add(metrics.DROPPED, len(kept) - sum(kept), "obsolete")
            if self.events is not None:
                for (block, _), useful in zip(store.pairs, kept, strict=True):
                    if useful:
                        self.events.stored(
                            block.key, block.inner_keys, block.num_tokens, block.request
                        )
        else:
            self.tier.unpin([host_block for _, host_block in store.pairs])
        if not ended.ok:
            self.num_failed += 1
            meter.add(metrics.DROPPED, len(store.pairs), "copy_failed")
        elif store.abandoned:
            meter.add(metrics.DROPPED, len(store.pairs), "reset")
        if not store.abandoned:
            self._keys.difference_update([block.key for block, _ in store.pairs])
        self._release(store, device_pool)
        return True

    def abandon(self, device_pool: BlockPool) -> None:
        """Let no store that is planned or in flight be committed. What is in flight stays held
        until its end: the copy may be under way."""
        planned, self._planned = self._planned, _Store()
        self.tier.meter.add(metrics.DROPPED, len(planned.pairs), "reset")
        self.tier.unpin(host_block for _, host_block in planned.pairs)
        self._release(planned, device_pool)
        for store in self._in_flight.values():
            store.abandoned = True
        self._keys.clear()

    def frees_device_blocks(self) -> bool:
        """Whether the end of a store, planned or in flight, would return a device block to the
        pool."""
        return any(
            part.ref_cnt == 1
            for store in (self._planned, *self._in_flight.values())
            for block, _ in store.pairs
            for part in block.device_blocks
        )

    def _release(self, store: _Store, device_pool: BlockPool) -> None:
        """Last block first, as vLLM frees a request's: the tail of a prefix leaves first. But
        blocks that were about to be evicted go back to where they were."""
        blocks = [
            part for block, _ in reversed(store.pairs) for part in reversed(block.device_blocks)
        ]
        if not self.first_to_go:
            device_pool.free_blocks(blocks)
            return
        places = {
            block.block_id: place
            for block in blocks
            if (place := self.first_to_go.pop(block.block_id, None)) is not None
        }
        first = [b for b in blocks if b.block_id in places and b.ref_cnt == 1]
        first.sort(key=lambda block: places[block.block_id])
        for block in first:
            block.ref_cnt = 0
        device_pool.free_block_queue.prepend_n(first)
        device_pool.free_blocks([block for block in blocks if block.ref_cnt > 0])

    def check_integrity(self) -> None:
        """Raise AssertionError unless every block of a store is held and its key hidden."""
        keys = set()
        for store in (self._planned, *self._in_flight.values()):
            for block, host_block in store.pairs:
                held = (*block.device_blocks, host_block)
                assert len(block.device_blocks) == self.tier.num_parts, f"{block}: not whole"
                assert all(b.ref_cnt > 0 for b in held), f"{held}: free during a store"
                assert host_block.block_hash is None, f"{host_block}: findable too soon"
                if not store.abandoned:
                    keys.add(block.key)
        assert keys == self._keys, "keys on their way differ from the stores'"
        held_ids = {
            part.block_id
            for store in (self._planned, *self._in_flight.values())
            for block, _ in store.pairs
            for part in block.device_blocks
        }
        assert self.first_to_go.keys() <= held_ids, "a device block keeps a place it does not need"
