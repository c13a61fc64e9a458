"""The directory of objects: its limit, what leaves first, and other servers beside it."""

import errno
import fcntl
import logging
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from simple_offload.second_tier import directory as directory_module
from tests.second_tier.conftest import Clock

NOW = 1_800_000_000.0
SIZE = 100
LIMIT = 64 * SIZE
MOST, AFTER_REMOVAL = 60, 56
"""Objects of ``SIZE`` that may stay, and those that are left if there are more."""
HOUR = 3600


class Directory(directory_module.Directory):
    """With the room of its server, which is another process otherwise."""

    def __init__(self, root: Path, clock: Callable[[], float] = time.time) -> None:
        self.write_until = self.num_written = 0
        on_seen = partial(setattr, self, "write_until")
        super().__init__(root, LIMIT, on_seen, logging.warning, clock=clock)

    @property
    def room(self) -> int:
        return max(0, self.write_until - self.num_written)

    @property
    def is_scan_due(self) -> bool:
        return self.scan_due.is_set()

    def on_written(self, paths: Sequence[str], num_bytes: int) -> None:
        self.num_written += num_bytes
        super().on_written(paths, num_bytes)


@pytest.fixture
def clock() -> Clock:
    return Clock(NOW)


@pytest.fixture
def directory(root: Path, clock: Clock) -> Directory:
    return Directory(root, clock)


def write(path: Path, num_bytes: int = SIZE, age: float = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(num_bytes))
    os.utime(path, (NOW - age, NOW - age))
    return path


def path_of(root: Path, number: int, namespace: str = "model_0123_r0") -> Path:
    """The path of an object in vLLM's layout."""
    name = f"{number:03x}{number % 256:02x}".ljust(64, "0")
    return root / namespace / name[:3] / f"{name[3:5]}_g0" / f"{name}.bin"


def put(root: Path, numbers: range, num_bytes: int = SIZE, newest: float = 0) -> list[str]:
    """Write objects, the first one longest ago, a second apart."""
    ages = range(len(numbers) - 1, -1, -1)
    return [
        str(write(path_of(root, number), num_bytes, newest + age))
        for number, age in zip(numbers, ages, strict=True)
    ]


def objects(root: Path) -> set[str]:
    return {str(path) for path in root.rglob("*.bin")}


def calls_before(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, call: Callable[[Any], None]
) -> None:
    """``call`` with the first argument before each call of ``owner.name``."""
    original = getattr(owner, name)

    def replacement(first: Any, *args: Any, **kwargs: Any) -> Any:
        call(first)
        return original(first, *args, **kwargs)

    monkeypatch.setattr(owner, name, replacement)


class Entries(list[os.DirEntry[str]]):
    """What ``os.scandir`` found some time ago."""

    def __enter__(self) -> "Entries":
        return self

    def __exit__(self, *args: object) -> None: ...


def refuse(*args: object, **kwargs: object) -> None:
    raise PermissionError(errno.EACCES, "not allowed")


# The limit


@pytest.mark.parametrize(
    ("number", "left"), [(MOST, MOST), *((n, AFTER_REMOVAL) for n in (MOST + 1, 64, 200))]
)
def test_above_15_sixteenths_the_oldest_leave_until_7_eighths(
    directory: Directory, root: Path, number: int, left: int
) -> None:
    paths = put(root, range(number))
    directory.scan()
    assert objects(root) == set(paths[-left:])


def test_bytes_of_all_namespaces_count(directory: Directory, root: Path) -> None:
    num_bytes = LIMIT // 2 - 150
    former = write(path_of(root, 1, namespace="former_4567_r0"), num_bytes, age=101)
    large = write(path_of(root, 0), num_bytes, age=100)
    small = put(root, range(2, 6))
    directory.scan()
    assert not former.exists()
    assert objects(root) == {str(large), *small}


def test_emptied_folders_leave_too(directory: Directory, root: Path) -> None:
    """Only those of single objects: there may be a million."""
    old = write(path_of(root, 0xFFF), age=1000)
    put(root, range(MOST))
    directory.scan()
    assert not old.parent.exists()
    assert old.parent.parent.exists()
    directory.remove([str(write(root / "aaa" / f"{'a' * 64}.bin"))])
    assert list((root / "aaa").iterdir()) == []


# What leaves first


