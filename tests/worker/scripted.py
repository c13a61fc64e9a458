"""A CopyBackend under a test's control, and a CopyLane on it."""

import math
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import cast

import torch

from simple_offload.backends.base import (
    Barrier,
    Direction,
    Measurement,
    PagePart,
    Pending,
)
from simple_offload.transfer import Transfer
from simple_offload.worker.copy_lane import CopyLane
from tests.conftest import PATIENCE_SECONDS

Outcomes = list[tuple[int, BaseException | None]]
"""Ids and errors of completions, in order."""
Log = list[tuple[object, ...]]


class ScriptedError(Exception):
    """A failure that the test causes."""


@dataclass(eq=False)
class ScriptedMark:
    """A mark in the compute stream, which has come there after ``seconds`` of the test's time."""

    seconds: float
    passed: threading.Event

    def seconds_since(self, earlier: "ScriptedMark") -> float | None:
        return self.seconds - earlier.seconds if self.passed.is_set() else None


@dataclass(eq=False)
class ScriptedPending:
    """A copy on the device, in flight until ``ended`` is set."""

    ended: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None
    remaining: float = math.inf
    """Its estimate in seconds. Test and device share no clock."""
    remaining_first: float = math.inf
    """That of the first layer group, if it is less."""
    log: Log = field(default_factory=list)
    """Each ("wait",) and ("hold",), or ("hold", number of the layer group)."""

    def done(self) -> bool:
        if self.ended.is_set() and self.error is not None:
            raise self.error
        return self.ended.is_set()

    def wait(self) -> None:
        self.log.append(("wait",))
        assert self.ended.wait(PATIENCE_SECONDS), "a copy that nothing ends"
        self.done()

    def remaining_seconds(self) -> float:
        return self.remaining

    def hold_compute(self) -> None:
        self.log.append(("hold",))

    def measure(self) -> Measurement:
        return Measurement(None, {})


@dataclass(eq=False)
class ScriptedGroup:
    """A layer group of a copy on the device, which ends with the copy."""

    whole: ScriptedPending
    number: int
    """From 1."""
    num_groups: int

    @property
    def seconds(self) -> float:
        """Those behind the first are of one size."""
        return (self.whole.remaining - self._first) / (self.num_groups - 1)

    @property
    def _first(self) -> float:
        return min(self.whole.remaining, self.whole.remaining_first)

    def done(self) -> bool:
        return self.whole.done()

    def wait(self) -> None:
        self.whole.wait()

    def remaining_seconds(self) -> float:
        return self._first if self.number == 1 else self.seconds

    def hold_compute(self) -> None:
        self.whole.log.append(("hold", self.number))

    def measure(self) -> Measurement:
        """The whole copy's, with the last group."""
        return Measurement(0.0, {}) if self.number < self.num_groups else self.whole.measure()


class EndsWhenWaitedFor(ScriptedPending):
    """A copy that ends only when something waits for it."""

    def wait(self) -> None:
        self.ended.set()
        super().wait()


class Events(dict[int, threading.Event]):
    """An event for every number, the same for every thread. With a defaultdict, two threads at once
    may each get an event, and the map keeps only one."""

    def __missing__(self, number: int) -> threading.Event:
        return self.setdefault(number, threading.Event())


