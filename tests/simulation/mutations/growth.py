"""A tier that grows as the ranks open its blocks."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from simple_offload.metadata import RankCapacity, WorkerReport
from simple_offload.scheduler.manager import OffloadScheduler
from simple_offload.worker.host_pool import HostPool
from simple_offload.worker.worker import OffloadWorker
from tests.simulation.mutations.registry import mutation, substitute
from tests.simulation.mutations.scripts import Engine, growing


def grow_to(stack: ExitStack, size: Callable[[dict[str, int], int], int]) -> None:
    """Grow the tier to ``size``, given each rank's reported number of open blocks and the number of
    ranks."""
    on_capacities = OffloadScheduler._on_capacities

    def learn_and_grow(self: OffloadScheduler, capacities: Any) -> None:
        with patch.object(self.tier, "grow"):
            on_capacities(self, capacities)
        sizes = {rank: capacity.num_open for rank, capacity in self._capacities.items()}
        self.tier.grow(size(sizes, self._ledger.num_ranks))

    substitute(stack, OffloadScheduler, "_on_capacities", learn_and_grow)


@mutation(growing)
def grow_to_the_largest_rank(stack: ExitStack) -> None:
    grow_to(stack, lambda sizes, num_ranks: max(sizes.values()) if len(sizes) == num_ranks else 0)


@mutation(growing)
def grow_before_all_ranks_have_spoken(stack: ExitStack) -> None:
    grow_to(stack, lambda sizes, num_ranks: min(sizes.values(), default=0))


@mutation(Engine({"windows": (0,), "num_ranks": 2, "uneven_ranks": True, "chunk_blocks": None}))
def believe_all_ranks_have_as_much_room(stack: ExitStack) -> None:
    """Once every rank has opened all its blocks, the first rank's number counts for all ranks."""
    grow_to(
        stack, lambda sizes, num_ranks: next(iter(sizes.values())) if len(sizes) == num_ranks else 0
    )


@mutation(growing)
def promise_what_is_not_open_yet(stack: ExitStack) -> None:
    honest: property = vars(OffloadWorker)["capacity"]

    def boastful(self: OffloadWorker) -> RankCapacity:
        capacity: RankCapacity = honest.__get__(self)
        return replace(capacity, num_open=capacity.num_host_blocks)

    stack.enter_context(patch.object(OffloadWorker, "capacity", property(boastful)))


@mutation(growing)
def never_grow(stack: ExitStack) -> None:
    on_report = OffloadScheduler._on_report

    def deaf(self: OffloadScheduler, report: WorkerReport) -> None:
        report.capacities.clear()
        on_report(self, report)

    substitute(stack, OffloadScheduler, "_on_report", deaf)


@mutation(Engine({"windows": (0,), "num_ranks": 2, "uneven_ranks": True, "chunk_blocks": 3}))
def open_what_no_other_rank_has_room_for(stack: ExitStack) -> None:
    def keep(self: HostPool, num_blocks: int) -> None:
        self._agreed.set()

    substitute(stack, HostPool, "agree", keep)