@pytest.mark.parametrize("use", ["read", "written"])
def test_the_tail_of_a_chain_leaves_before_its_head(
    directory: Directory, root: Path, clock: Clock, use: str
) -> None:
    chain = put(root, range(8))  # its head longest ago
    if use == "read":
        directory.on_read(chain)
    else:
        directory.on_written(chain, 8 * SIZE)
    clock.now += 60
    newer = put(root, range(8, 61), newest=-60)
    directory.scan()
    assert objects(root) == {*chain[:3], *newer}


@pytest.mark.parametrize("is_other", [False, True])
def test_what_is_read_during_the_scan_stays(
    directory: Directory, root: Path, monkeypatch: pytest.MonkeyPatch, is_other: bool
) -> None:
    """By this server or by another one."""
    paths = put(root, range(64), newest=100)
    reader = Directory(root, Clock(NOW)) if is_other else directory
    calls_before(monkeypatch, Path, "unlink", lambda _: reader.on_read([paths[7]]))
    directory.scan()
    assert objects(root) == {paths[7], *paths[8:]}


@pytest.mark.parametrize(("hours", "left"), [(2, range(4, 60)), (0.5, range(8, 64))])
def test_a_use_in_the_future_counts_as_the_oldest(
    directory: Directory, root: Path, hours: float, left: range
) -> None:
    """Otherwise the object would never leave. Clocks of servers may differ a little."""
    paths = put(root, range(64))
    for path in paths[60:]:
        os.utime(path, (NOW + hours * HOUR, NOW + hours * HOUR))
    directory.scan()
    assert objects(root) == {paths[number] for number in left}


def test_after_the_clock_jumped_back_the_order_is_kept(
    directory: Directory, root: Path, clock: Clock
) -> None:
    paths = put(root, range(64))
    directory.scan()
    clock.now -= 1000 * HOUR
    directory.on_read(paths[8:10])
    put(root, range(64, 72))
    directory.scan()
    assert objects(root) == {
        *paths[8:10],
        *paths[18:],
        *(str(path_of(root, n)) for n in range(64, 72)),
    }
    assert directory.room == 8 * SIZE // 4


# The room


def test_a_scan_is_due_at_the_start_and_when_half_the_room_is_used(
    directory: Directory, root: Path
) -> None:
    """The room is a quarter of what is free. So four servers that do not know of each other stay
    below the limit."""
    assert (directory.room, directory.is_scan_due) == (0, True)
    directory.scan()
    paths = put(root, range(64))
    directory.on_written(paths[:7], 7 * SIZE)
    assert (directory.room, directory.is_scan_due) == (9 * SIZE, False)
    directory.on_written(paths[7:8], SIZE)
    assert (directory.room, directory.is_scan_due) == (8 * SIZE, True)
    directory.on_written([], 10 * SIZE)
    assert directory.room == 0
    directory.scan()
    # The objects reported last were used last, the first of them at the very last.
    assert objects(root) == {*paths[:8], *paths[16:]}
    assert (directory.room, directory.is_scan_due) == (2 * SIZE, False)


def test_a_scan_is_due_after_a_minute(directory: Directory, clock: Clock) -> None:
    """Other servers write too. The old room counts until then: a first write is not refused."""
    directory.scan()
    for seconds, is_due in ((60, False), (1, True)):
        clock.now += seconds
        assert directory.room == LIMIT // 4
        directory.on_written([], 0)
        assert directory.is_scan_due == is_due


@pytest.mark.parametrize("num_written", [7, 8])
def test_what_is_written_during_a_scan_takes_room(
    directory: Directory, monkeypatch: pytest.MonkeyPatch, num_written: int
) -> None:
    """The scan may have missed it. Another one is due if it was much."""
    calls_before(monkeypatch, os, "scandir", lambda _: directory.on_written([], num_written * SIZE))
    directory.scan()
    assert directory.room == (16 - num_written) * SIZE
    assert directory.is_scan_due == (num_written == 8)


def test_four_servers_stay_below_the_limit(root: Path, clock: Clock) -> None:
    servers = [Directory(root, clock) for _ in range(4)]
    numbers = iter(range(4096))
    for _ in range(20):
        for server in servers:
            server.scan()
        for server in servers:
            while server.room >= SIZE:
                clock.now += 1
                number = next(numbers)
                server.on_written([str(write(path_of(root, number)))], SIZE)
        assert 16 <= len(objects(root)) <= 64


