"""Loads: requests that wait for host blocks."""

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from vllm.utils.math_utils import cdiv
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.request import Request

from simple_offload import metrics
from simple_offload.scheduler.rank_reports import Ended, TransferLedger
from simple_offload.scheduler.tier import block_pool
from simple_offload.scheduler.tier.cpu_tier import CpuTier
from simple_offload.scheduler.tier.groups import Groups
from simple_offload.scheduler.tier.lookup import HostHit
from simple_offload.transfer import Transfer


class _PinnedHit(NamedTuple):
    """A hit offered to a request that has no device blocks for it yet."""

    num_computed_tokens: int
    hit: HostHit
    tier_version: int


@dataclass(slots=True, eq=False)
class _Load:
    request_id: str
    pins: Sequence[KVCacheBlock]
    """Host blocks that it has a reference to."""
    held: list[KVCacheBlock]
    """Device blocks that it has a reference to."""
    trusted: list[KVCacheBlock]
    """Device blocks that the request keeps, even if it is aborted, until vLLM knows that every
    rank is filling them."""
    device_ids: list[int]
    slots: list[int]
    """By device block, the slot of the host sub-block that it is copied from."""
    num_new_tokens: int
    """Tokens of the request that are left to compute."""
    transfer: Transfer | None = None
    """Once it is in flight."""
    admitted: bool = False
    """Every rank has announced it: vLLM may schedule compute that reads its blocks."""
    orphaned: bool = False
    """Its request has ended."""
    _pinned_ids: frozenset[int] = frozenset()
    """Of its host blocks, once another request asks for one."""

    def will_bring(self, host_block: KVCacheBlock) -> bool:
        """Whether vLLM will find these contents on the device when the load ends, and not yet."""
        if self.admitted or self.orphaned:
            return False
        if not self._pinned_ids:
            self._pinned_ids = frozenset([block.block_id for block in self.pins])
        return host_block.block_id in self._pinned_ids

    def add(
        self,
        group: int,
        table: Sequence[KVCacheBlock],
        slots: Sequence[int],
        null_block: KVCacheBlock,
        num_sub_blocks: int,
        *,
        lasting: bool,
    ) -> None:
        """Pair a group's part of the block ``table`` within the hit with ``slots``. ``lasting``:
        the request keeps these blocks until it gives up all blocks."""
        if len(table) != len(slots):
            raise RuntimeError(
                f"{self.request_id}: group {group} has {len(table)} device blocks within the hit, "
                f"and the host tier {len(slots)}"
            )
        ids = [block.block_id for block in table]
        if null_block.block_id in ids:  # outside the window: attention does not read it
            pairs = [pair for pair in zip(table, slots, strict=True) if not pair[0].is_null]
            table, slots = [block for block, _ in pairs], [slot for _, slot in pairs]
            ids = [block.block_id for block in table]
        if slots and min(slots) < num_sub_blocks:  # slots of the host's null block
            block_id = ids[next(i for i, slot in enumerate(slots) if slot < num_sub_blocks)]
            raise RuntimeError(
                f"{self.request_id}: group {group} has device block {block_id} within the hit "
                "and no host block for it"
            )
        (self.trusted if lasting else self.held).extend(table)
        self.device_ids += ids
        self.slots += slots


