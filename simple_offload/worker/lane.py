"""Lane: the copies of one direction, from submission to completion."""

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import NamedTuple

from simple_offload.backends.base import (
    Barrier,
    Copied,
    CopyBackend,
    Direction,
    Measured,
    Pending,
    QuickToSubmit,
)
from simple_offload.logs import get_logger
from simple_offload.metadata import Transfer

logger = get_logger(__name__)

_JOIN_SECONDS = 60.0
_MAX_DEATHS = 2


class Took(NamedTuple):
    """How a copy went. Where the device does not measure, it ends when that is noticed."""

    seconds: float
    waited: float
    """Seconds from its submission to its begin."""
    num_bytes: Mapping[str, int] | None
    """By path; None where the backend has but one."""


class Completion(NamedTuple):
    """A transfer that has ended on this rank; ``error`` is None when every byte arrived."""

    transfer: Transfer
    error: BaseException | None
    took: Took | None = None
    """None when it failed."""


class CopyThreadDied(RuntimeError):
    """The copy thread died before it got to this transfer."""


class LaneBroken(RuntimeError):
    """The copy thread of a direction has died too often; nothing is copied any more."""


@dataclass(slots=True, eq=False)
class _Submitted:
    """What a thread says of a transfer: handed over (maybe ended already), or failed."""

    transfer: Transfer
    pending: Pending | None
    error: BaseException | None = None
    submitted_at: float = 0.0
    began_at: float = 0.0
    """When the thread took it."""
    took: Took | None = None

    def end(self) -> None:
        """The copy has ended. Later calls change nothing."""
        if self.took is None and self.error is None:
            now = time.monotonic()
            copied = self._measured()
            seconds = copied.seconds if copied is not None else None
            if seconds is None:
                seconds = now - self.began_at
            waited = max(now - self.submitted_at - seconds, 0.0)
            self.took = Took(seconds, waited, copied.num_bytes if copied is not None else None)

    def _measured(self) -> Copied | None:
        pending: object = self.pending
        try:
            return pending.copied() if isinstance(pending, Measured) else None
        except Exception:
            # Every byte has arrived: what cannot be measured has not failed.
            logger.exception("A copy cannot be measured")
            return None


_Copy = Callable[[Direction, Transfer, Barrier | None], Pending | None]


class _Job(NamedTuple):
    transfer: Transfer
    barrier: Barrier | None
    submitted_at: float


@dataclass(eq=False)
class _Life:
    """What a lane and one thread of its share. A thread's successor gets another."""

    jobs: SimpleQueue[_Job | None] = field(default_factory=SimpleQueue)
    submitted: SimpleQueue[_Submitted] = field(default_factory=SimpleQueue)
    progress: threading.Condition = field(default_factory=threading.Condition)
    num_handed: int = 0
    dead: bool = False
    num_collected: int = 0  # the lane's own

    def hand_over(self, submitted: _Submitted, dead: bool = False) -> None:
        self.submitted.put(submitted)
        with self.progress:
            self.num_handed += 1
            self.dead = dead
            self.progress.notify_all()