class ScriptedBackend:
    """Copies nothing. A test scripts each transfer by its id, and each chunk of host memory by its
    number, from 0."""

    least_part_bytes = 1
    pins_memory = False

    def __init__(self, chunk_bytes: int = sys.maxsize) -> None:
        self.chunk_bytes = chunk_bytes
        self.log: Log = []
        """("open",), ("divide", layer groups), ("chunk", blocks in it), ("barrier",),
        ("enter", direction, thread name), ("copy", direction, id, barrier, thread name),
        ("close",)"""
        self.marks: list[object] = []
        """The barriers, in order."""
        self.errors: dict[int, BaseException] = {}
        self.gates: dict[int, threading.Event] = {}
        """Ids of copies that block their thread until the event is set."""
        self.group_gates: dict[tuple[int, int], threading.Event] = {}
        """The same for layer groups, by id and number from 1."""
        self.group_errors: dict[tuple[int, int], BaseException] = {}
        self.pendings: dict[int, ScriptedPending] = {}
        self.computed_until = 0.0
        """The test's time in the compute stream."""
        self.has_computed = threading.Event()
        """Whether that stream has passed all marks."""
        self.divided: list[int] = []
        """Ids of loads to copy by layer group."""
        self.quick: set[int] = set()
        self.copied_quickly: list[int] = []
        """Ids of copies that the engine's thread has submitted."""
        self.started = Events()
        self.enter_errors: list[BaseException] = []
        self.chunks: list[Sequence[torch.Tensor]] = []
        self.allocators: list[str] = []
        """Names of the threads that have requested memory, in order."""
        self.allocating = Events()
        self.allocation_gates: dict[int, threading.Event] = {}
        self.allocation_errors: dict[int, Exception] = {}

    def allocate_host(self, num_bytes: int) -> torch.Tensor:
        number = len(self.allocators)
        self.allocators.append(threading.current_thread().name)
        self.allocating[number].set()
        if (gate := self.allocation_gates.get(number)) is not None:
            assert gate.wait(PATIENCE_SECONDS), "a gate that nothing opens"
        if (error := self.allocation_errors.get(number)) is not None:
            raise error
        return torch.zeros(num_bytes, dtype=torch.int8)

    def open(self, device: Sequence[torch.Tensor]) -> None:
        self.log.append(("open",))

    def add_host_chunk(self, regions: Sequence[torch.Tensor]) -> None:
        self.chunks.append(regions)
        self.log.append(("chunk", len(regions[0])))

    def divide(self, groups: Sequence[Sequence[PagePart]]) -> None:
        self.log.append(("divide", len(groups)))
        self._num_groups = len(groups)

    def copy_by_layer(
        self, transfer: Transfer, barrier: Barrier | None, *, quickly: bool
    ) -> Iterator[ScriptedGroup]:
        self.divided.append(transfer.id)
        start = self.copy_quickly if quickly else self.copy
        whole = start(Direction.LOAD, transfer, barrier)
        assert isinstance(whole, ScriptedPending)
        for number in range(1, self._num_groups + 1):
            if (gate := self.group_gates.get((transfer.id, number))) is not None:
                assert gate.wait(PATIENCE_SECONDS), "a gate that nothing opens"
            if (error := self.group_errors.get((transfer.id, number))) is not None:
                raise error
            yield ScriptedGroup(whole, number, self._num_groups)

    def mark_compute(self) -> ScriptedMark:
        return ScriptedMark(self.computed_until, self.has_computed)

    def barrier(self) -> Barrier | None:
        self.log.append(("barrier",))
        self.marks.append(object())
        return self.marks[-1]

    def enter_thread(self, direction: Direction) -> None:
        self.log.append(("enter", direction, threading.current_thread().name))
        if self.enter_errors:
            raise self.enter_errors.pop()

    def copy(
        self, direction: Direction, transfer: Transfer, barrier: Barrier | None
    ) -> Pending | None:
        thread = threading.current_thread().name
        self.log.append(("copy", direction, transfer.id, barrier, thread))
        self.started[transfer.id].set()
        if (gate := self.gates.get(transfer.id)) is not None:
            assert gate.wait(PATIENCE_SECONDS), "a gate that nothing opens"
        if (error := self.errors.get(transfer.id)) is not None:
            raise error
        return self.pendings.get(transfer.id)

    def close(self) -> None:
        self.log.append(("close",))

    def is_quick(self, direction: Direction, transfer: Transfer) -> bool:
        return transfer.id in self.quick

    def copy_quickly(
        self, direction: Direction, transfer: Transfer, barrier: Barrier | None
    ) -> Pending | None:
        self.copied_quickly.append(transfer.id)
        return self.copy(direction, transfer, barrier)

    # For tests

    def release(self) -> None:
        """Open all gates, so that everything ends."""
        gates = self.gates, self.group_gates, self.allocation_gates
        for gate in chain.from_iterable(each.values() for each in gates):
            gate.set()
        for pending in self.pendings.values():
            pending.ended.set()

    def wait_started(self, transfer_id: int) -> None:
        """Return when the copy of this transfer has begun."""
        assert self.started[transfer_id].wait(PATIENCE_SECONDS), "never copied"

    def wait_allocating(self, number: int) -> None:
        """Return when a thread requests the memory of chunk ``number``."""
        assert self.allocating[number].wait(PATIENCE_SECONDS), "no thread requests memory"

    def copied(self, direction: Direction) -> list[int]:
        """Ids of copies of ``direction``, in the order of their start."""
        return [cast(int, entry[2]) for entry in self.log if entry[:2] == ("copy", direction)]

    def barriers_of(self, direction: Direction) -> list[object]:
        """Barriers of these copies."""
        return [entry[3] for entry in self.log if entry[:2] == ("copy", direction)]


class SharingBackend(ScriptedBackend):
    """Takes shared memory as it takes its own: a test scripts each chunk by its number."""

    def __init__(self, chunk_bytes: int = sys.maxsize, numa_node: int | None = None) -> None:
        super().__init__(chunk_bytes)
        self.numa_node = numa_node
        self.are_first: list[bool] = []
        """By chunk that it was given."""

    def use_shared(self, memory: torch.Tensor, *, is_first: bool) -> None:
        self.are_first.append(is_first)
        self.allocate_host(memory.nbytes)


class Bench:
    """A lane of loads on a scripted backend, with four layer groups."""

    def __init__(self) -> None:
        self.backend = ScriptedBackend()
        self.backend.divide([()] * 4)
        self.backend.log.clear()
        self.lane = CopyLane(self.backend, Direction.LOAD, 4)
        self.thread = copy_thread(Direction.LOAD)

    def submit(
        self, *transfer_ids: int, barrier: Barrier | None = None, by_layer: bool = False
    ) -> None:
        for transfer_id in transfer_ids:
            transfer = Transfer.pairing(
                transfer_id, [1], [2], f"request {transfer_id}", num_new_tokens=512 * by_layer
            )
            self.lane.submit(transfer, barrier)

    def poll(self) -> Outcomes:
        return [(each.transfer.id, each.error) for each in self.lane.poll()]

    def flush(self) -> Outcomes:
        """The result of ``poll`` once the thread has submitted everything."""
        self.lane.flush()
        return self.poll()


def copy_thread(direction: Direction) -> threading.Thread:
    """The thread that copies ``direction`` now: the one started last."""
    name = f"simple-offload-{direction.value}"
    return [thread for thread in threading.enumerate() if thread.name == name][-1]


def join(thread: threading.Thread) -> None:
    """Wait for the end of a thread."""
    thread.join(PATIENCE_SECONDS)
    assert not thread.is_alive()
