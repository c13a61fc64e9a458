"""Loads: requests that wait for host blocks."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from vllm.utils.math_utils import cdiv
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from simple_offload import metrics
from simple_offload.metadata import Transfer
from simple_offload.scheduler.rank_reports import Ended, InFlight
from simple_offload.scheduler.tier import block_pool
from simple_offload.scheduler.tier.cpu_tier import CpuTier
from simple_offload.scheduler.tier.lookup import HostHit

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
    held: list[KVCacheBlock]
    """Device blocks that it has a reference to."""
    trusted: list[KVCacheBlock]
    """Device blocks that the request keeps, whatever becomes of it, until vLLM has heard from
    every rank that they are being filled."""
    device_ids: list[int]
    slots: list[int]
    """By device block, the part of a host block that it is copied from."""
    pins: list[KVCacheBlock]
    admitted: bool = False
    """Every rank has announced it: compute may be scheduled that reads its blocks."""
    orphaned: bool = False
    """Its request has ended."""

    def add(
        self,
        group: int,
        table: Sequence[KVCacheBlock],
        slots: Sequence[int],
        null_block: KVCacheBlock,
        num_parts: int,
        *,
        lasting: bool,
    ) -> None:
        """Pair what a group's block ``table`` has of the hit with ``slots``; ``lasting``: the
        request keeps them as long as it has any."""
        if len(table) != len(slots):
            raise RuntimeError(
                f"{self.request_id}: group {group} has {len(table)} device blocks within the hit, "
                f"and the host tier {len(slots)}"
            )
        ids = [block.block_id for block in table]
        nobody_reads = null_block.block_id  # what lies outside the window
        if nobody_reads in ids:
            pairs = [pair for pair in zip(table, slots, strict=True) if not pair[0].is_null]
            table, slots = [block for block, _ in pairs], [slot for _, slot in pairs]
            ids = [block.block_id for block in table]
        if slots and min(slots) < num_parts:  # the null block's
            block_id = ids[next(i for i, slot in enumerate(slots) if slot < num_parts)]
            raise RuntimeError(
                f"{self.request_id}: group {group} has device block {block_id} within the hit "
                "and no host block for it"
            )
        (self.trusted if lasting else self.held).extend(table)
        self.device_ids += ids
        self.slots += slots


class Loads:
    """From lookup to the last rank's report: hit (pinned), planned (paired), in flight, and
    there from the announcement on (``admit``) readable by compute, which waits for the rest.

    A hit stays pinned until the request has its device blocks, looks again, or ends: vLLM
    0.33 may put off the allocation hook by some steps.
    """

    def __init__(self, tier: CpuTier, in_flight: InFlight) -> None:
        self.tier = tier
        self._numbering = in_flight
        self._hits: dict[str, _PinnedHit] = {}
        self._planned: list[_Load] = []
        self._in_flight: dict[int, _Load] = {}
        self._newly_admitted: list[int] = []
        self._unlucky: set[str] = set()
        """Requests of which a load has failed. To offer them another would be right, but vLLM
        may then wait for its blocks before it looks at loads that have ended, and their
        requests hold those blocks: nobody goes on (vllm#57841)."""

    @property
    def idle(self) -> bool:
        """Whether no load is planned or in flight."""
        return not self._planned and not self._in_flight

    @property
    def num_hits(self) -> int:
        """Hits pinned for requests that have no device blocks yet."""
        return len(self._hits)

    @property
    def num_requests(self) -> int:
        """Requests of which something is remembered, but for loads under way."""
        return len(self._hits.keys() | self._unlucky)

    def is_loading(self, request_id: str) -> bool:
        """Whether blocks of this request are still to be filled by a load that nothing waits
        for."""
        for load in chain(self._planned, self._in_flight.values()):
            if load.request_id == request_id and not load.admitted:
                return True
        return False

    def lookup(self, request: "Request", num_computed_tokens: int) -> int:
        """Tokens beyond ``num_computed_tokens`` that the tier can supply; pins them.

        The last token of a request is always computed, for its logits.
        """
        known = self._hits.get(request.request_id)
        if request.request_id in self._unlucky:
            return 0
        if (
            known is not None
            and known.num_computed_tokens == num_computed_tokens
            and known.tier_version == self.tier.version
        ):
            return known.hit.num_tokens
        self.forget(request.request_id)
        hit = self.tier.lookup.hit(
            request.block_hashes,
            num_computed_tokens,
            max_tokens=request.num_tokens - 1 - num_computed_tokens,
        )
        if hit.num_tokens == 0:
            return 0
        pins = self.tier.lookup.lineage(request.block_hashes, num_computed_tokens)
        for group, blocks in enumerate(hit.blocks):
            no_nulls = group in self.tier.groups.chained_ids
            pins += blocks if no_nulls else [block for block in blocks if not block.is_null]
        self.tier.pin(pins)
        self.tier.protect(pins)
        self._hits[request.request_id] = _PinnedHit(
            num_computed_tokens, hit, pins, self.tier.version
        )
        return hit.num_tokens

    def num_found(self, request_id: str) -> int:
        """How many tokens the device had of a request when its hit was looked up."""
        known = self._hits.get(request_id)
        return known.num_computed_tokens if known is not None else 0

    def forget(self, request_id: str) -> None:
        """Unpin the hit of a request that will not load it."""
        if (known := self._hits.pop(request_id, None)) is not None:
            self.tier.unpin(known.pins)

    def end(self, request_id: str) -> None:
        """The request has ended. Blocks of a load under way stay held."""
        self.forget(request_id)
        self._unlucky.discard(request_id)
        for load in chain(self._planned, self._in_flight.values()):
            if load.request_id == request_id:
                load.orphaned = True

    def plan(
        self,
        request: "Request",
        device_blocks: Sequence[Sequence[KVCacheBlock]],
        num_external_tokens: int,
        device_pool: BlockPool,
    ) -> None:
        """Pair the pinned hit with the request's device blocks, by group from its first token
        on. Host blocks, and device blocks that may leave the request's table, are held until the
        load has ended on every rank; the others from the announcement on (``admit``): until then
        vLLM frees none of a request that waits for a load, not even if it is aborted.

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
            hit = self.tier.lookup.hit(
                request.block_hashes, known.num_computed_tokens, num_external_tokens
            )
            again = [block for group in hit.blocks for block in group if not block.is_null]
            self.tier.pin(again)
            self.tier.protect(again)
            pins = [*pins, *again]
        if num_external_tokens != hit.num_tokens:
            raise RuntimeError(
                f"{request.request_id}: vLLM takes {num_external_tokens} external tokens of "
                f"{known.hit.num_tokens}, which the host tier cannot supply"
            )
        load = _Load(request.request_id, [], [], [], [], pins)
        num_parts = self.tier.groups.num_parts
        start = self.tier.groups.start_of(known.num_computed_tokens)
        stop = known.num_computed_tokens + num_external_tokens
        for group in self.tier.groups.ids:
            size = self.tier.groups.block_sizes[group] // num_parts
            first, last = known.num_computed_tokens // size, cdiv(stop, size)
            # Of the first host block the device may have some parts, of the last one a request
            # may have no use for some.
            before = start // size
            slots = self.tier.slots(hit.blocks[group])[first - before : last - before]
            table = device_blocks[group][first:last]
            lasting = group in self.tier.groups.lasting_ids
            load.add(group, table, slots, device_pool.null_block, num_parts, lasting=lasting)
        block_pool.hold(device_pool, load.held)
        self._planned.append(load)
        self.tier.meter.add(metrics.HIT_TOKENS, num_external_tokens)

    def submit(self, in_use: Callable[[Sequence[int]], bool]) -> list[Transfer]:
        """The planned loads as transfers, in flight from now on. ``in_use``: whether compute
        that has been queued may still touch one of the device blocks with these ids."""
        transfers = []
        for load in self._planned:
            transfer_id = self._numbering.begin()
            self._in_flight[transfer_id] = load
            transfers.append(
                Transfer.pairing(
                    transfer_id,
                    load.device_ids,
                    load.slots,
                    load.request_id,
                    after_compute=in_use(load.device_ids),
                )
            )
        self._planned.clear()
        return transfers

    def admit(self, request_ids: Iterable[str], device_pool: BlockPool) -> None:
        """Every rank has announced the loads of these requests, which vLLM schedules from now on,
        or frees if they have ended. What has not ended yet is named to the ranks once more, with
        ``take_admitted``."""
        wanted = set(request_ids)
        for transfer_id, load in self._in_flight.items():
            if load.request_id in wanted and not load.admitted:
                load.admitted = True
                self._newly_admitted.append(transfer_id)
                block_pool.hold(device_pool, load.trusted)
                load.held += load.trusted
                load.trusted = []

    def take_admitted(self) -> list[int]:
        """Loads admitted since the last call, by transfer id."""
        admitted, self._newly_admitted = self._newly_admitted, []
        return admitted

    def on_failed(self, transfer_ids: Iterable[int]) -> None:
        """Loads have failed on some rank, though others may still be copying. Their requests,
        which look again as soon as they have heard, are offered no other; their host blocks
        leave the tier if a load of them had failed before (``CpuTier.doubt``)."""
        for transfer_id in transfer_ids:
            if (load := self._in_flight.get(transfer_id)) is not None:
                blocks = self.tier.blocks_at(load.slots)
                self.tier.doubt(blocks, transfer_id, self._numbering.next_id)
                if not load.orphaned:
                    self._unlucky.add(load.request_id)

    def finish(self, ended: Ended, device_pool: BlockPool) -> bool:
        """Release what a load held; False when ``ended`` is not a load."""
        load = self._in_flight.pop(ended.id, None)
        if load is None:
            return False
        self.tier.meter.add(metrics.LOADS, 1, "sync" if load.admitted else "async")
        if ended.ok:
            self.tier.meter.add(metrics.LOADED, self.tier.num_blocks_at(load.slots))
            if self.tier.doubted:
                self.tier.trust(self.tier.blocks_at(load.slots))
        self.tier.unpin(load.pins)
        if ended.ok and self.tier.demotes:
            self.tier.demote(load.pins)
        block_pool.release(device_pool, reversed(load.held))
        return True

    def frees_device_blocks(self) -> bool:
        """Whether the end of a load in flight would return a device block to the pool."""
        return any(block.ref_cnt == 1 for load in self._in_flight.values() for block in load.held)

    def check_integrity(self) -> None:
        """Raise AssertionError unless every block that a load or a hit names is referred to."""
        for known in self._hits.values():
            assert all(block.ref_cnt > 0 for block in known.pins), "a pinned hit is free"
        for load in (*self._planned, *self._in_flight.values()):
            blocks = (*load.pins, *load.held, *load.trusted)
            assert all(block.ref_cnt > 0 for block in blocks), f"{load.request_id}: block is free"