class Lane:
    """The copies of one direction, submitted in order by one thread, or by the caller's: where
    the device has nothing to copy, somebody waits for the copy and its submission is quick. A
    thread may take longer to wake up than the copy takes, as long as vLLM's threads need Python's
    interpreter lock to take in other requests.

    The first time that the thread dies another takes its place; the second time the lane is
    broken. What a dead thread leaves behind fails.
    """

    def __init__(self, backend: CopyBackend, direction: Direction) -> None:
        self.direction = direction
        self.num_deaths = 0
        self._backend = backend
        self._quick_to_submit = backend if isinstance(backend, QuickToSubmit) else None
        self._under_way: deque[_Submitted] = deque()
        self._num_open = 0
        self._closing = False
        self._start()

    @property
    def broken(self) -> bool:
        return self.num_deaths >= _MAX_DEATHS

    @property
    def stuck(self) -> bool:
        """Whether the thread goes on although the lane has been closed."""
        return self._closing and self._thread.is_alive()

    def submit(self, transfer: Transfer, barrier: Barrier | None) -> None:
        job = _Job(transfer, barrier, time.monotonic())
        if self.broken:
            self._under_way.append(_Submitted(transfer, None, LaneBroken(self.direction.value)))
        elif (quick := self._quick_to_submit) is not None and (
            self._num_open == 0 and quick.is_quick(self.direction, transfer)
        ):
            self._under_way.append(self._start_copy(job, quick.copy_quickly))
        else:
            self._life.jobs.put(job)
        self._num_open += 1  # now: a signal may have raised before, and nobody has the copy then

    def poll(self) -> list[Completion]:
        """What has ended since the last call, in order of submission."""
        completions: list[Completion] = []
        if self._num_open == 0:
            return completions
        self._collect()
        while self._under_way:
            first = self._under_way[0]
            try:
                if first.error is None and first.pending and not first.pending.done():
                    break
                first.end()
            except Exception as failure:  # noqa: BLE001 - whatever it is, it is the transfer's
                first.error = failure
            self._under_way.popleft()
            completions.append(Completion(first.transfer, first.error, first.took))
        self._num_open -= len(completions)
        return completions

    def nearly_done(self, seconds: float) -> list[Transfer]:
        """Of what ``poll`` still has to return, the transfers that the device has been handed
        and should end within ``seconds``."""
        nearly = []
        for submitted in self._under_way:  # in the order in which the device copies them
            if submitted.pending is None or submitted.error is not None:
                continue
            seconds -= submitted.pending.remaining_seconds()
            if seconds < 0:
                break
            nearly.append(submitted.transfer)
        return nearly

    def hold_compute(self, transfer_ids: Collection[int]) -> None:
        """Let later compute wait for those of the transfers that have not ended."""
        for submitted in self._under_way:
            if submitted.transfer.id in transfer_ids and submitted.pending is not None:
                submitted.pending.hold_compute()

    def settle(self) -> None:
        """Wait until every submitted transfer has been handed to the device, or has failed."""
        life = self._life
        with life.progress:
            life.progress.wait_for(lambda: life.dead or life.num_handed >= self._num_taken())
        self._collect()

    def drain(self) -> None:
        """Wait until every submitted transfer has ended; ``poll`` still has them to return."""
        self.settle()
        for submitted in self._under_way:
            try:
                if submitted.pending is not None:
                    submitted.pending.wait()
                    submitted.end()
            except Exception as failure:  # noqa: BLE001 - as in poll
                submitted.error = failure
            submitted.pending = None

    def close(self) -> list[Completion]:
        """Let the thread finish what it was given, join it, and wait for the copies."""
        self._closing = True
        self._life.jobs.put(None)
        self._thread.join(_JOIN_SECONDS)
        if self.stuck:
            logger.error(
                "The %s thread still copies after %.0f s; leaving it behind",
                self.direction.value,
                _JOIN_SECONDS,
            )
            return []
        self.drain()
        return self.poll()

    def _start(self) -> None:
        self._life = _Life()
        self._thread = threading.Thread(
            target=self._run,
            args=(self._life,),
            name=f"simple-offload-{self.direction.value}",
            daemon=True,
        )
        self._thread.start()

    def _num_taken(self) -> int:
        """Transfers that the current thread has been given."""
        return self._life.num_collected + self._num_open - len(self._under_way)

    def _collect(self) -> None:
        """Take what the thread has handed over; bury it if it has died."""
        life = self._life
        dead = life.dead
        while True:
            try:
                self._under_way.append(life.submitted.get_nowait())
                life.num_collected += 1
            except Empty:
                break
        if dead and not self.broken:
            self._bury()

    def _bury(self) -> None:
        """Fail what the dead thread never took, and start another unless this is the end."""
        self.num_deaths += 1
        while True:
            try:
                job = self._life.jobs.get_nowait()
            except Empty:
                break
            if job is not None:
                error = CopyThreadDied(f"the {self.direction.value} thread has died")
                self._under_way.append(_Submitted(job.transfer, None, error))
        if self._closing:
            self.num_deaths = _MAX_DEATHS
        elif self.broken:
            logger.error("The %s thread has died again: no more copies", self.direction.value)
        else:
            logger.error("The %s thread has died: starting another", self.direction.value)
            self._start()

    def _run(self, life: _Life) -> None:
        entered = False
        while (job := life.jobs.get()) is not None:
            try:
                if not entered:
                    self._backend.enter_thread(self.direction)
                    entered = True
                life.hand_over(self._start_copy(job, self._backend.copy))
            except Exception as error:  # noqa: BLE001 - a failed transfer, and the thread goes on
                life.hand_over(_Submitted(job.transfer, None, error))
            except BaseException as error:  # noqa: BLE001 - a failed transfer, and its last one
                life.hand_over(_Submitted(job.transfer, None, error), dead=True)
                return

    def _start_copy(self, job: _Job, copy: _Copy) -> _Submitted:
        """Have the backend copy, on the calling thread."""
        began_at = time.monotonic()
        try:
            pending = copy(self.direction, job.transfer, job.barrier)
            submitted = _Submitted(job.transfer, pending, None, job.submitted_at, began_at)
            if pending is None:
                submitted.end()
        except Exception as error:  # noqa: BLE001 - a failed transfer, and the thread goes on
            return _Submitted(job.transfer, None, error)
        return submitted