# Other servers


@contextmanager
def locked(root: Path) -> Iterator[None]:
    """Another server is removing files."""
    with (root / ".lock").open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@pytest.mark.parametrize(("number", "room"), [(61, SIZE // 2), (80, 0)])
def test_while_another_server_removes_this_one_counts_again_and_again(
    directory: Directory, root: Path, number: int, room: int
) -> None:
    paths = put(root, range(number))
    left_over = write(root / f"{'a' * 64}.bin_1.tmp", age=2 * HOUR)
    with locked(root):
        for _ in range(3):
            directory.scan()
            assert (directory.room, directory.is_scan_due) == (room, True)
    assert objects(root) == set(paths)
    assert left_over.exists()
    directory.scan()
    assert objects(root) == set(paths[-AFTER_REMOVAL:])
    assert not directory.is_scan_due
    with locked(root):  # the lock was given back
        pass


def test_without_locks_in_the_file_system_each_server_removes(
    directory: Directory, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(fcntl, "flock", flock)
    paths = put(root, range(64))
    directory.scan()
    assert objects(root) == set(paths[-AFTER_REMOVAL:])


@pytest.mark.parametrize("call", ["lstat", "unlink"])
def test_files_that_vanish_before_they_are_removed(
    directory: Directory, root: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """They count as gone: no others leave in their place."""
    paths = put(root, range(64))
    calls_before(monkeypatch, Path, call, os.remove)
    directory.scan()
    assert objects(root) == set(paths[-AFTER_REMOVAL:])
    assert directory.room == 8 * SIZE // 4


def test_files_and_folders_that_vanish_during_a_scan(
    directory: Directory, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_lost, in_folder, *_ = (Path(path) for path in put(root, range(20)))
    original = os.scandir

    def scandir(folder: str) -> Entries:
        if folder == str(in_lost.parent):
            in_lost.unlink()
            in_lost.parent.rmdir()
        entries = Entries(original(folder))
        if folder == str(in_folder.parent):
            in_folder.unlink()
        return entries

    monkeypatch.setattr(os, "scandir", scandir)
    directory.scan()
    assert directory.room == 46 * SIZE // 4


def test_a_deleted_root_has_room_and_stays_deleted(directory: Directory, root: Path) -> None:
    paths = put(root, range(20))
    directory.scan()
    shutil.rmtree(root)
    directory.on_read(paths)
    directory.on_written(paths, SIZE)
    directory.remove(paths)
    directory.scan()
    assert directory.room == 16 * SIZE
    assert not root.exists()
    paths = put(root, range(64))  # vLLM's writer makes it anew
    directory.scan()
    assert objects(root) == set(paths[-AFTER_REMOVAL:])


# Other files


@pytest.mark.parametrize("name", [f"{'a' * 64}.bin_123.tmp", ".o_direct_probe_123.tmp"])
def test_temporary_files_of_a_killed_server_leave(
    directory: Directory, root: Path, name: str
) -> None:
    """Others stay: objects leave for them. Another server's clock may be an hour behind."""
    old = write(root / "a_r0" / name, age=HOUR + 11 * 60)
    later = write(root / "b_r0" / name, age=-2 * HOUR)
    young = write(root / "c_r0" / name, 20 * SIZE, age=HOUR + 9 * 60)
    paths = put(root, range(44))
    directory.scan()
    assert [path.exists() for path in (old, later, young)] == [False, False, True]
    assert objects(root) == set(paths[-36:])
    assert directory.room == 8 * SIZE // 4


@pytest.mark.parametrize(
    "name",
    ["config.json", "pytorch_model.bin", "0123.bin", "notes.tmp", f"{'a' * 64}.bin.tmp", "a.bin_1"],
)
def test_files_of_others_neither_count_nor_leave(
    directory: Directory, root: Path, name: str
) -> None:
    foreign = [
        write(root / name, num_bytes=LIMIT, age=1000 * HOUR),
        write(path_of(root, 1).parent / name, num_bytes=LIMIT, age=1000 * HOUR),
    ]
    paths = put(root, range(64))
    directory.scan()
    assert all(path.exists() for path in foreign)
    assert set(paths[-AFTER_REMOVAL:]) <= objects(root)
    assert (root / ".lock").exists()
    assert directory.room == 8 * SIZE // 4


def test_symbolic_links_are_not_followed(directory: Directory, root: Path, tmp_path: Path) -> None:
    outside = write(path_of(tmp_path / "outside", 1), num_bytes=LIMIT, age=1000 * HOUR)
    outside.chmod(0o644)
    file, folder = path_of(root, 1), root / "namespace"
    file.parent.mkdir(parents=True)
    file.symlink_to(outside)
    folder.symlink_to(tmp_path / "outside")
    before = outside.stat()
    directory.on_read([str(file)])
    directory.on_written([str(file)], 0)
    directory.scan()
    after = outside.stat()
    assert (after.st_mode, after.st_mtime) == (before.st_mode, before.st_mtime)
    assert file.is_symlink()
    assert folder.is_symlink()
    assert directory.room == LIMIT // 4


# Modes and errors


def test_modes(root: Path, tmp_path: Path) -> None:
    directory = Directory(root)
    paths = put(root, range(4))
    for path in paths:
        Path(path).chmod(0o644)
    directory.on_written([paths[0], str(root / "missing.bin"), paths[2]], 2 * SIZE)
    (existing := tmp_path / "existing").mkdir(mode=0o750)
    Directory(existing)
    changed = [*map(Path, paths), root, root / ".lock", existing]
    modes = [stat.S_IMODE(path.stat().st_mode) for path in changed]
    assert modes == [0o600, 0o644, 0o600, 0o644, 0o700, 0o600, 0o750]


@pytest.mark.parametrize(
    "place", ["file", "below a file", "cannot be created", "read-only", "its lock is a link"]
)
def test_a_root_that_cannot_be_used_is_named(tmp_path: Path, place: str) -> None:
    file = write(tmp_path / "file")
    (linked := tmp_path / "linked").mkdir()
    (linked / ".lock").symlink_to(tmp_path / "outside")
    root = {
        "file": file,
        "below a file": file / "below",
        "cannot be created": Path("/proc/objects"),
        "read-only": Path("/proc"),
        "its lock is a link": linked,
    }[place]
    with pytest.raises(OSError, match=rf"objects cannot be kept in {root}: "):
        Directory(root)
    assert not (tmp_path / "outside").exists()


def test_files_that_cannot_be_removed(
    directory: Directory,
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One warning, and no room above the limit. When it works again, so does the limit."""
    paths = put(root, range(80))
    with monkeypatch.context() as refusing:
        refusing.setattr(Path, "unlink", refuse)
        for _ in range(3):
            directory.scan()
            assert directory.room == 0
    (message,) = caplog.messages
    assert message.startswith(f"Files cannot be removed, so {root} may stay full: ")
    directory.scan()
    assert objects(root) == set(paths[-AFTER_REMOVAL:])
    assert directory.room == 8 * SIZE // 4
    put(root, range(80, 104))
    with monkeypatch.context() as refusing:
        refusing.setattr(Path, "unlink", refuse)
        directory.scan()
    assert caplog.messages == [message, message]


def test_a_folder_that_cannot_be_read_is_passed_over(
    directory: Directory,
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As lost+found, where root is a whole file system."""
    put(root, range(20))
    (root / "lost+found").mkdir()

    def open_folder(folder: str) -> None:
        if folder.endswith("lost+found"):
            refuse()

    calls_before(monkeypatch, os, "scandir", open_folder)
    directory.scan()
    directory.scan()
    assert directory.room == 44 * SIZE // 4
    (message,) = caplog.messages
    assert message.startswith("A folder cannot be read, so what it has is not counted: ")


@pytest.mark.parametrize(
    "error", [PermissionError("not allowed"), OSError("input/output error"), RuntimeError("a bug")]
)
def test_a_scan_that_fails_leaves_no_room_and_is_tried_again(
    directory: Directory,
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
) -> None:
    """A root that cannot be read is not an empty one."""

    def fail(_: str) -> None:
        raise error

    with monkeypatch.context() as failing:
        failing.setattr(os, "scandir", fail)
        for _ in range(3):
            directory.scan()
            assert (directory.room, directory.is_scan_due) == (0, True)
    directory.scan()
    assert (directory.room, directory.is_scan_due) == (LIMIT // 4, False)
    (message,) = caplog.messages
    assert message.startswith(f"Nothing is written to {root} until a scan succeeds: ")
    assert str(error) in message
