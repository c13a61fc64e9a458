"""CopyLane: the copies of one direction, from submission to completion."""

import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import NamedTuple, cast

from simple_offload.backends.base import (
    Barrier,
    CopiesByLayer,
    CopyBackend,
    Direction,
    Measurement,
    Pending,
    PendingGroup,
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


@dataclass(slots=True, eq=False)
class _Copy:
    """A transfer on its way to the device, or on it."""

    transfer: Transfer
    barrier: Barrier | None
    num_groups: int
    """Layer groups that are copied one after another."""
    submitted_at: float
    began_at: float = 0.0
    """When a thread called the backend."""
    groups: list[Pending] = field(default_factory=list)
    """Those that the backend has accepted and that have not ended."""
    is_accepted: bool = False
    """The backend has accepted all of it, or it has failed."""
    error: BaseException | None = None
    stats: CopyStats | None = None

    def remaining_seconds(self) -> tuple[float, float]:
        """Expected time until the first layer group has been copied, and all of them. The first
        has been accepted."""
        known = [group.remaining_seconds() for group in self.groups]
        num_missing = self.num_groups - len(known)
        # They are about as large as those that are known.
        missing = num_missing * cast(PendingGroup, self.groups[-1]).seconds if num_missing else 0.0
        return known[0], sum(known) + missing

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
        total, num_bytes = 0.0, Counter[str]()
        try:
            for group in self.groups:
                measured = group.measure()
                num_bytes.update(measured.num_bytes)
                if measured.seconds is None:
                    return Measurement(None, num_bytes)
                total += measured.seconds
        except Exception:
            # Every byte has arrived: without a measurement the copy is still complete.
            logger.exception("A copy cannot be measured")
            return Measurement(None, {})
        return Measurement(total if self.groups else None, num_bytes)


class _Progress(NamedTuple):
    """News of a copy, from the thread that submits it."""

    copy: _Copy
    group: Pending | None
    """One that the backend has accepted; None if there are no more."""
    error: BaseException | None = None


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

    def __init__(self, backend: CopyBackend, direction: Direction, num_groups: int = 1) -> None:
        """``num_groups``: layer groups of transfers that overlap compute. More than one only where
        the backend ``CopiesByLayer``."""
        self.direction = direction
        self.is_broken = False
        """The thread has died. Every later transfer fails."""
        self._backend = backend
        self._quick_to_submit = backend if isinstance(backend, QuickToSubmit) else None
        self._num_groups = num_groups
        self._jobs: SimpleQueue[_Copy | None] = SimpleQueue()
        self._progress: SimpleQueue[_Progress] = SimpleQueue()
        """From the thread to its caller."""
        self._under_way: deque[_Copy] = deque()
        """In order of submission, which is the order in which the device copies. The device may
        have accepted only a part of the last one."""
        self._num_queued = 0
        """Transfers that the thread has not submitted whole."""
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
        num_groups = self._num_groups if transfer.overlaps else 1
        copy = _Copy(transfer, barrier, num_groups, time.monotonic())
        if self.is_broken:
            self._add(copy, LaneBroken(self.direction.value))
        elif (quick := self._quick_to_submit) is not None and (
            self._is_idle and quick.is_quick(self.direction, transfer)
        ):
            error = None
            try:
                copy.groups.extend(self._submit(copy, quickly=True))
            except Exception as failure:  # noqa: BLE001 - a failed transfer
                error = failure
            self._add(copy, error)
        else:
            self._jobs.put(copy)
            self._num_queued += 1

    def poll(self) -> list[Completion]:
        """Transfers that have ended since the last call, in order of submission. Never waits."""
        completions: list[Completion] = []
        if self._is_idle:
            return completions
        while not self._progress.empty():
            self._note(self._progress.get())
        while self._under_way and self._under_way[0].is_accepted:
            first = self._under_way[0]
            try:
                # Also where a later group was refused: the blocks of a failed copy are given away.
                if not all(group.done() for group in first.groups):
                    break
                first.on_end()
            except Exception as failure:  # noqa: BLE001 - any error is a failed transfer
                first.error = first.error or failure
            self._under_way.popleft()
            completions.append(Completion(first.transfer, first.error, first.stats))
        return completions

    def nearly_done(
        self, seconds: float, hidden_seconds: Callable[[Transfer], float]
    ) -> list[Transfer]:
        """Transfers on the device, without error, that the last ``poll`` did not return, and whose
        first layer group should end within ``seconds``, the last one ``hidden_seconds`` later. The
        device may not have accepted the last one yet. Never waits."""
        nearly = []
        for copy in self._under_way:
            if not copy.groups or copy.error is not None:
                continue
            first, all_groups = copy.remaining_seconds()
            if first > seconds or all_groups > seconds + hidden_seconds(copy.transfer):
                break
            nearly.append(copy.transfer)
            seconds -= all_groups
        return nearly

    def hold_compute(self, transfer_ids: Collection[int], num_groups: int) -> None:
        """Make compute that is queued from now on wait, on the device, for the first
        ``num_groups`` layer groups of those of the transfers that are under way. The caller waits
        until the device has accepted these. Raises RuntimeError if it has refused a group."""
        for copy in list(self._under_way):
            if copy.transfer.id in transfer_ids:
                wanted = min(num_groups, copy.num_groups)
                while len(copy.groups) < wanted and not copy.is_accepted:
                    self._note(self._progress.get())
                if copy.error is not None:
                    # Compute is about to read wrong bytes. ``poll`` waits for its first groups.
                    raise RuntimeError("a load failed after it was announced") from copy.error
                for group in copy.groups[:wanted][-1:]:
                    group.hold_compute()  # groups are copied in order

    def num_divided_blocks(self, transfer_ids: Collection[int]) -> int:
        """Device blocks of those of the transfers that are under way by layer group."""
        transfers = (copy.transfer for copy in self._under_way if copy.num_groups > 1)
        return sum(len(each.device_blocks) for each in transfers if each.id in transfer_ids)

    def flush(self) -> None:
        """Wait until every submitted transfer is on the device, or has failed. Copies may still
        be under way."""
        while self._num_queued > 0:
            if not self._thread.is_alive() and self._progress.empty():
                return  # a signal's handler raised here before, and news was lost
            self._note(self._progress.get())

    def drain(self) -> None:
        """Wait until every submitted transfer has ended; ``poll`` still returns them."""
        self.flush()
        for copy in self._under_way:
            try:
                for group in copy.groups:
                    group.wait()
                copy.on_end()
            except Exception as failure:  # noqa: BLE001 - any error is a failed transfer
                copy.error = failure
            copy.groups.clear()

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

    def _note(self, progress: _Progress) -> None:
        copy = progress.copy
        if progress.group is not None:
            copy.groups.append(progress.group)
            if len(copy.groups) == 1:
                self._under_way.append(copy)
            return
        self._num_queued -= 1
        if copy.groups:
            copy.is_accepted, copy.error = True, progress.error
        else:
            self._add(copy, progress.error)
        if not isinstance(copy.error, Exception | None):
            self._on_death()

    def _add(self, copy: _Copy, error: BaseException | None) -> None:
        """Add a copy that the backend has accepted, or that has failed."""
        copy.is_accepted, copy.error = True, error
        self._under_way.append(copy)

    def _on_death(self) -> None:
        """Break the lane, and fail the transfers that the thread left behind."""
        self.is_broken = True
        logger.error("The %s thread has died: no more copies", self.direction.value)
        error = CopyThreadDied(f"the {self.direction.value} thread has died")
        while not self._jobs.empty():
            if (copy := self._jobs.get()) is not None:
                self._num_queued -= 1
                self._add(copy, error)

    def _run(self) -> None:
        """The thread. It reports every transfer it takes, so that none is lost."""
        has_entered = False
        while (copy := self._jobs.get()) is not None:
            error: BaseException | None = None
            try:
                if not has_entered:
                    self._backend.enter_thread(self.direction)
                    has_entered = True
                for group in self._submit(copy, quickly=False):
                    self._progress.put(_Progress(copy, group))
            except BaseException as failure:  # noqa: BLE001 - a failed transfer
                error = failure
            self._progress.put(_Progress(copy, None, error))
            if not isinstance(error, Exception | None):
                return

    def _submit(self, copy: _Copy, *, quickly: bool) -> Iterator[Pending]:
        """Have the backend copy, on the calling thread. Yields what it has accepted."""
        copy.began_at = time.monotonic()
        backend, transfer = self._backend, copy.transfer
        if copy.num_groups > 1:
            by_layer = cast(CopiesByLayer, backend)
            yield from by_layer.copy_by_layer(transfer, copy.barrier, quickly=quickly)
            return
        start = cast(QuickToSubmit, backend).copy_quickly if quickly else backend.copy
        if (pending := start(self.direction, transfer, copy.barrier)) is not None:
            yield pending
        else:
            copy.on_end()
