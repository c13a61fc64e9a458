"""Loads: requests that wait for host blocks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from simple_offload.metadata import Transfer
from simple_offload.scheduler.cpu_tier import CpuTier, HostHit
from simple_offload.scheduler.in_flight import Ended, InFlight

if TYPE_CHECKING:
    from vllm.v1.request import Request


class _PinnedHit(NamedTuple):
    """A hit that a request was told of and has no device blocks for yet."""

    num_computed_tokens: int
    hit: HostHit
    pins: list[KVCacheBlock]
    tier_version: int


@dataclass(slots=True, eq=False)
class _Load:
    request_id: str
    device_blocks: list[KVCacheBlock]
    host_blocks: list[KVCacheBlock]
    pins: list[KVCacheBlock]


class Loads:
    """From lookup to the last rank's report: hit (pinned), planned (paired), in flight.

    A hit stays pinned until the request has its device blocks, looks again, or ends: vLLM
    0.33 may put off the allocation hook by some steps.
    """

    def __init__(self, tier: CpuTier, in_flight: InFlight) -> None:
        self.tier = tier
        self._numbering = in_flight
        self._hits: dict[str, _PinnedHit] = {}
        self._planned: list[_Load] = []
        self._in_flight: dict[int, _Load] = {}

    @property
    def idle(self) -> bool:
        """Whether no load is planned or in flight."""
        return not self._planned and not self._in_flight

    @property
    def num_hits(self) -> int:
        """Hits pinned for requests that have no device blocks yet."""
        return len(self._hits)

    def is_loading(self, request_id: str) -> bool:
        """Whether blocks of this request are still to be filled by a load."""
        pending = (*self._planned, *self._in_flight.values())
        return any(load.request_id == request_id for load in pending)

    def lookup(self, request: "Request", num_computed_tokens: int) -> int:
        """Tokens beyond ``num_computed_tokens`` that the tier can supply; pins them.

        The last token of a request is always computed, for its logits.
        """
        known = self._hits.get(request.request_id)
        if (
            known is not None
            and known.num_computed_tokens == num_computed_tokens
            and known.tier_version == self.tier.version
        ):
            return known.hit.num_tokens
        self.forget(request.request_id)
        hit = self.tier.lookup(
            request.block_hashes,
            num_computed_tokens,
            max_tokens=request.num_tokens - 1 - num_computed_tokens,
        )
        if hit.num_tokens == 0:
            return 0
        pins = self.tier.lineage(request.block_hashes, num_computed_tokens)
        pins.extend(block for group in hit.blocks for block in group if not block.is_null)
        self.tier.pin(pins)
        self._hits[request.request_id] = _PinnedHit(
            num_computed_tokens, hit, pins, self.tier.version
        )
        return hit.num_tokens

    def forget(self, request_id: str) -> None:
        """Unpin the hit of a request that will not load it."""
        if (known := self._hits.pop(request_id, None)) is not None:
            self.tier.unpin(known.pins)

    def plan(
        self,
        request: "Request",
        device_blocks: Sequence[Sequence[KVCacheBlock]],
        num_external_tokens: int,
        device_pool: BlockPool,
    ) -> None:
        """Pair the pinned hit with the request's device blocks, by group from its first token
        on, and hold both until the load has ended on every rank.

        ``num_external_tokens``: how much of the hit vLLM takes. RuntimeError when the pairing
        would leave a device block that attention reads without its bytes.
        """
        known = self._hits.pop(request.request_id, None)
        if known is None:
            raise RuntimeError(
                f"{request.request_id}: vLLM allocated {num_external_tokens} external tokens "
                "that no lookup offered"
            )
        hit, pins = known.hit, known.pins
        if num_external_tokens != hit.num_tokens:
            # A shorter prefix is not a part of this hit where windows are: look again.
            hit = self.tier.lookup(
                request.block_hashes, known.num_computed_tokens, num_external_tokens
            )
            again = [block for group in hit.blocks for block in group if not block.is_null]
            self.tier.pin(again)
            pins = [*pins, *again]
        if num_external_tokens != hit.num_tokens:
            raise RuntimeError(
                f"{request.request_id}: vLLM takes {num_external_tokens} external tokens of "
                f"{known.hit.num_tokens}, which the host tier cannot supply"
            )
        load = _Load(request.request_id, [], [], pins)
        for group, host_blocks in enumerate(hit.blocks):
            first = known.num_computed_tokens // self.tier.block_sizes[group]
            table = device_blocks[group][first : first + len(host_blocks)]
            for device_block, host_block in zip(table, host_blocks, strict=True):
                if device_block.is_null:
                    continue  # outside the window: nobody reads it
                if host_block.is_null:
                    raise RuntimeError(
                        f"{request.request_id}: group {group} has device block "
                        f"{device_block.block_id} within the hit and no host block for it"
                    )
                load.device_blocks.append(device_block)
                load.host_blocks.append(host_block)
        device_pool.touch(load.device_blocks)
        self._planned.append(load)

    def submit(self) -> list[Transfer]:
        """The planned loads as transfers, in flight from now on."""
        transfers = []
        for load in self._planned:
            transfer_id = self._numbering.begin()
            self._in_flight[transfer_id] = load
            transfers.append(
                Transfer.pairing(
                    transfer_id,
                    (block.block_id for block in load.device_blocks),
                    (block.block_id for block in load.host_blocks),
                    load.request_id,
                )
            )
        self._planned.clear()
        return transfers

    def finish(self, ended: Ended, device_pool: BlockPool) -> bool:
        """Release what a load held; False when ``ended`` is not a load.

        Host blocks of a failed load leave the tier: whatever is wrong with them, the request
        must not be offered them again.
        """
        load = self._in_flight.pop(ended.id, None)
        if load is None:
            return False
        if not ended.ok:
            self.tier.drop(load.host_blocks)
        self.tier.unpin(load.pins)
        device_pool.free_blocks(reversed(load.device_blocks))
        return True

    def frees_device_blocks(self) -> bool:
        """Whether the end of a load in flight would return a device block to the pool."""
        return any(
            block.ref_cnt == 1 for load in self._in_flight.values() for block in load.device_blocks
        )

    def check_integrity(self) -> None:
        """Raise AssertionError unless every block that a load or a hit names is referred to."""
        for known in self._hits.values():
            assert all(block.ref_cnt > 0 for block in known.pins), "a pinned hit is free"
        for load in (*self._planned, *self._in_flight.values()):
            held = (*load.pins, *load.device_blocks)
            assert all(block.ref_cnt > 0 for block in held), f"{load.request_id}: block is free"
