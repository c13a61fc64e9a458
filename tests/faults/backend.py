"""FaultyBackend: a real backend with planned faults."""

import logging
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from simple_offload.backends.base import Barrier, CopyBackend, Direction, Pending
from simple_offload.metadata import Transfer
from tests.faults.plan import Fault, FaultPlan

logger = logging.getLogger("vllm.tests.faults")


class InjectedError(OSError):
    """The planned failure of a copy."""


class FaultyBackend:
    """Forwards every call to ``inner``, except for the copies that ``plan`` selects."""

    def __init__(self, inner: CopyBackend, plan: FaultPlan) -> None:
        self._inner = inner
        self.chunk_bytes = inner.chunk_bytes
        self.injected: Counter[str] = Counter()
        """Number of injected faults by kind: "load fail", "store kill", ..."""
        self._late: list[_Late] = []
        self.set_plan(plan)

    @property
    def num_open(self) -> int:
        """Late copies that were neither polled to their end nor waited for."""
        return sum(not late.ended for late in self._late)

    def set_plan(self, plan: FaultPlan) -> None:
        """Inject the faults of ``plan``, and no others, from now on; transfers count from 1."""
        self._plan = plan
        # Only the thread of a direction writes its number.
        self.num_copies = dict.fromkeys(Direction, 0)

    def allocate_host(self, num_bytes: int) -> torch.Tensor:
        return self._inner.allocate_host(num_bytes)

    def open(self, device: Sequence[torch.Tensor]) -> None:
        self._inner.open(device)

    def add_host_chunk(self, regions: Sequence[torch.Tensor]) -> None:
        self._inner.add_host_chunk(regions)

    def barrier(self) -> Barrier | None:
        return self._inner.barrier()

    def enter_thread(self, direction: Direction) -> None:
        self._inner.enter_thread(direction)

    def copy(
        self, direction: Direction, transfer: Transfer, barrier: Barrier | None
    ) -> Pending | None:
        self.num_copies[direction] += 1
        fault = self._plan.find(direction.value, self.num_copies[direction])
        if fault is None:
            return self._inner.copy(direction, transfer, barrier)
        self.injected[f"{direction.value} {fault.action}"] += 1
        if fault.action != "delay":
            logger.info("Injected: %s %d, %s", direction.value, transfer.id, fault.action)
        if fault.action == "kill":
            raise SystemExit("the plan ends this thread")
        if fault.action == "fail" and fault.polls == 0:
            raise InjectedError("the plan lets this copy fail")
        late = _Late(self._inner, direction, transfer, barrier, fault)
        self._late.append(late)
        return late

    def close(self) -> None:
        self._inner.close()


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
        """None, for unknown: the copy is made only when it is polled to its end."""
        return math.inf

    def hold_compute(self) -> None:
        """Compute waits for announced copies only, and a late one is never announced."""
        assert self.ended, "compute would wait for a copy that has not been made"

    def wait(self) -> None:
        if self.ended:
            return
        self.ended = True
        if self.fault.action == "fail":
            raise InjectedError("the plan lets this copy fail late")
        pending = self.inner.copy(self.direction, self.transfer, self.barrier)
        if pending is not None:
            pending.wait()
