"""CopyLane: the copies of one direction, from submission to completion."""

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from queue import SimpleQueue
from typing import NamedTuple

from simple_offload.backends.base import (
    Barrier,
    CopyBackend,
    Direction,
    Measured,
    Measurement,
    Pending,
    QuickToSubmit,
)
from simple_offload.logs import get_logger
from simple_offload.transfer import Transfer

logger = get_logger(__name__)

_JOIN_SECONDS = 60.0
_SWITCH_SECONDS = 1e-3
"""How long a thread waits for Python's interpreter lock before it asks the holder to release it.
vLLM's thread that takes in requests holds the lock for a millisecond a prompt. The thread that runs
the model releases it with most calls to the device, and with Python's default of 5 ms has to wait
that long to get it back: the time in which 256 MiB are copied."""


class _SwitchInterval:
    """The interpreter's switch interval, short while any lane of this process is open."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_users = 0
        self._default_seconds = 0.0

    def add_users(self, count: int) -> None:
        """So many lanes more are open; fewer, if ``count`` is negative."""
        with self._lock:
            if self._num_users == 0:
                self._default_seconds = sys.getswitchinterval()
            self._num_users += count
            shortest = _SWITCH_SECONDS if self._num_users else self._default_seconds
            sys.setswitchinterval(min(self._default_seconds, shortest))


_switch_interval = _SwitchInterval()


class CopyStats(NamedTuple):
    """Duration and size of a copy that has ended without error."""

    seconds: float
    """As the device measured it; else until ``poll`` or ``drain`` saw the end."""
    wait_seconds: float
    """From submission to begin."""
    num_bytes: Mapping[str, int]
    """By copy path; empty where the backend has only one."""


class Completion(NamedTuple):
    """A transfer that has ended on this rank."""

    transfer: Transfer
    error: BaseException | None
    """None when every byte arrived."""
    stats: CopyStats | None = None
    """None when the transfer failed."""


class CopyThreadDied(RuntimeError):
    """The copy thread died before it submitted this transfer."""


class LaneBroken(RuntimeError):
    """The transfer was submitted after the death of its copy thread."""


class _Job(NamedTuple):
    transfer: Transfer
    barrier: Barrier | None
    submitted_at: float


@dataclass(slots=True, eq=False)
class _Copy:
    """A transfer that the backend has accepted, or that has failed."""

    transfer: Transfer
    pending: Pending | None
    """None when the copy has ended."""
    error: BaseException | None = None
    submitted_at: float = 0.0
    began_at: float = 0.0
    """When a thread called the backend."""
    stats: CopyStats | None = None

    def on_end(self) -> None:
        """Note when the copy ended. Later calls change nothing."""
        if self.stats is None and self.error is None:
            now = time.monotonic()
            seconds, num_bytes = self._measure()
            if seconds is None:
                seconds = now - self.began_at
            wait_seconds = max(now - self.submitted_at - seconds, 0.0)
            self.stats = CopyStats(seconds, wait_seconds, num_bytes)

    def _measure(self) -> Measurement:
        pending: object = self.pending
        try:
            return pending.measure() if isinstance(pending, Measured) else Measurement(None, {})
        except Exception:
            # Every byte has arrived: without a measurement the copy is still complete.
            logger.exception("A copy cannot be measured")
            return Measurement(None, {})


_CopyFunction = Callable[[Direction, Transfer, Barrier | None], Pending | None]


class CopyLane:
    """The copies of one direction, submitted in order.

    A thread of the lane submits them, so that a large store, which may take milliseconds to
    submit, delays no load. The caller's thread submits a copy itself where the device has nothing
    else to copy in this direction, a request waits for the copy, and its submission is quick: to
    wake the lane's thread may take longer than the copy, as vLLM's threads need Python's
    interpreter lock to take in other requests.

    One thread, the one that runs the model, calls all methods. ``poll`` returns every submitted
    transfer exactly once. While any lane of a process is open, Python's threads take turns every
    millisecond (``sys.setswitchinterval``).

    An exception that is no ``Exception`` (SystemExit) ends the thread. Then the lane is broken for
    good: the transfers that the thread left behind fail, and so do all later ones.
    """

    def __init__(self, backend: CopyBackend, direction: Direction) -> None:
        self.direction = direction
        self.is_broken = False
        """The thread has died. Every later transfer fails."""
        self._backend = backend
        self._quick_to_submit = backend if isinstance(backend, QuickToSubmit) else None
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._submitted: SimpleQueue[_Copy] = SimpleQueue()
        """From the thread to its caller."""
        self._under_way: deque[_Copy] = deque()
        """In order of submission, which is the order in which the device copies."""
        self._num_queued = 0
        """Transfers given to the thread and not yet in ``_under_way``."""
        self._is_closed = False
        self._thread = threading.Thread(
            target=self._run, name=f"simple-offload-{direction.value}", daemon=True
        )
        self._thread.start()
        _switch_interval.add_users(1)

    @property
    def is_stuck(self) -> bool:
        """Whether the thread still runs although the lane is closed: it may touch memory."""
        return self._is_closed and self._thread.is_alive()

    @property
    def _is_idle(self) -> bool:
        return not self._under_way and not self._num_queued

    def submit(self, transfer: Transfer, barrier: Barrier | None) -> None:
        """Queue ``transfer`` behind earlier ones; its copy comes after ``barrier`` on the device.
        Raises RuntimeError once the lane is closed."""
        if self._is_closed:
            raise RuntimeError(f"the {self.direction.value} lane is closed")
        job = _Job(transfer, barrier, time.monotonic())
        if self.is_broken:
            self._under_way.append(_Copy(transfer, None, LaneBroken(self.direction.value)))
        elif (quick := self._quick_to_submit) is not None and (
            self._is_idle and quick.is_quick(self.direction, transfer)
        ):
            self._under_way.append(self._start_copy(job, quick.copy_quickly))
        else:
            self._jobs.put(job)
            self._num_queued += 1

    def poll(self) -> list[Completion]:
        """Transfers that have ended since the last call, in order of submission. Never waits."""
        completions: list[Completion] = []
        if self._is_idle:
            return completions
        self._collect()
        while self._under_way:
            first = self._under_way[0]
            try:
                if first.error is None and first.pending and not first.pending.done():
                    break
                first.on_end()
            except Exception as failure:  # noqa: BLE001 - any error is a failed transfer
                first.error = failure
            self._under_way.popleft()
            completions.append(Completion(first.transfer, first.error, first.stats))
        return completions

    def nearly_done(
        self, seconds: float, hidden_seconds: Callable[[Transfer], float]
    ) -> list[Transfer]:
        """Transfers on the device, without error, that the last ``poll`` did not return, and whose
        first layer group should end within ``seconds``, the last one ``hidden_seconds`` later.
        Never waits."""
        nearly = []
        for copy in self._under_way:
            if copy.pending is None or copy.error is not None:
                continue
            first, all_groups = (copy.pending.remaining_seconds(groups) for groups in (1, None))
            if first > seconds or all_groups > seconds + hidden_seconds(copy.transfer):
                break
            nearly.append(copy.transfer)
            seconds -= all_groups
        return nearly

    def hold_compute(self, transfer_ids: Collection[int], num_groups: int | None = None) -> None:
        """Make compute that is queued from now on wait, on the device, for those of the
        transfers that are under way, or for their first ``num_groups`` layer groups."""
        for copy in self._under_way:
            if copy.transfer.id in transfer_ids and copy.pending is not None:
                copy.pending.hold_compute(num_groups)

    def num_divided_blocks(self, transfer_ids: Collection[int]) -> int:
        """Device blocks of those of the transfers that are under way by layer group."""
        transfers = (copy.transfer for copy in self._under_way if copy.transfer.overlaps)
        return sum(len(each.device_blocks) for each in transfers if each.id in transfer_ids)

    def flush(self) -> None:
        """Wait until every submitted transfer is on the device, or has failed. Copies may still
        be under way."""
        while self._num_queued > 0:
            self._add(self._submitted.get())

    def drain(self) -> None:
        """Wait until every submitted transfer has ended; ``poll`` still returns them."""
        self.flush()
        for copy in self._under_way:
            try:
                if copy.pending is not None:
                    copy.pending.wait()
                    copy.on_end()
            except Exception as failure:  # noqa: BLE001 - any error is a failed transfer
                copy.error = failure
            copy.pending = None

    def close(self) -> None:
        """Wait until every submitted transfer has ended, and join the thread; ``poll`` still
        returns the transfers. Later calls do nothing.

        A thread that does not end within a minute is left behind (``is_stuck``)."""
        if self._is_closed:
            return
        self._is_closed = True
        _switch_interval.add_users(-1)
        self._jobs.put(None)
        self._thread.join(_JOIN_SECONDS)
        if self.is_stuck:
            logger.error(
                "The %s thread still copies after %.0f s; leaving it behind",
                self.direction.value,
                _JOIN_SECONDS,
            )
        else:
            self.drain()

    def _collect(self) -> None:
        """Add the copies that the thread has submitted. Never waits."""
        while not self._submitted.empty():
            self._add(self._submitted.get())

    def _add(self, copy: _Copy) -> None:
        self._num_queued -= 1
        self._under_way.append(copy)
        if not isinstance(copy.error, Exception | None):
            self._on_death()

    def _on_death(self) -> None:
        """Break the lane, and fail the transfers that the thread left behind."""
        self.is_broken = True
        logger.error("The %s thread has died: no more copies", self.direction.value)
        error = CopyThreadDied(f"the {self.direction.value} thread has died")
        while not self._jobs.empty():
            if (job := self._jobs.get()) is not None:
                self._num_queued -= 1
                self._under_way.append(_Copy(job.transfer, None, error))

    def _run(self) -> None:
        """The thread. It hands over every transfer it takes, so that none is lost."""
        has_entered = False
        while (job := self._jobs.get()) is not None:
            try:
                if not has_entered:
                    self._backend.enter_thread(self.direction)
                    has_entered = True
                copy = self._start_copy(job, self._backend.copy)
            except Exception as error:  # noqa: BLE001 - a failed transfer; the thread goes on
                copy = _Copy(job.transfer, None, error)
            except BaseException as error:  # noqa: BLE001 - a failed transfer, and the last one
                self._submitted.put(_Copy(job.transfer, None, error))
                return
            self._submitted.put(copy)

    def _start_copy(self, job: _Job, start: _CopyFunction) -> _Copy:
        """Have the backend copy, on the calling thread."""
        began_at = time.monotonic()
        try:
            pending = start(self.direction, job.transfer, job.barrier)
            copy = _Copy(job.transfer, pending, None, job.submitted_at, began_at)
            if pending is None:
                copy.on_end()
        except Exception as error:  # noqa: BLE001 - a failed transfer; the thread goes on
            return _Copy(job.transfer, None, error)
        return copy
