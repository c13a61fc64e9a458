"""Directory: the folder of vLLM's ``fs`` tier, kept below a number of bytes."""

import fcntl
import os
import re
import stat
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from heapq import heappop, heappush
from pathlib import Path

# vLLM's names (kv_offload/file_mapper.py, tiering/fs/io.py). No other file is counted or removed:
# a user may name a folder with files of his own, such as pytorch_model.bin.
_OBJECT = re.compile(r"[0-9a-f]{16,}\.bin")
_TEMPORARY = re.compile(r"([0-9a-f]{16,}\.bin|\.o_direct_probe)_[0-9]+\.tmp")
_FOLDER = re.compile(r"[0-9a-f]{2}_g[0-9]+")
_LOCK = ".lock"

_NUM_SERVERS = 4
"""Servers in one directory that stay below the limit together: each writes at most this part of the
room that its last scan saw."""
_FULL, _CLEANED = 15 / 16, 7 / 8
"""Parts of the limit: files are removed above the first, until the second. Above the first, a
server's part of the room would become too small for an object. The second is so near that little
of the cache is lost, and so far that most scans remove nothing."""
_STALE_SECONDS = 60.0
"""After this time, a write makes a scan due."""
_FUTURE_SECONDS = 3600.0
"""Clocks of servers differ by less. A file that was used later than that has a wrong time."""
_LEFT_OVER_SECONDS = _FUTURE_SECONDS + 600.0
"""After this time, no server still writes a temporary file: an object takes seconds."""
_FAR_NS = 1 << 70


class Directory:
    """The directory in which vLLM's ``fs`` tier keeps objects, with a limit that vLLM's tier lacks
    (vllm#54327). The least recently used object leaves first; its mtime is its last use.

    A file system in a network may take long, so scans have a thread of their own. Another thread
    calls the other methods, also during a scan.

    Several servers may use one directory: files may vanish at any time, and one server removes at
    a time (``flock``). They do not know of each other's writes, so each uses a quarter of the room
    that its last scan saw. More than four servers may exceed the limit for a moment, or one whose
    last scan is long ago.

    A scan that fails leaves no room, and another one is due. So trouble that passes needs no
    restart, and the limit holds meanwhile.
    """

    def __init__(
        self,
        root: Path,
        max_bytes: int,
        on_seen: Callable[[int], None],
        on_trouble: Callable[[str], None],
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """``root`` is created with mode 0700 if it is missing; else it keeps its mode. All objects
        below it count, in bytes of their files, and may be removed. ``max_bytes`` should be 64
        objects or more: a server's part of the room may be as small as 1/64. ``clock`` gives
        seconds since 1970, as mtimes do. A scan calls ``on_seen`` with the number of bytes, since
        the start, at which this server has to stop writing, and ``on_trouble`` with a message for
        the log, once for a series of scans.

        Raises OSError that names ``root`` if it is no directory, or cannot be created or written.
        """
        self.scan_due = threading.Event()
        """Set when a scan is due: at the start, when half the room is used, or after a minute, as
        other servers write too; after one that failed, or left no room, at once."""
        self.scan_due.set()
        self._root = root
        self._max_bytes = max_bytes
        self._on_seen = on_seen
        self._on_trouble = on_trouble
        self._clock = clock
        self._written = 0
        """Bytes written since the start."""
        self._scan_at = 0
        """Bytes at which the next scan is due, so that it ends before the room is used up."""
        self._scanned = 0.0
        """When the last scan began."""
        self._troubles: set[str] = set()
        """Messages of the scan under way, or of the last one."""
        self._former_troubles: set[str] = set()
        """Messages of the scan before; they are not logged again."""
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(self._open_lock())
        except OSError as error:
            raise OSError(f"objects cannot be kept in {root}: {error}") from error

    def on_written(self, paths: Sequence[str], num_bytes: int) -> None:
        """This server has written objects, ``num_bytes`` in all: their mode becomes 0600. This is
        a use too. Missing files are ignored."""
        self._written += num_bytes
        self._change(_protect, paths)
        if self._written >= self._scan_at or self._clock() > self._scanned + _STALE_SECONDS:
            self.scan_due.set()

    def on_read(self, paths: Sequence[str]) -> None:
        """These objects were used, so they leave last. Of one call's objects the first leaves last:
        the head of a chain stays longer than its tail. Errors are ignored."""
        self._change(_touch, paths)

    def remove(self, paths: Sequence[str]) -> None:
        """Remove objects that are of no use, such as damaged ones."""
        for path in paths:
            self._delete(path)

    def scan(self) -> None:
        """Count all objects, and remove the oldest above the limit."""
        self.scan_due.clear()  # whoever writes from now on means another scan
        limit, written = self._max_bytes, self._written
        self._scan_at, self._scanned = sys.maxsize, self._clock()
        self._former_troubles, self._troubles = self._troubles, set()
        try:
            with self._turn() as may_remove:
                num_bytes = self._count(may_remove)
                if may_remove and num_bytes > limit * _FULL:
                    num_bytes -= self._remove_oldest(num_bytes - int(limit * _CLEANED))
        except Exception as error:  # noqa: BLE001 - no error may end the thread unnoticed
            num_bytes = limit
            self._warn(
                "Nothing is written to %s until a scan succeeds: %s",
                self._root,
                str(error) if isinstance(error, OSError) else traceback.format_exc(),
            )
        part = (limit - num_bytes) // _NUM_SERVERS
        # If it is still full, another server is removing files, or none can: look again soon.
        self._scan_at = written if num_bytes > limit * _FULL else written + part // 2
        if self._written >= self._scan_at:
            self.scan_due.set()
        self._on_seen(written + part)

    def _warn(self, message: str, *args: object) -> None:
        """Tell of trouble, unless this scan or the one before met the same one."""
        if message not in self._troubles | self._former_troubles:
            self._on_trouble(message % args)
        self._troubles.add(message)

    def _now_ns(self) -> int:
        return int(self._clock() * 1e9)

    def _change(self, act: Callable[[str, int], object], paths: Sequence[str]) -> None:
        now_ns = self._now_ns()
        for place, path in enumerate(paths):
            with suppress(OSError):
                # A microsecond is enough for the order, and exact in most file systems.
                act(path, now_ns - 1000 * place)

    # A scan

    def _open_lock(self) -> int:
        return os.open(self._root / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)

    @contextmanager
    def _turn(self) -> Iterator[bool]:
        """Whether this server may remove files: no other one does, as far as is known."""
        may_remove = True
        with ExitStack() as stack:
            try:
                descriptor = self._open_lock()
                stack.callback(os.close, descriptor)
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                may_remove = False
            except OSError:
                pass  # root was deleted, or can only be read, or the file system has no locks
            yield may_remove

    def _files(self) -> Iterator[tuple[os.DirEntry[str], os.stat_result]]:
        """Objects and temporary files."""
        folders = [str(self._root)]
        while folders:
            folder = folders.pop()
            try:
                with os.scandir(folder) as entries:
                    for entry in entries:
                        if entry.is_dir(follow_symlinks=False):
                            folders.append(entry.path)
                        elif _is_ours(entry.name) and entry.is_file(follow_symlinks=False):
                            with suppress(FileNotFoundError):
                                yield entry, entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                pass
            except PermissionError as error:
                if folder == str(self._root):
                    raise
                self._warn("A folder cannot be read, so what it has is not counted: %s", error)

    def _count(self, may_remove: bool) -> int:
        """Bytes of all files. Those that a killed server left over are removed, if allowed."""
        num_bytes = 0
        now_ns = self._now_ns()
        for entry, status in self._files():
            is_left_over = _TEMPORARY.fullmatch(entry.name) and (
                _last_use(status, now_ns) < now_ns - _LEFT_OVER_SECONDS * 1e9
            )
            if not (is_left_over and may_remove and self._delete(entry.path)):
                num_bytes += status.st_size
        return num_bytes

    def _remove_oldest(self, excess: int) -> int:
        """Remove the least recently used objects, of ``excess`` bytes or a little more. Returns the
        bytes of those that are gone."""
        # A scan of its own, as most scans remove nothing: so only these objects are ever listed.
        now_ns = self._now_ns()
        oldest: list[tuple[int, int, str]] = []  # a heap, its first entry the newest of them
        num_bytes = 0
        for entry, status in self._files():
            if _OBJECT.fullmatch(entry.name):
                heappush(oldest, (-_last_use(status, now_ns), status.st_size, entry.path))
                num_bytes += status.st_size
                while num_bytes - oldest[0][1] >= excess:
                    num_bytes -= heappop(oldest)[1]
        num_gone = 0
        for age, size, path in sorted(oldest, reverse=True):
            with suppress(FileNotFoundError):
                if _last_use(Path(path).lstat(), now_ns) != -age:
                    continue  # used since
            if self._delete(path):
                num_gone += size
        return num_gone

    def _delete(self, path: str) -> bool:
        """Remove a file, and its folder if it was the last one. Whether it is gone."""
        file = Path(path)
        try:
            file.unlink(missing_ok=True)
        except OSError as error:
            self._warn("Files cannot be removed, so %s may stay full: %s", self._root, error)
            return False
        # There may be a million folders, each with a few objects; a scan would read empty ones.
        if _FOLDER.fullmatch(file.parent.name):
            with suppress(OSError):
                file.parent.rmdir()
        return True


def _is_ours(name: str) -> bool:
    return bool(_OBJECT.fullmatch(name) or _TEMPORARY.fullmatch(name))


def _last_use(status: os.stat_result, now_ns: int) -> int:
    """Time of the last use, in nanoseconds, for comparison. Times in the future come before all
    others, or they would never leave. Among themselves they keep their order, which counts if this
    server's clock has jumped back."""
    time_ns = status.st_mtime_ns
    return time_ns if time_ns <= now_ns + _FUTURE_SECONDS * 1e9 else time_ns - _FAR_NS


def _touch(path: str, time_ns: int) -> None:
    os.utime(path, ns=(time_ns, time_ns), follow_symlinks=False)


def _protect(path: str, time_ns: int) -> None:
    file = Path(path)
    if stat.S_ISREG(file.lstat().st_mode):
        file.chmod(0o600)
        _touch(path, time_ns)
