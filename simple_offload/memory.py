"""Memory of this machine: how much there can ever be, how much there is now, and whose turn it is
to take some."""

import fcntl
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import psutil

logger = logging.getLogger(f"vllm.{__name__}")  # as in logs.py, for a command without vLLM

GIB = 1024**3

_ROOT = Path("/")
"""Where the kernel's files are."""
_NO_LIMIT = 1 << 62
"""What cgroups of version 1 say who have none is beyond that."""
_MOST_RESERVED = 16 * GIB
_LOCKED = Path("/dev/shm")  # noqa: S108 - nothing is written there
"""Ranks of a server share this folder: vLLM's message queues lie there."""
_PATIENCE_SECONDS, _LOOK_SECONDS = 60.0, 0.005
_first = ContextVar("_first", default=False)
_HOTPLUG = ("sys/bus/virtio/drivers/virtio_mem/virtio*", "sys/bus/vmbus/drivers/hv_balloon/*-*")
"""Devices that bring memory which the kernel knows nothing of before."""


class MemoryShortageError(MemoryError):
    """There is too little memory now. There may be enough later."""


class Limit(NamedTuple):
    """How much memory this process could ever use."""

    num_bytes: int
    is_final: bool
    """False where the hypervisor may add memory."""


def total_bytes() -> int:
    """Of the machine. A balloon, or a kernel that prepares its memory late, leaves MemTotal small
    at first; pages that are "present" in a zone include theirs."""
    return max(int(psutil.virtual_memory().total), _present_bytes())


def limit() -> Limit:
    """The machine's memory, or the smallest limit of the cgroups that this process is in."""
    total, limits = total_bytes(), [group.limit for group in _cgroups()]
    if _can_be_added():
        return Limit(min(limits, default=total), is_final=bool(limits))
    return Limit(min([total, *limits]), is_final=True)


def reserve_bytes() -> int:
    """What the host tier leaves to other programs: a tenth of the limit, at most 16 GiB."""
    return min(limit().num_bytes // 10, _MOST_RESERVED)


def available_bytes() -> int:
    """What this process could get now without swapping, the reserve included. Page cache counts:
    in a cgroup as on the machine it is given up before a process is killed."""
    rooms = [group.limit - group.used for group in _cgroups()]
    return max(0, min([int(psutil.virtual_memory().available), *rooms]))


def require(num_bytes: int) -> None:
    """Raise MemoryShortageError unless ``num_bytes`` can be taken now and the reserve is left."""
    available, reserve = available_bytes(), reserve_bytes()
    room = available - reserve
    if _first.get():
        room = max(room, min(available, GIB))
    if num_bytes > room:
        raise MemoryShortageError(
            f"{num_bytes / GIB:.2f} GiB of host memory asked for, {available / GIB:.2f} GiB "
            f"available, {reserve / GIB:.2f} GiB of it reserved. Free memory, or ask "
            "for less (cpu_bytes_to_use)"
        )


@contextmanager
def taking_first() -> Iterator[None]:
    """Within it, up to 1 GiB may come out of the reserve: a small tier works on a busy machine, and
    a rank that starts last finds what the others have left."""
    token = _first.set(True)
    try:
        yield
    finally:
        _first.reset(token)


@contextmanager
def taking(num_bytes: int) -> Iterator[None]:
    """Within it, put ``num_bytes`` of pages in place. Processes take turns, so that each sees what
    the others have taken. Raises MemoryShortageError, and nothing is to be taken."""
    with _turn():
        require(num_bytes)
        yield


# Turns


@contextmanager
def _turn() -> Iterator[None]:
    """A lock on a folder that is there: no file to be made, owned or left behind, and the kernel
    unlocks it when its holder dies. Containers share it if they share /dev/shm."""
    handle = None
    try:
        handle = os.open(_LOCKED, os.O_RDONLY)
        _lock(handle)
    except OSError as error:
        _go_on_without(str(error))
    try:
        yield
    finally:
        if handle is not None:
            os.close(handle)
            # Waiting processes look every _LOOK_SECONDS. Without a pause this one, which takes
            # chunk after chunk, would always be first.
            time.sleep(2 * _LOOK_SECONDS)


def _lock(handle: int) -> None:
    """Raises OSError where locks are not supported, or after ``_PATIENCE_SECONDS``."""
    give_up = time.monotonic() + _PATIENCE_SECONDS
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= give_up:
                raise
        else:
            return
        time.sleep(_LOOK_SECONDS)  # flock has no time limit


@cache
def _go_on_without(why: str) -> None:
    """Said once."""
    logger.info("Host memory is taken without waiting for other processes: %s (%s)", why, _LOCKED)


# What the kernel says


@dataclass(frozen=True)
class _Cgroup:
    limit: int
    used: int
    """Page cache excluded."""


def _cgroups() -> Iterator[_Cgroup]:
    """The cgroups that this process is in and those above, as far as they have a limit."""
    for group, is_v2 in _cgroup_folders():
        if is_v2:
            # Beyond memory.high a process whose pages cannot be reclaimed is all but stopped.
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
            yield _Cgroup(min(known), max(0, (used or 0) - cached))


def _cgroup_folders() -> Iterator[tuple[Path, bool]]:
    """Folders of this process's cgroup and those above it, and whether they are of version 2.
    Lines of /proc/self/cgroup are hierarchy:controllers:path, for version 2 with no controllers."""
    for line in _lines(_ROOT / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        is_v2 = controllers == ""
        root = _ROOT / "sys/fs/cgroup"
        if not is_v2:
            if "memory" not in controllers.split(","):
                continue
            root /= "memory"
        group = root / path.lstrip("/")
        for folder in (group, *group.parents):
            if root in (folder, *folder.parents):
                yield folder, is_v2


def _present_bytes() -> int:
    """Of all zones; 0 where the kernel does not say."""
    words = (line.split() for line in _lines(_ROOT / "proc/zoneinfo"))
    pages = sum(int(line[1]) for line in words if len(line) == 2 and line[0] == "present")
    return pages * os.sysconf("SC_PAGE_SIZE")


def _can_be_added() -> bool:
    return any(next(_ROOT.glob(pattern), None) is not None for pattern in _HOTPLUG)


def _table(file: Path) -> dict[str, int]:
    pairs = (line.split() for line in _lines(file))
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2}


def _number(file: Path) -> int | None:
    """None where there is no such file, or it says "max"."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []
