"""Stores: device blocks on their way to the host, across ranks."""

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash, BlockHashWithGroupId, KVCacheBlock

from simple_offload import metrics
from simple_offload.logs import get_logger
from simple_offload.metadata import Transfer
from simple_offload.scheduler.event_payload import Origins
from simple_offload.scheduler.kv_events import KVEvents
from simple_offload.scheduler.rank_reports import Ended, InFlight
from simple_offload.scheduler.tier import block_pool
from simple_offload.scheduler.tier.cpu_tier import CpuTier
from simple_offload.scheduler.tier.run import Run

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
    early: bool = False
    """Whether it may be committed before its parent is: whoever stores it will store that too."""


@dataclass(slots=True, eq=False)
class _Store:
    runs: list[tuple[Run, list[KVCacheBlock]]] = field(default_factory=list)
    """Each with the host blocks that it is copied to."""
    device_blocks: list[KVCacheBlock] = field(default_factory=list)
    """Of all runs."""
    host_blocks: list[KVCacheBlock] = field(default_factory=list)
    """Of all runs."""
    keys: set[BlockHashWithGroupId] = field(default_factory=set)
    """Of all runs, unless abandoned. They are dropped as a whole: to take thousands of keys out
    of a set takes as long as to put them there."""
    abandoned: bool = False

    def add(self, run: Run, host_blocks: list[KVCacheBlock]) -> None:
        """Copy a run too."""
        self.runs.append((run, host_blocks))
        self.device_blocks += run.device_blocks
        self.host_blocks += host_blocks
        self.keys.update(run.keys)

    def abandon(self) -> None:
        """Nothing of it is to be kept."""
        self.abandoned = True
        self.keys.clear()


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
        self.num_failed = 0
        """Stores that have failed."""
        self.first_to_go: dict[int, int] = {}
        """By id of a device block that is to be evicted first once it is released: its place
        among those. Of no other meaning, so whoever plans a store may add and remove blocks."""

    @property
    def idle(self) -> bool:
        """Whether no store is planned or in flight."""
        return not self._planned.runs and not self._in_flight

    def has(self, key: BlockHashWithGroupId) -> bool:
        """Whether ``key`` is in the tier or on its way there."""
        return self.tier.lookup.has(key) or self._is_coming(key)

    def count_first(self, block_hashes: list[BlockHash], group: int, limit: int, guess: int) -> int:
        """How many of the first ``limit`` blocks of a request of a chained group are in the tier
        or on their way there. ``guess``: what it will probably be."""
        return self.tier.lookup.count_first(block_hashes, group, limit, guess, self._is_coming)

    def has_none(self, keys: Sequence[BlockHashWithGroupId]) -> bool:
        """Whether none of ``keys``, at least one, of blocks that follow each other in a chain, is
        in the tier or on its way there. What follows a block that has left the tier, or did not
        get there, may be on its way unnoticed: it will not be kept without that block."""
        if not self.tier.lookup.has_none(keys):
            return False
        if self.tier.groups.is_chained(keys[0]):
            return not self._is_coming(keys[0])  # nor is what follows it, then
        stores = (self._planned, *self._in_flight.values())
        return all(store.keys.isdisjoint(keys) for store in stores)

    def plan(
        self,
        blocks: Sequence[Storable],
        keep: Callable[[], Container[BlockHashWithGroupId]],
        pool: BlockPool,
    ) -> int:
        """Pair device blocks, whose bytes are computed by the end of this step, with host
        blocks, and hold both. Returns for how many of them, from the first on, the tier had
        room without evicting one that holds a key in ``keep()``."""
        host_blocks = self.tier.allocate(len(blocks), keep)
        for block, host_block in zip(blocks, host_blocks, strict=False):
            run = Run(
                block.device_blocks, (block.key,), block.parent, block.num_tokens, early=block.early
            )
            self._add(run, [host_block], pool)
        return len(host_blocks)

    def plan_run(
        self, run: Run, keep: Callable[[], Container[BlockHashWithGroupId]], pool: BlockPool
    ) -> int:
        """``plan`` for blocks that follow each other."""
        host_blocks = self.tier.allocate(len(run), keep)
        if host_blocks:
            self._add(run.first(len(host_blocks)), host_blocks, pool)
        return len(host_blocks)

    def _add(self, run: Run, host_blocks: list[KVCacheBlock], pool: BlockPool) -> None:
        """Plan the copy of a run; its host blocks are held already."""
        block_pool.hold(pool, run.device_blocks)
        by_block = pool.cached_block_hashes_by_block
        if by_block and self.tier.groups.num_parts == 1:
            inner_keys = [tuple(by_block.get(block.block_id, ())) for block in run.device_blocks]
            if any(inner_keys):
                run.inner_keys = inner_keys
        if self.origins is not None:
            count = self.tier.groups.num_parts
            parts = (run.device_blocks[i * count : (i + 1) * count] for i in range(len(run)))
            run.origins = [self.origins.of(blocks) for blocks in parts]
        self._planned.add(run, host_blocks)

    def submit(self) -> list[Transfer]:
        """The planned store as a transfer (none if nothing is planned), in flight from now on."""
        if not self._planned.runs:
            return []
        store, self._planned = self._planned, _Store()
        transfer_id = self._numbering.begin()
        self._in_flight[transfer_id] = store
        return [
            Transfer.pairing(
                transfer_id,
                [block.block_id for block in store.device_blocks],
                self.tier.slots(store.host_blocks),
            )
        ]

    def finish(self, ended: Ended, device_pool: BlockPool) -> bool:
        """Commit a store that succeeded on every rank, forget one that failed, release both
        sides; False when ``ended`` is not a store."""
        store = self._in_flight.pop(ended.id, None)
        if store is None:
            return False
        meter = self.tier.meter
        if ended.ok and not store.abandoned:
            useless = self.tier.commit_all(store.runs)
            meter.add(metrics.DROPPED, sum(map(len, useless)), "obsolete")
            if self.events is not None:
                for (run, _), places in zip(store.runs, useless, strict=True):
                    self.events.stored_run(run, places)
        else:
            self.tier.unpin(store.host_blocks)
        if not ended.ok:
            self.num_failed += 1
            meter.add(metrics.DROPPED, len(store.host_blocks), "copy_failed")
        elif store.abandoned:
            meter.add(metrics.DROPPED, len(store.host_blocks), "reset")
        self._release(store, device_pool)
        return True

    def abandon(self, device_pool: BlockPool) -> None:
        """Let no store that is planned or in flight be committed. What is in flight stays held
        until its end: the copy may be under way."""
        planned, self._planned = self._planned, _Store()
        self.tier.meter.add(metrics.DROPPED, len(planned.host_blocks), "reset")
        self.tier.unpin(planned.host_blocks)
        self._release(planned, device_pool)
        for store in self._in_flight.values():
            store.abandon()

    def frees_device_blocks(self) -> bool:
        """Whether the end of a store, planned or in flight, would return a device block to the
        pool."""
        return any(
            block.ref_cnt == 1
            for store in (self._planned, *self._in_flight.values())
            for block in store.device_blocks
        )

    def _is_coming(self, key: bytes) -> bool:
        """Whether ``key`` is on its way to the tier."""
        if key in self._planned.keys:
            return True
        for store in self._in_flight.values():  # noqa: SIM110 (a generator takes far longer)
            if key in store.keys:
                return True
        return False

    def _release(self, store: _Store, device_pool: BlockPool) -> None:
        """Last block first, as vLLM frees a request's: the tail of a prefix leaves first. But
        blocks that were about to be evicted go back to where they were."""
        if not self.first_to_go:
            block_pool.release(device_pool, reversed(store.device_blocks))
            return
        blocks = store.device_blocks[::-1]
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
        for store in (self._planned, *self._in_flight.values()):
            for run, host_blocks in store.runs:
                held = (*run.device_blocks, *host_blocks)
                num_parts = self.tier.groups.num_parts
                assert len(run.device_blocks) == num_parts * len(host_blocks), f"{run}: not whole"
                assert len(run) == len(host_blocks), f"{run}: not paired"
                assert all(block.ref_cnt > 0 for block in held), f"{held}: free during a store"
                assert all(block.block_hash is None for block in host_blocks), (
                    f"{host_blocks}: findable too soon"
                )
            keys = {key for run, _ in store.runs for key in run.keys}
            assert store.keys == (set() if store.abandoned else keys), "keys on their way differ"
        held_ids = {
            block.block_id
            for store in (self._planned, *self._in_flight.values())
            for block in store.device_blocks
        }
        assert self.first_to_go.keys() <= held_ids, "a device block keeps a place it does not need"
