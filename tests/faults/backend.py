"""FaultyBackend: a real backend with planned faults."""

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from simple_offload.backends.base import Barrier, CopyBackend, Direction, Measurement, Pending
from simple_offload.transfer import Transfer


class Fault(NamedTuple):
    """A fault of some transfers of one direction. A transfer gets the first planned fault that hits
    it."""

    direction: Literal["load", "store"]
    action: Literal["fail", "delay", "kill"]
    """fail: an exception, and no copy. delay: the copy is made after ``polls``, when its end is
    polled. kill: the copy thread ends (SystemExit)."""
    first: int = 1
    """The first transfer that it hits; transfers count from 1 since the plan is set."""
    every: int | None = None
    """Period of further hits, in transfers; None: no further hits."""
    polls: int = 0
    """Polls that find the transfer still running. With "fail", the exception comes after them, like
    an error that a device reports."""

    def hits(self, direction: Direction, number: int) -> bool:
        """Whether it hits transfer ``number`` of ``direction``."""
        past = number - self.first
        in_time = past == 0 if self.every is None else past >= 0 and past % self.every == 0
        return in_time and self.direction == direction.value


class InjectedError(OSError):
    """The planned failure of a copy."""


class FaultyBackend:
    """Is ``inner``, except for the copies that the plan selects."""

    def __init__(self, inner: CopyBackend) -> None:
        self._inner = inner
        self._late: list[_Late] = []
        self.set_plan()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    @property
    def num_open(self) -> int:
        """Late copies that were neither polled to their end nor waited for."""
        return sum(not late.ended for late in self._late)

    def set_plan(self, *faults: Fault) -> None:
        """Inject these faults, and no others, from now on; transfers count from 1."""
        self._plan = faults
        # Only the thread of a direction writes its numbers.
        self.num_copies = dict.fromkeys(Direction, 0)
        self.injected: Counter[str] = Counter()
        """Number of injected faults by kind: "load fail", "store kill", ..."""

    def copy(
        self, direction: Direction, transfer: Transfer, barrier: Barrier | None
    ) -> Pending | None:
        self.num_copies[direction] += 1
        hits = (each for each in self._plan if each.hits(direction, self.num_copies[direction]))
        fault = next(hits, None)
        if fault is None:
            return self._inner.copy(direction, transfer, barrier)
        self.injected[f"{direction.value} {fault.action}"] += 1
        if fault.action == "kill":
            raise SystemExit("the plan ends this thread")
        if fault.action == "fail" and fault.polls == 0:
            raise InjectedError("the plan lets this copy fail")
        late = _Late(self._inner, direction, transfer, barrier, fault)
        self._late.append(late)
        return late


@dataclass(slots=True, eq=False)
class _Late:
    """A copy whose bytes move as late as possible: when it is polled to its end, or waited for."""

    inner: CopyBackend
    direction: Direction
    transfer: Transfer
    barrier: Barrier | None
    fault: Fault
    polls: int = 0
    ended: bool = False

    def done(self) -> bool:
        self.polls += 1
        if self.polls <= self.fault.polls:
            return False
        self.wait()
        return True

    def remaining_seconds(self) -> float:
        """Unknown: the copy is made only when it is polled to its end."""
        return math.inf

    def hold_compute(self) -> None:
        """Compute waits for announced copies only, and a late one is never announced."""
        assert self.ended, "compute would wait for a copy that has not been made"

    def measure(self) -> Measurement:
        return Measurement(None, {})

    def wait(self) -> None:
        if self.ended:
            return
        self.ended = True
        if self.fault.action == "fail":
            raise InjectedError("the plan lets this copy fail late")
        pending = self.inner.copy(self.direction, self.transfer, self.barrier)
        if pending is not None:
            pending.wait()