class Loads:
    """A load begins as a hit (pinned), is planned (paired with device blocks), then in flight, and
    admitted once every rank has announced it: compute may read its blocks, and waits for the rest
    on the device. It ends with the last rank's report.

    A hit stays pinned until the request has its device blocks, looks again, or ends: vLLM may have
    no room for it yet.
    """

    def __init__(
        self, tier: CpuTier, groups: Groups, ledger: TransferLedger, meter: metrics.Meter
    ) -> None:
        self._tier = tier
        self._groups = groups
        self._ledger = ledger
        self._meter = meter
        self._hits: dict[str, _PinnedHit] = {}
        self._planned: list[_Load] = []
        self._in_flight: dict[int, _Load] = {}
        self._arrived: dict[str, Sequence[KVCacheBlock]] = {}
        """By request, host blocks that it has loaded. vLLM does not find them on the device before
        the request runs."""
        self._newly_admitted: list[int] = []
        self._unlucky: set[str] = set()
        """Requests with a failed load, which are offered no other: it would probably fail too. And
        requests of ``offer_no_more``."""

    @property
    def idle(self) -> bool:
        """Whether no load is planned or in flight."""
        return not self._planned and not self._in_flight

    def is_loading(self, request_id: str) -> bool:
        """Whether a load that is not admitted has yet to fill blocks of this request."""
        for load in chain(self._planned, self._in_flight.values()):
            if load.request_id == request_id and not load.admitted:
                return True
        return False

    def lookup(self, request: Request, num_computed_tokens: int) -> HostHit:
        """What the tier can supply beyond ``num_computed_tokens`` tokens. Pins the hit.

        The last token of a request is always computed, for its logits.
        """
        # It may have lost what it had loaded: it was preempted before it ran.
        self._tier.unpin(self._arrived.pop(request.request_id, ()))
        known = self._hits.get(request.request_id)
        if request.request_id in self._unlucky:
            return HostHit()
        if (
            known is not None
            and known.num_computed_tokens == num_computed_tokens
            and known.tier_version == self._tier.version
        ):
            return known.hit
        self.unpin_hit(request.request_id)
        max_tokens = request.num_tokens - 1 - num_computed_tokens
        hit = self._tier.lookup(request.block_hashes, num_computed_tokens, max_tokens)
        if hit.num_tokens:
            self._tier.pin(hit.pins)
            self._hits[request.request_id] = _PinnedHit(
                num_computed_tokens, hit, self._tier.version
            )
        return hit

    def will_bring_most(self, hit: HostHit) -> bool:
        """Whether loads of others bring at least half of a hit: its middle block, and all before it
        in a chain. vLLM finds that on the device soon."""
        group = (*self._groups.chained_ids, *self._groups.ids)[0]
        blocks = hit.blocks[group]
        middle = blocks[len(blocks) // 2]
        return any(
            load.will_bring(middle) for load in chain(self._planned, self._in_flight.values())
        )

    def unpin_hit(self, request_id: str) -> None:
        """Unpin the hit of a request that will not load it."""
        if (known := self._hits.pop(request_id, None)) is not None:
            self._tier.unpin(known.hit.pins)

    def on_request_finished(self, request_id: str) -> None:
        """The request has ended. Blocks of a load under way stay pinned."""
        self.unpin_hit(request_id)
        self._unlucky.discard(request_id)
        self._tier.unpin(self._arrived.pop(request_id, ()))
        for load in chain(self._planned, self._in_flight.values()):
            if load.request_id == request_id:
                load.orphaned = True

    def offer_no_more(self, request_id: str) -> None:
        """The request has given back the device blocks that it had loaded, or vLLM has no room for
        its load: it is computed."""
        self._tier.unpin(self._arrived.pop(request_id, ()))
        self._unlucky.add(request_id)

    def plan(
        self,
        request: Request,
        device_blocks: Sequence[Sequence[KVCacheBlock]],
        num_external_tokens: int,
        device_pool: BlockPool,
    ) -> None:
        """Pair the pinned hit with the request's device blocks, by group from its first token on.

        Host blocks, and device blocks that may leave the request's table, get a reference until
        the load has ended on every rank; the others get theirs when it is admitted: until then
        vLLM frees no block of a request that waits for a load, even if it is aborted.

        ``num_external_tokens``: the part of the hit that vLLM accepts. RuntimeError if the pairing
        would leave a device block that attention reads without its bytes.
        """
        known = self._hits.pop(request.request_id, None)
        if known is None:
            raise RuntimeError(
                f"{request.request_id}: vLLM allocated {num_external_tokens} external tokens "
                "that no lookup offered"
            )
        hit, pins = known.hit, known.hit.pins
        if num_external_tokens != hit.num_tokens:
            # With windows, a shorter prefix is not a part of this hit: look again.
            hit = self._tier.lookup(
                request.block_hashes, known.num_computed_tokens, num_external_tokens
            )
            self._tier.pin(hit.pins)
            pins = [*pins, *hit.pins]
        if num_external_tokens != hit.num_tokens:
            raise RuntimeError(
                f"{request.request_id}: vLLM takes {num_external_tokens} external tokens of "
                f"{known.hit.num_tokens}, which the host tier cannot supply"
            )
        num_sub_blocks = self._groups.num_sub_blocks
        start = self._groups.start_of(known.num_computed_tokens)
        stop = known.num_computed_tokens + num_external_tokens
        load = _Load(request.request_id, pins, [], [], [], [], request.num_tokens - stop)
        for group in self._groups.ids:
            size = self._groups.block_sizes[group] // num_sub_blocks
            first, last = known.num_computed_tokens // size, cdiv(stop, size)
            # The device may have sub-blocks of the first host block; the request may not need
            # all of the last one.
            before = start // size
            slots = self._tier.slots(hit.blocks[group])[first - before : last - before]
            table = device_blocks[group][first:last]
            lasting = group in self._groups.lasting_ids
            load.add(group, table, slots, device_pool.null_block, num_sub_blocks, lasting=lasting)
        block_pool.touch(device_pool, load.held)
        self._planned.append(load)

    def on_step(self, request_ids: Container[str]) -> None:
        """These requests run in the step that is being scheduled."""
        for request_id in [each for each in self._arrived if each in request_ids]:
            self._tier.unpin_loaded(self._arrived.pop(request_id))

    def submit(self, in_use: Callable[[Sequence[int]], bool]) -> list[Transfer]:
        """The planned loads as transfers, in flight from now on. ``in_use``: whether queued
        compute may still touch one of the device blocks with these ids."""
        transfers = []
        for load in self._planned:
            transfer_id = self._ledger.begin()
            self._in_flight[transfer_id] = load
            load.transfer = Transfer.pairing(
                transfer_id,
                load.device_ids,
                load.slots,
                load.request_id,
                after_compute=in_use(load.device_ids),
                by_place=self._tier.slots_by_place,
                num_new_tokens=load.num_new_tokens,
            )
            transfers.append(load.transfer)
        self._planned.clear()
        return transfers

    def admit(self, request_ids: Iterable[str], device_pool: BlockPool) -> None:
        """Every rank has announced the loads of these requests, which vLLM schedules from now on,
        or frees if they have ended. ``drain_admitted`` tells the ranks."""
        wanted = set(request_ids)
        for transfer_id, load in self._in_flight.items():
            if load.request_id in wanted and not load.admitted:
                load.admitted = True
                self._newly_admitted.append(transfer_id)
                block_pool.touch(device_pool, load.trusted)
                load.held += load.trusted
                load.trusted = []

    def drain_admitted(self) -> list[int]:
        """Ids of the loads admitted since the last call."""
        admitted, self._newly_admitted = self._newly_admitted, []
        return admitted

    def on_failed(self, transfer_ids: Iterable[int]) -> list[str]:
        """Loads have failed on some rank, though others may still be copying. Their requests,
        which look again next, are offered no other load. Their host blocks leave the tier, or each
        later request might load them and fail. Returns the ids of these requests."""
        requests = []
        for transfer_id in transfer_ids:
            if (load := self._in_flight.get(transfer_id)) is not None:
                self._tier.drop(self._tier.blocks_at(load.slots))
                if not load.orphaned:
                    self._unlucky.add(load.request_id)
                    requests.append(load.request_id)
        return requests

    def on_ended(self, ended: Ended, device_pool: BlockPool) -> Transfer | None:
        """Release the blocks of a load, and return its transfer; None if ``ended`` is not a
        load."""
        load = self._in_flight.pop(ended.id, None)
        if load is None:
            return None
        self._meter.add(metrics.LOADS, 1, "sync" if load.admitted else "async")
        if ended.ok:
            self._meter.add(metrics.LOADED, self._tier.num_blocks_at(load.slots))
        if ended.ok and not load.orphaned:
            # Preempted after an early announcement, a request may have two loads in flight.
            before = self._arrived.get(load.request_id, ())
            self._arrived[load.request_id] = [*before, *load.pins]
        else:
            self._tier.unpin(load.pins)
        block_pool.free_blocks(device_pool, reversed(load.held))
        return load.transfer

    def frees_device_blocks(self) -> bool:
        """Whether the end of a load in flight would return a device block to the pool."""
        return any(block.ref_cnt == 1 for load in self._in_flight.values() for block in load.held)
