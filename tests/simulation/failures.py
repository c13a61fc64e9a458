"""Failures: which host blocks no load may name any more."""

from collections.abc import Collection, Iterable

from simple_offload.metadata import Transfer
from tests.simulation.checks import tier_blocks
from tests.simulation.runner import Violation


class Failures:
    """After two loads in turn have failed to read a block, no load may name it until other contents
    are stored there. Otherwise it would fail for ever. ``num_sub_blocks``: of one of the tier's
    blocks."""

    def __init__(self, num_sub_blocks: int) -> None:
        self._num_sub_blocks = num_sub_blocks
        self._loads: dict[int, Transfer] = {}
        """Transfers in flight, by id."""
        self._next_id = 0
        """Greater than the id of any load."""
        self._failed: set[int] = set()
        self._doubted: dict[int, int] = {}
        """By block that a load failed to read: the first load that began later."""
        self._broken: set[int] = set()
        self.any_again = False
        """Whether a block has ever failed a second time."""

    def begin_store(self, store: Transfer) -> None:
        """New contents of a block have not failed."""
        blocks = self._blocks_of(store)
        self._broken -= blocks
        self._trust(blocks)

    def begin_load(self, load: Transfer) -> None:
        """Raise Violation if two reports have shown that the blocks cannot be loaded."""
        if blocks := self._broken & self._blocks_of(load):
            raise Violation(f"{load.request_id} loads {blocks}, which have failed repeatedly")
        self._loads[load.id] = load
        self._next_id = load.id + 1

    def on_report(self, failed: Iterable[int], in_flight: Collection[int]) -> None:
        """Ranks have reported these transfers as ``failed``. ``in_flight``: ids of transfers that
        have not ended."""
        for load_id in self._loads.keys() & failed:
            self._failed.add(load_id)
            for block in self._blocks_of(self._loads[load_id]):
                if load_id >= self._doubted.setdefault(block, self._next_id):
                    self._broken.add(block)
                    self.any_again = True
        for load_id in self._loads.keys() - in_flight:
            load = self._loads.pop(load_id)
            if load_id not in self._failed:
                self._trust(self._blocks_of(load))
            self._failed.discard(load_id)

    def _trust(self, blocks: set[int]) -> None:
        for block in blocks:
            self._doubted.pop(block, None)

    def _blocks_of(self, transfer: Transfer) -> set[int]:
        return set(tier_blocks(transfer.host_blocks, self._num_sub_blocks))
