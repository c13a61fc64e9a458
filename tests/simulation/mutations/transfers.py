"""Every transfer is submitted once, and ends once on every rank."""

from contextlib import ExitStack
from typing import Any

from simple_offload.backends.base import Direction
from simple_offload.scheduler.rank_reports import Ended, TransferLedger
from simple_offload.worker.copy_lane import CopyLane
from simple_offload.worker.worker import OffloadWorker
from tests.simulation.mutations.registry import mutation, substitute
from tests.simulation.mutations.scripts import failing_stores


@mutation()
def submit_twice(stack: ExitStack) -> None:
    def careless(self: OffloadWorker, direction: Direction, transfers: list[Any]) -> None:
        for transfer in transfers:
            self.lanes[direction].submit(transfer, self._backend.barrier())

    substitute(stack, OffloadWorker, "_submit", careless)


@mutation()
def lose_a_completion(stack: ExitStack) -> None:
    note = OffloadWorker._note

    def lossy(self: OffloadWorker, direction: Direction, completion: Any) -> None:
        if completion.transfer.id % 5 != 4:
            note(self, direction, completion)

    substitute(stack, OffloadWorker, "_note", lossy)


@mutation()
def submit_to_a_dead_thread(stack: ExitStack) -> None:
    def unaware(self: CopyLane) -> None:
        self._num_queued = -(10**9)  # a flush does not wait for the thread either

    substitute(stack, CopyLane, "_on_death", unaware)


@mutation()
def skip_one_rank(stack: ExitStack) -> None:
    begin = TransferLedger.begin

    def impatient(self: TransferLedger) -> int:
        transfer_id = begin(self)
        self._num_ranks_left[transfer_id] = max(1, self.num_ranks - 1)
        return transfer_id

    substitute(stack, TransferLedger, "begin", impatient)


@mutation(failing_stores)
def believe_the_last_rank(stack: ExitStack) -> None:
    on_report = TransferLedger.on_report

    def gullible(self: TransferLedger, report: Any) -> list[Ended]:
        self._failed.clear()
        return on_report(self, report)

    substitute(stack, TransferLedger, "on_report", gullible)
