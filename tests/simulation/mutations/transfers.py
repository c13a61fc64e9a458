"""Every transfer is submitted once, and ends once on every rank."""

from contextlib import ExitStack
from typing import Any

from simple_offload.backends.base import Direction
from simple_offload.scheduler.rank_reports import Ended, InFlight
from simple_offload.worker.lane import Lane
from simple_offload.worker.worker import OffloadWorker
from tests.simulation.mutations.registry import mutation, substitute
from tests.simulation.mutations.scripts import failing_stores


@mutation()
def submit_twice(stack: ExitStack) -> None:
    def careless(self: OffloadWorker, direction: Direction, transfers: list[Any]) -> None:
        assert self._engine is not None
        for transfer in transfers:
            self._engine.submit(direction, transfer, self._backend.barrier())

    substitute(stack, OffloadWorker, "_submit", careless)


@mutation()
def lose_a_completion(stack: ExitStack) -> None:
    note = OffloadWorker._note

    def forgetful(self: OffloadWorker, direction: Direction, completion: Any) -> None:
        if completion.transfer.id % 5 != 4:
            note(self, direction, completion)

    substitute(stack, OffloadWorker, "_note", forgetful)


@mutation()
def leave_the_dead_unburied(stack: ExitStack) -> None:
    substitute(stack, Lane, "_bury", lambda self: None)


@mutation()
def skip_one_rank(stack: ExitStack) -> None:
    begin = InFlight.begin

    def impatient(self: InFlight) -> int:
        transfer_id = begin(self)
        self._ranks_left[transfer_id] = max(1, self.num_ranks - 1)
        return transfer_id

    substitute(stack, InFlight, "begin", impatient)


@mutation(failing_stores)
def believe_the_last_rank(stack: ExitStack) -> None:
    end = InFlight.end

    def gullible(self: InFlight, report: Any) -> list[Ended]:
        self._failed.clear()
        return end(self, report)

    substitute(stack, InFlight, "end", gullible)
