"""Messages: what ranks tell each other while they start, as in vLLM's tensor parallel group."""

import threading
from dataclasses import dataclass
from typing import Any

_SECONDS = 60.0
"""Seconds after which a rank is missing."""


class Messages:
    """Between ranks that are threads of this process."""

    def __init__(self, num_ranks: int) -> None:
        self._values: list[Any] = [None] * num_ranks
        self._barrier = threading.Barrier(num_ranks, timeout=_SECONDS)

    def of(self, rank: int) -> "RankMessages":
        """As one rank uses them."""
        return RankMessages(rank, self)

    def gather(self, rank: int, value: Any) -> list[Any]:
        """The values of all ranks, when each has called this."""
        self._values[rank] = value
        self._barrier.wait()
        values = list(self._values)
        self._barrier.wait()  # none may be replaced before all ranks have read it
        return values


@dataclass(frozen=True)
class RankMessages:
    """One rank's side (``Peers``)."""

    rank: int
    messages: Messages

    def gather(self, value: Any) -> list[Any]:
        return self.messages.gather(self.rank, value)
