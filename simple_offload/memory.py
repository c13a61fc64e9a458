"""Memory of this machine: its limit, what is available now, and whose turn it is to claim some."""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import NamedTuple

import psutil

from simple_offload.logs import get_logger

logger = get_logger(__name__)

GIB = 1024**3

ROOT = Path("/")
"""The folder with the kernel's files; tests have another."""
_NO_LIMIT = 1 << 62
"""Cgroups of version 1 without a limit report a number above this."""
_MAX_RESERVE = 16 * GIB
_LOCKED = "dev/shm"
"""The folder whose lock gives a process its turn. All ranks of a server share it, since vLLM's
message queues lie there."""
_PATIENCE_SECONDS, _SHORT_SECONDS, _LOOK_SECONDS = 60.0, 1.0, 0.005
_uses_reserve = ContextVar("_uses_reserve", default=False)
_HOTPLUG = ("sys/bus/virtio/drivers/virtio_mem/virtio*", "sys/bus/vmbus/drivers/hv_balloon/*-*")
"""Devices by which a hypervisor adds memory that the kernel did not know before."""


class MemoryShortageError(MemoryError):
    """Too little memory is available now. There may be enough later."""


class Limit(NamedTuple):
    """The most memory that this process could ever use."""

    num_bytes: int
    is_final: bool
    """False if a hypervisor may add memory."""


def total_bytes() -> int:
    """Memory of the machine. MemTotal is small at first where a balloon holds memory, or the kernel
    prepares it late; the zones' "present" pages include that memory."""
    return max(int(psutil.virtual_memory().total), _present_bytes())


def limit() -> Limit:
    """The machine's memory, or the smallest limit of this process's cgroups."""
    total, limits = total_bytes(), [limit for limit, _ in _cgroups()]
    if _can_be_added():
        return Limit(min(limits, default=total), is_final=bool(limits))
    return Limit(min([total, *limits]), is_final=True)


