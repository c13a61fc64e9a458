"""Stores: device blocks on their way to the host tier, across ranks."""

from collections.abc import Callable, Container, Iterable, Sequence, Set
from dataclasses import dataclass, field

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, KVCacheBlock, get_group_id

from simple_offload import metrics
from simple_offload.miss_reason import MissReason
from simple_offload.scheduler.rank_reports import Ended, TransferLedger
from simple_offload.scheduler.tier import block_pool
from simple_offload.scheduler.tier.cpu_tier import CpuTier
from simple_offload.scheduler.tier.groups import Groups
from simple_offload.scheduler.tier.run import Run
from simple_offload.transfer import Transfer


@dataclass(slots=True, eq=False)
class _Store:
    """Runs that one transfer copies, and their blocks and keys together."""

    runs: list[Run] = field(default_factory=list)
    device_blocks: list[KVCacheBlock] = field(default_factory=list)
    host_blocks: list[KVCacheBlock] = field(default_factory=list)
    keys: set[BlockHashWithGroupId] = field(default_factory=set)
    """Empty once the store is cancelled: it is not committed, whatever becomes of the copy. Dropped
    as a whole: to remove thousands of keys from a set takes as long as to add them."""
    transfer: Transfer | None = None
    """Once it is in flight."""

    def add(self, run: Run) -> None:
        self.runs.append(run)
        self.device_blocks += run.device_blocks
        self.host_blocks += run.host_blocks
        self.keys.update(run.keys)


class Stores:
    """A store is planned (paired, both blocks pinned), then in flight, then committed or released.

    One transfer a step carries the runs of all requests.
    """

    def __init__(
        self,
        tier: CpuTier,
        groups: Groups,
        ledger: TransferLedger,
        meter: metrics.Meter,
    ) -> None:
        self.on_committed: list[Callable[[Run, Sequence[int]], None]] = []
        """Called with each run that has become findable, and its useless places."""
        self._tier = tier
        self._groups = groups
        self._ledger = ledger
        self._meter = meter
        self._planned = _Store()
        self._in_flight: dict[int, _Store] = {}

    @property
    def idle(self) -> bool:
        """Whether no store is planned or in flight."""
        return not self._planned.runs and not self._in_flight

    def lacks(self, keys: Set[BlockHashWithGroupId]) -> bool:
        """Whether none of ``keys`` is in the tier or on its way there."""
        stores = (self._planned, *self._in_flight.values())
        return self._tier.lacks(keys) and all(keys.isdisjoint(store.keys) for store in stores)

    def absent(self, keys: Iterable[BlockHashWithGroupId]) -> set[BlockHashWithGroupId]:
        """The ``keys`` that are neither in the tier nor on their way there."""
        absent = self._tier.absent(keys)
        for store in (self._planned, *self._in_flight.values()):
            if not absent.isdisjoint(store.keys):
                absent -= store.keys
        return absent

    def plan(self, run: Run, keep: Container[int], device_pool: BlockPool) -> list[KVCacheBlock]:
        """Pair the device blocks of ``run``, whose bytes are computed by the end of this step, with
        host blocks, and pin both. Returns the host blocks: as many, from the first on, as the tier
        has room for without evicting a block whose id is in ``keep``."""
        host_blocks = self._tier.allocate_for(run.keys, keep)
        if host_blocks:
            if len(host_blocks) < len(run.keys):
                run = run.first(len(host_blocks))
            run.host_blocks = host_blocks
            block_pool.touch(device_pool, run.device_blocks)
            by_block = device_pool.cached_block_hashes_by_block
            if by_block and self._groups.num_sub_blocks == 1:
                inner_keys = [tuple(by_block.get(b.block_id, ())) for b in run.device_blocks]
                if any(inner_keys):
                    run.inner_keys = inner_keys
            self._planned.add(run)
        return host_blocks

    def submit(self) -> list[Transfer]:
        """The planned store as a transfer, in flight from now on; none if nothing is planned."""
        if not self._planned.runs:
            return []
        store, self._planned = self._planned, _Store()
        transfer_id = self._ledger.begin()
        self._in_flight[transfer_id] = store
        store.transfer = Transfer.pairing(
            transfer_id,
            [block.block_id for block in store.device_blocks],
            self._tier.slots(store.host_blocks),
            by_place=self._tier.slots_by_place,
        )
        return [store.transfer]

    def on_ended(self, ended: Ended) -> tuple[Sequence[KVCacheBlock], Transfer | None] | None:
        """Commit a store that succeeded on every rank, or release its host blocks. Returns its
        device blocks, in order, whose references are the caller's now, and its transfer if it was
        committed; None if ``ended`` is not a store."""
        store = self._in_flight.pop(ended.id, None)
        if store is None:
            return None
        if not (ended.ok and store.keys):
            self._tier.unpin(store.host_blocks)
            reason = "reset" if ended.ok else "copy_failed"
            self._meter.add(metrics.DROPPED, len(store.host_blocks), reason)
            return store.device_blocks, None
        moved = [run for run in store.runs if self._has_moved(run)]
        for run in moved:
            self._tier.unpin(run.host_blocks)
        runs = [run for run in store.runs if run not in moved]
        useless = [self._tier.commit(run) for run in runs]
        num_useless = sum(map(len, useless)) + sum(len(run.host_blocks) for run in moved)
        self._meter.add(metrics.STORED, len(store.host_blocks) - num_useless)
        self._meter.add(metrics.DROPPED, num_useless, "obsolete")
        for callback in self.on_committed:
            for run, places in zip(runs, useless, strict=True):
                callback(run, places)
        return store.device_blocks, store.transfer

    def reset(self) -> Sequence[KVCacheBlock]:
        """Drop the planned store, and commit no store that is in flight: its host blocks stay
        pinned until it ends, since the copy may be under way. Returns the device blocks of all. The
        caller has their references now: no lookup finds what a copy still reads there."""
        planned, self._planned = self._planned, _Store()
        self._meter.add(metrics.DROPPED, len(planned.host_blocks), "reset")
        self._tier.unpin(planned.host_blocks)
        device_blocks = planned.device_blocks
        for store in (planned, *self._in_flight.values()):
            self._tier.history.note(MissReason.RESET, list(store.keys))
        for store in self._in_flight.values():
            store.keys.clear()
            device_blocks += store.device_blocks
            store.device_blocks = []
        return device_blocks

    @property
    def device_blocks(self) -> list[KVCacheBlock]:
        """The device blocks of all stores, one for each reference."""
        stores = (self._planned, *self._in_flight.values())
        return [block for store in stores for block in store.device_blocks]

    def frees_device_blocks(self) -> bool:
        """Whether the end of a store, planned or in flight, would return a device block to the
        pool."""
        return any(block.ref_cnt == 1 for block in self.device_blocks)

    def _has_moved(self, run: Run) -> bool:
        """Whether vLLM has given the keys of states to other blocks since the store was planned,
        and may have overwritten these (vllm#57505)."""
        if not run.on_device or get_group_id(run.keys[0]) in self._groups.stable_ids:
            return False
        return list(block_pool.keys_of(run.device_blocks)) != list(run.keys)
