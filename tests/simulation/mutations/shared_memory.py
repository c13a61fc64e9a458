"""Host memory that ranks share: who stores what, and where each rank's own contents are."""

from dataclasses import replace
from typing import Any

from simple_offload.backends.base import Direction
from simple_offload.replicas import Replicas
from simple_offload.scheduler.rank_reports import TransferLedger
from simple_offload.scheduler.tier.cpu_tier import CpuTier
from simple_offload.transfer import BlockIds
from simple_offload.worker.rank_pool import RankPool
from simple_offload.worker.worker import OffloadWorker
from tests.simulation.mutations.registry import always, mutation
from tests.simulation.mutations.situations import (
    DYING_RANKS,
    MIXED_RANKS,
    RANKS_WITH_THE_SAME_KV,
    SLOW_RANKS,
)

# Stripes


@mutation(RankPool, "own_part", RANKS_WITH_THE_SAME_KV)
def give_two_ranks_one_stripe(own_part: Any, self: RankPool, *arguments: Any) -> Any:
    return own_part(replace(self, place=0), *arguments)


@mutation(RankPool, "own_part", RANKS_WITH_THE_SAME_KV)
def skip_the_last_stripe(own_part: Any, self: RankPool, direction: Direction, transfer: Any) -> Any:
    own = own_part(self, direction, transfer)
    if direction is Direction.STORE and self.place == self.size - 1:
        return replace(own, device_blocks=own.device_blocks[:0], host_blocks=own.host_blocks[:0])
    return own


@mutation(RankPool, "own_part", RANKS_WITH_THE_SAME_KV)
def load_a_stripe_only(own_part: Any, self: RankPool, direction: Direction, transfer: Any) -> Any:
    return own_part(self, Direction.STORE, transfer)


# All ranks of a pool


@mutation(TransferLedger, "begin", SLOW_RANKS)
def end_with_the_first_rank(begin: Any, self: TransferLedger) -> int:
    """Blocks are unpinned, and keys committed, while the others still copy."""
    transfer_id: int = begin(self)
    self._num_ranks_left[transfer_id] = 1
    return transfer_id


@mutation(OffloadWorker, "_note", DYING_RANKS)
def take_no_notice_of_a_dead_thread(
    note: Any, self: OffloadWorker, direction: Direction, completion: Any
) -> None:
    """As if others had copied the dead rank's stripe."""
    note(self, direction, completion._replace(error=None))


@take_no_notice_of_a_dead_thread.also(OffloadWorker, "drain_report")
def go_on_without_it(drain_report: Any, self: OffloadWorker) -> Any:
    report = drain_report(self)
    if report is not None:
        report.broken = False
    return report


# Private groups

take_all_groups_for_shared = always(CpuTier, "share", None, MIXED_RANKS)


@mutation(CpuTier, "slots_by_place", MIXED_RANKS)
def give_all_places_the_blocks_of_the_first(
    slots_by_place: Any, self: CpuTier, slots: BlockIds
) -> Any:
    by_place = slots_by_place(self, slots)
    if by_place is not None:
        by_place[:] = slots
    return by_place


@mutation(CpuTier, "_split", MIXED_RANKS)
def leave_the_blocks_that_another_stood_for(split: Any, self: CpuTier, blocks: Any) -> Any:
    """They never come back."""
    split(self, blocks)
    return blocks


@mutation(Replicas, "find", MIXED_RANKS)
def share_every_group(find: Any, *arguments: Any) -> Replicas:
    found: Replicas = find(*arguments)
    return replace(found, private_groups=frozenset())