def reserve_bytes() -> int:
    """Memory that the host tier leaves to other programs: a tenth of the limit, at most 16 GiB."""
    return min(limit().num_bytes // 10, _MAX_RESERVE)


def available_bytes() -> int:
    """Memory that this process could get now without swapping, including the reserve and the page
    cache: the kernel drops the cache before it kills a process, in a cgroup as on the machine."""
    rooms = [limit - used for limit, used in _cgroups()]
    return max(0, min([int(psutil.virtual_memory().available), *rooms]))


def require(num_bytes: int) -> None:
    """Raise MemoryShortageError unless ``num_bytes`` are available now besides the reserve."""
    available, reserve = available_bytes(), reserve_bytes()
    room = available - reserve
    if _uses_reserve.get():
        room = max(room, min(available, GIB))
    if num_bytes > room:
        raise MemoryShortageError(
            f"{num_bytes / GIB:.2f} GiB of host memory asked for, {available / GIB:.2f} GiB "
            f"available, {reserve / GIB:.2f} GiB of it reserved. Free memory, or ask "
            "for less (cpu_bytes_to_use)"
        )


@contextmanager
def using_reserve() -> Iterator[None]:
    """A context in which up to 1 GiB may come out of the reserve, for the first memory of a tier,
    and for scratch memory before. So a small tier works on a busy machine, and the rank that starts
    last can start at all."""
    token = _uses_reserve.set(True)
    try:
        yield
    finally:
        _uses_reserve.reset(token)


@contextmanager
def claim(num_bytes: int) -> Iterator[None]:
    """A context in which to put ``num_bytes`` of pages in place. Processes take turns, so that each
    sees the memory that the others have claimed. Raises MemoryShortageError on entry."""
    with _TURNS.take():
        require(num_bytes)
        yield


# Turns


class _Turns:
    """A lock on a folder: no file to create, own or leave behind, and the kernel releases the lock
    when its holder dies. Containers share the lock if they share /dev/shm."""

    def __init__(self) -> None:
        self._patience = _PATIENCE_SECONDS
        """Short after a turn that did not come, until the lock has been had again. Its holder may
        never let go: a stopped process, or any other user's."""

    @contextmanager
    def take(self) -> Iterator[None]:
        """A context with the lock, or without it where none can be had."""
        handle = None
        try:
            handle = os.open(ROOT / _LOCKED, os.O_RDONLY)
            self._lock(handle)
        except OSError as error:
            _warn_without_turns(ROOT / _LOCKED, str(error))
        try:
            yield
        finally:
            if handle is not None:
                with suppress(OSError):  # no locks here
                    # A process forked meanwhile has the handle too, and would keep the lock.
                    fcntl.flock(handle, fcntl.LOCK_UN)
                os.close(handle)
                # Waiting processes try every _LOOK_SECONDS. Without a pause this one, which claims
                # chunk after chunk, would always win.
                time.sleep(2 * _LOOK_SECONDS)

    def _lock(self, handle: int) -> None:
        """Raise OSError if locks are not supported, or when the patience is over."""
        give_up = time.monotonic() + self._patience
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= give_up:
                    self._patience = _SHORT_SECONDS
                    raise
            else:
                self._patience = _PATIENCE_SECONDS
                return
            time.sleep(_LOOK_SECONDS)  # flock has no time limit


_TURNS = _Turns()


@cache
def _warn_without_turns(folder: Path, why: str) -> None:
    """Log once per folder and reason that processes do not take turns."""
    logger.info("Host memory is taken without waiting for other processes: %s (%s)", why, folder)


# The kernel's files


def read(file: Path | str) -> str:
    """The text of a file below ``ROOT``; empty if it cannot be read."""
    try:
        return (ROOT / file).read_text(errors="replace")
    except OSError:
        return ""


def _cgroups() -> Iterator[tuple[int, int]]:
    """Of the cgroups of this process and above it that have one, the limit, and the bytes in use
    without page cache."""
    for group, is_v2 in _cgroup_folders():
        if is_v2:
            # Above memory.high a process whose pages cannot be reclaimed almost stops.
            limits = [_number(group / name) for name in ("memory.max", "memory.high")]
            used, cache = _number(group / "memory.current"), ("inactive_file", "active_file")
        else:
            limits = [_number(group / "memory.limit_in_bytes")]
            used = _number(group / "memory.usage_in_bytes")
            cache = ("total_inactive_file", "total_active_file")
        known = [each for each in limits if each is not None and each < _NO_LIMIT]
        if known:
            stat = _table(group / "memory.stat")
            cached = sum(stat.get(name, 0) for name in cache)
            yield min(known), max(0, (used or 0) - cached)


def _cgroup_folders() -> Iterator[tuple[Path, bool]]:
    """Folders of this process's cgroups and of those above, each with True for version 2. A line
    of /proc/self/cgroup is hierarchy:controllers:path; version 2 has no controllers there."""
    for line in read("proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        is_v2 = controllers == ""
        root = ROOT / "sys/fs/cgroup"
        if not is_v2:
            if "memory" not in controllers.split(","):
                continue
            root /= "memory"
        group = root / path.lstrip("/")
        for folder in (group, *group.parents):
            if root in (folder, *folder.parents):
                yield folder, is_v2


def _present_bytes() -> int:
    """Present pages of all zones, in bytes; 0 if the kernel has no such file."""
    words = (line.split() for line in read("proc/zoneinfo").splitlines())
    pages = sum(int(line[1]) for line in words if len(line) == 2 and line[0] == "present")
    return pages * os.sysconf("SC_PAGE_SIZE")


def _can_be_added() -> bool:
    return any(next(ROOT.glob(pattern), None) is not None for pattern in _HOTPLUG)


def _table(file: Path) -> dict[str, int]:
    pairs = (line.split() for line in read(file).splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2}


def _number(file: Path) -> int | None:
    """The file's number; None if there is no such file, or it holds "max"."""
    try:
        return int(read(file))
    except ValueError:
        return None
