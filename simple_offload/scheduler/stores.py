"""Stores: device blocks on their way to the host, across ranks."""

from dataclasses import dataclass, field
from typing import NamedTuple

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, KVCacheBlock

from simple_offload.logs import get_logger
from simple_offload.metadata import Transfer
from simple_offload.scheduler.cpu_tier import CpuTier
from simple_offload.scheduler.in_flight import Ended, InFlight

logger = get_logger(__name__)


class _Pair(NamedTuple):
    """One block's way to the host: what it will be known by, and its place in a chain."""

    device_block: KVCacheBlock
    host_block: KVCacheBlock
    key: BlockHashWithGroupId
    parent: BlockHashWithGroupId | None
    num_tokens: int


@dataclass(slots=True, eq=False)
class _Store:
    pairs: list[_Pair] = field(default_factory=list)
    abandoned: bool = False


class Stores:
    """Planned (paired, both blocks held), in flight, and then committed or released.

    One transfer a step carries the blocks of all requests.
    """

    def __init__(self, tier: CpuTier, in_flight: InFlight) -> None:
        self.tier = tier
        self._numbering = in_flight
        self._planned = _Store()
        self._in_flight: dict[int, _Store] = {}
        self._keys: set[BlockHashWithGroupId] = set()
        """Keys on their way."""

    @property
    def idle(self) -> bool:
        """Whether no store is planned or in flight."""
        return not self._planned.pairs and not self._in_flight

    def has(self, key: BlockHashWithGroupId) -> bool:
        """Whether ``key`` is in the tier or on its way there."""
        return key in self._keys or self.tier.get(key) is not None

    def plan(
        self,
        device_block: KVCacheBlock,
        key: BlockHashWithGroupId,
        parent: BlockHashWithGroupId | None,
        num_tokens: int,
        device_pool: BlockPool,
    ) -> bool:
        """Pair ``device_block``, whose bytes are computed by the end of this step, with a host
        block, and hold both. False, with nothing held, when the tier has no room for it."""
        host_block = self.tier.allocate(parent)
        if host_block is None:
            return False
        device_pool.touch((device_block,))
        self._planned.pairs.append(_Pair(device_block, host_block, key, parent, num_tokens))
        self._keys.add(key)
        return True

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
                (pair.device_block.block_id for pair in store.pairs),
                (pair.host_block.block_id for pair in store.pairs),
            )
        ]

    def finish(self, ended: Ended, device_pool: BlockPool) -> bool:
        """Commit a store that succeeded on every rank, forget one that failed, release both
        sides; False when ``ended`` is not a store."""
        store = self._in_flight.pop(ended.id, None)
        if store is None:
            return False
        keep = ended.ok and not store.abandoned
        for pair in store.pairs:
            if keep:
                self.tier.commit(pair.host_block, pair.key, pair.parent, pair.num_tokens)
            else:
                self.tier.unpin((pair.host_block,))
            if not store.abandoned:
                self._keys.discard(pair.key)
        device_pool.free_blocks(pair.device_block for pair in reversed(store.pairs))
        return True

    def abandon(self, device_pool: BlockPool) -> None:
        """Let no store that is planned or in flight be committed. What is in flight stays held
        until its end: the copy may be under way."""
        planned, self._planned = self._planned, _Store()
        self.tier.unpin(pair.host_block for pair in planned.pairs)
        device_pool.free_blocks(pair.device_block for pair in reversed(planned.pairs))
        for store in self._in_flight.values():
            store.abandoned = True
        self._keys.clear()

    def frees_device_blocks(self) -> bool:
        """Whether the end of a store, planned or in flight, would return a device block to the
        pool."""
        return any(
            pair.device_block.ref_cnt == 1
            for store in (self._planned, *self._in_flight.values())
            for pair in store.pairs
        )

    def check_integrity(self) -> None:
        """Raise AssertionError unless every block of a store is held and its key hidden."""
        keys = set()
        for store in (self._planned, *self._in_flight.values()):
            for pair in store.pairs:
                assert pair.device_block.ref_cnt > 0, f"{pair.device_block}: free during a store"
                assert pair.host_block.ref_cnt > 0, f"{pair.host_block}: free during a store"
                assert pair.host_block.block_hash is None, f"{pair.host_block}: findable too soon"
                if not store.abandoned:
                    keys.add(pair.key)
        assert keys == self._keys, "keys on their way differ from the stores'"
