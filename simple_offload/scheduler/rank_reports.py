"""TransferLedger: transfers in flight, and the ranks that have reported them."""

from itertools import count
from typing import NamedTuple

from simple_offload.logs import get_logger
from simple_offload.metadata import WorkerReport

logger = get_logger(__name__)


class Ended(NamedTuple):
    """A transfer that every rank has ended; ``ok``: successfully on all of them."""

    id: int
    ok: bool


class TransferLedger:
    """Numbers transfers and counts the reports of ``num_ranks`` ranks."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self._ids = count()
        self._num_ranks_left: dict[int, int] = {}
        self._failed: set[int] = set()

    def begin(self) -> int:
        """Number a new transfer, which is in flight from now on."""
        transfer_id = next(self._ids)
        self._num_ranks_left[transfer_id] = self.num_ranks
        return transfer_id

    def on_report(self, report: WorkerReport) -> list[Ended]:
        """Count a report. Returns the transfers that have now ended on every rank, oldest
        first."""
        self._failed.update(id for id in report.failed if id in self._num_ranks_left)
        ended = []
        for transfer_id, num_ranks in sorted(report.ended.items()):
            if transfer_id not in self._num_ranks_left:
                logger.error("A rank reported transfer %d, which is not in flight", transfer_id)
                continue
            self._num_ranks_left[transfer_id] -= num_ranks
            if self._num_ranks_left[transfer_id] <= 0:
                del self._num_ranks_left[transfer_id]
                ended.append(Ended(transfer_id, ok=transfer_id not in self._failed))
                self._failed.discard(transfer_id)
        return ended
