"""Write behind: which blocks become objects, and what happens when a disk or a server fails."""

import multiprocessing
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from itertools import count, takewhile
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId
from vllm.v1.kv_offload.tiering.fs import io, manager

from simple_offload import metrics
from simple_offload.scheduler.tier.run import Run
from tests.conftest import PATIENCE_SECONDS
from tests.second_tier.conftest import ROW_BYTES, Clock, MakeServer, Server
from tests.simulation.second_tier import ScriptedDisk

PAUSE = 30.0


@pytest.fixture
def many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four writes are under way at once."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(64))


def objects(root: Path) -> list[Path]:
    return [path for path in root.rglob("*.bin") if path.is_file()]


def written(server: Server) -> float:
    """The number of objects that were written."""
    return server.counted(metrics.SECOND_TIER_BYTES, "write") / ROW_BYTES


def put(server: Server, prompt: str) -> None:
    """Write the blocks of a prompt."""
    server.put(prompt)
    server.tidy()


# Which blocks


@pytest.mark.usefixtures("many_cores")
def test_blocks_are_written_once_in_the_order_in_which_they_came(serve: MakeServer) -> None:
    """A write has up to 64 MiB."""
    server = serve(disk=ScriptedDisk(), num_blocks=4, row_bytes=32 << 20)
    server.put("a")
    server.empty()
    server.put("ab")
    server.put("y")
    for _ in range(2):
        server.step()
    jobs = [[*each.job.keys] for each in server.behind.jobs]
    names = [server.objects.name(key) for key in (*server.keys("ab"), *server.keys("y"))]
    assert jobs == [names[:2], names[2:]]
    server.settle()
    assert server.counted(metrics.SECOND_TIER_BYTES, "write") == 3 * (32 << 20)
    server.step()
    assert not server.behind.jobs


def test_blocks_that_cannot_be_written_are_counted(serve: MakeServer) -> None:
    """More than 65536 do not wait."""
    server = serve()
    gone = [BlockHashWithGroupId(number.to_bytes(36)) for number in range(65536 - 1)]
    server.second_tier.on_stored(Run((), gone), ())
    server.put("xyz")
    assert server.counted(metrics.SECOND_TIER_DROPPED, "busy") == 2
    server.settle()
    assert server.counted(metrics.SECOND_TIER_DROPPED, "evicted") == 65536 - 1
    assert written(server) == 1
    server.empty()
    assert server.fetch("xyz") == 1


@pytest.mark.parametrize(("num_cores", "num_writes"), [(1, 1), (16, 2), (64, 4)])
def test_few_writes_are_under_way_at_once(
    serve: MakeServer, monkeypatch: pytest.MonkeyPatch, num_cores: int, num_writes: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(num_cores))
    server = serve(disk=ScriptedDisk())
    prompt = "abcdefghijklmnopqrstuvwxyz"
    for end in range(1, 27):
        server.put(prompt[:end])
        server.step()
        assert server.num_pinned == 0
        assert server.second_tier.has_pending_work, "the rest waits for steps"
    assert len(server.behind.jobs) == num_writes
    server.settle()
    assert written(server) == 26


# Blocks that change


@pytest.mark.parametrize("changes", ["before its checksum", "after it", "while it is written"])
def test_a_block_that_changes_leaves_no_object(
    serve: MakeServer,
    root: Path,
    changes: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The tier has one block, which is the source of the write."""
    may_write = threading.Event()

    def store_later(*arguments: Any) -> None:
        assert may_write.wait(PATIENCE_SECONDS)
        io.batch_store_block(*arguments)

    monkeypatch.setattr(manager, "batch_store_block", store_later)
    server = serve(num_blocks=1)
    server.connection.is_held = changes != "while it is written"
    server.put("a")
    server.step()
    if changes == "after it":
        server.connection.release()
    elif changes == "while it is written":
        server.step()
    server.put("b")
    server.connection.release()
    may_write.set()
    server.settle()
    assert [serve().fetch(prompt) for prompt in "ab"] == [0, 1]
    server.tidy()
    assert objects(root) == [server.path("b")]
    is_late = changes == "while it is written"
    assert server.counted(metrics.SECOND_TIER_DROPPED, "evicted") == (0 if is_late else 1)


def test_a_read_into_a_block_whose_checksum_is_late_is_whole(serve: MakeServer) -> None:
    server = serve(num_blocks=1)
    server.put("a")
    server.settle()
    server.connection.is_held = True
    server.put("b")
    server.step()
    request = server.request("a")
    server.step_until(lambda: server.ask(request) and server.num_pinned == 1)
    server.objects.drain()
    server.step()
    server.connection.release()
    server.step_until(lambda: not server.ask(request))
    assert server.find("a") == 1
    assert server.counted(metrics.SECOND_TIER_FAILED, "read") == 0


def test_an_idle_engine_steps_for_some_seconds_only(serve: MakeServer, clock: Clock) -> None:
    """vLLM's pause, sleep and shutdown wait until it does not. The rest is written later."""
    disk = ScriptedDisk()
    server = serve(disk=disk)
    server.connection.is_held = True
    server.step(250)
    server.put("abcdefgh")
    server.step()
    are_pending = []
    for seconds in (0, 4, 1):
        clock.now += seconds
        are_pending.append(server.second_tier.has_pending_work)
    assert are_pending == [True, True, False]
    assert not disk.objects
    server.connection.release()
    server.settle()
    assert len(disk.objects) == 8


@pytest.mark.parametrize("dies_at", range(4))
def test_a_helper_that_dies_does_not_keep_vllms_tier_open(
    serve: MakeServer, monkeypatch: pytest.MonkeyPatch, dies_at: int
) -> None:
    """At a shutdown, before or while it makes seals."""
    server = serve(disk=ScriptedDisk())
    server.connection.is_held = True
    server.put("abcdefgh")
    server.step()
    calls = count()
    receive = server.connection.receive

    def die(seconds: float = 0.0) -> Any:
        if next(calls) >= dies_at:
            raise EOFError("killed")
        return receive(seconds)

    monkeypatch.setattr(server.connection, "receive", die)
    server.second_tier.shutdown()
    assert server.behind.is_shut_down


# The directory


def test_nothing_is_written_without_room(serve: MakeServer, root: Path) -> None:
    """A server has a quarter of the room that its last scan saw."""
    put(serve(), "Z" * 24)
    server = serve(max_bytes=64 * ROW_BYTES)
    server.put("abcdefghijklmnopqrstuvwxyz")
    for num_written in (10, 17, 22):
        server.settle()
        assert not server.second_tier.has_pending_work
        assert (written(server), len(objects(root))) == (num_written, 24 + num_written)
        server.tidy()


def test_an_object_that_is_read_was_used(serve: MakeServer, root: Path) -> None:
    server = serve()
    put(server, "abc")
    server.empty()
    for path in objects(root):
        os.utime(path, (1, 1))
    assert server.fetch("abd") == 2
    server.tidy()
    assert {path for path in objects(root) if path.stat().st_mtime == 1} == {server.path("abc")}


# Shutdown


def test_a_shutdown_writes_what_waits(serve: MakeServer) -> None:
    """More than what may be under way at once."""
    prompt = "abcdefghijklmnopqrstuvwxyz"
    disk = ScriptedDisk()
    first = serve(disk=disk)
    for end in range(1, 27):
        first.put(prompt[:end])
        first.step()
    first.stop()
    assert serve(disk=disk).fetch(prompt) == 26


def test_a_shutdown_does_not_wait_for_a_tier_that_hangs(
    serve: MakeServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    may_write = threading.Event()
    monkeypatch.setattr(manager, "batch_store_block", lambda *_: may_write.wait(PATIENCE_SECONDS))
    server = serve()
    server.put("abc")
    server.second_tier.shutdown(0.05)
    assert "did not end within" in caplog.text
    may_write.set()
    for thread in threading.enumerate():
        if thread.name == "simple-offload-close":
            thread.join(PATIENCE_SECONDS)


def test_a_shutdown_ends_in_time_although_the_helper_is_stopped(
    serve: MakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM's tier ends in order, and the process is killed soon."""
    server = serve(disk=ScriptedDisk())
    server.connection.is_held = True
    server.put("abc")
    server.step()
    server.second_tier.shutdown(0.1)
    assert server.behind.is_shut_down
    assert server.connection.patience is not None
    assert server.connection.patience <= 1
    assert "did not answer" in caplog.text
    assert "did not end within" not in caplog.text


@pytest.mark.parametrize("method", ["get_finished_jobs", "shutdown"])
def test_a_shutdown_does_not_wait_for_a_tier_that_raises(
    serve: MakeServer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    method: str,
) -> None:
    """It would never say that a write has ended."""
    server = serve()
    server.put("abc")
    call = getattr(server.objects.tier, method)

    def fail() -> None:
        call()
        raise RuntimeError("a bug of the tier")

    monkeypatch.setattr(server.objects.tier, method, fail)
    server.second_tier.shutdown(PATIENCE_SECONDS)
    assert "a bug of the tier" in caplog.text
    assert "did not end within" not in caplog.text


# Trouble


@pytest.fixture
def small_disk(root: Path) -> Iterator[Path]:
    """A file system of 64 pages in the directory of objects."""
    root.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={64 * ROW_BYTES},mode=700", "tmpfs", str(root)]
    if subprocess.run(mount, check=False, capture_output=True).returncode != 0:
        pytest.skip("may not mount")
    yield root
    subprocess.run(["umount", "--lazy", str(root)], check=True)


def fill(root: Path) -> None:
    """Leave no page."""
    with (root / "others").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(root).free)


def remount(root: Path, mode: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{mode}", str(root)], check=True)


def replace(root: Path) -> None:
    """Have a file in place of the directory."""
    root.rename(root.with_name("away"))
    root.touch()


def put_back(root: Path) -> None:
    root.unlink()
    root.with_name("away").rename(root)


TROUBLES: dict[str, tuple[Callable[[Path], object], Callable[[Path], object]]] = {
    "full": (fill, lambda root: (root / "others").unlink()),
    "read-only": (lambda root: remount(root, "ro"), lambda root: remount(root, "rw")),
    "replaced": (replace, put_back),
}
"""How it begins and ends."""


@pytest.mark.usefixtures("many_cores")
@pytest.mark.parametrize("trouble", TROUBLES)
def test_writes_pause_when_some_have_failed(
    serve: MakeServer,
    root: Path,
    clock: Clock,
    trouble: str,
    request: pytest.FixtureRequest,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Nothing else breaks: what was written before is found, if it is there."""
    if trouble != "replaced":
        request.getfixturevalue("small_disk")
    begin, end = TROUBLES[trouble]
    server = serve()
    put(server, "ab")
    begin(root)
    server.connection.is_held = True
    for prompt in ("c", "cd", "cde", "cdef"):
        server.put(prompt)
        server.step()
    server.connection.release()
    server.settle()
    num_failed = server.counted(metrics.SECOND_TIER_FAILED, "write")
    assert (num_failed, written(server)) == (4, 2)
    clock.now += PAUSE - 1
    server.put("uv")
    server.step()
    assert not server.second_tier.has_pending_work
    end(root)
    clock.now += 1
    server.settle()
    assert written(server) == 4
    ours = [each for each in caplog.records if "simple_offload" in each.name]
    assert [each.getMessage() for each in ours] == [
        "The second tier could not write objects. It goes on in 30 s"
    ]
    server.empty()
    assert [server.fetch(prompt) for prompt in ("ab", "cdef", "uv")] == [2, 0, 2]
    assert len(objects(root)) == 4
    assert server.second_tier.is_on


@pytest.mark.parametrize("trouble", ["replaced", "deleted"])
def test_objects_that_are_gone_are_missed(serve: MakeServer, root: Path, trouble: str) -> None:
    """A deleted directory is made anew by the next write."""
    server = serve()
    put(server, "abc")
    server.empty()
    replace(root) if trouble == "replaced" else shutil.rmtree(root)
    assert server.fetch("abc") == 0
    if trouble == "deleted":
        put(server, "abc")
        server.empty()
        assert server.fetch("abc") == 3


ROW_OF_KILLED = 1 << 20
"""Bytes that take a while to write."""


def write_for_ever(root: Path) -> None:
    server = Server(root, num_blocks=8, row_bytes=ROW_OF_KILLED)
    for number in count():
        server.put(chr(number))
        if number % 8 == 7:
            server.settle()


@pytest.mark.slow
def test_a_killed_server_leaves_whole_objects(serve: MakeServer, root: Path) -> None:
    """And temporary files, which are no objects."""
    # No fork: it would free memory that this process has mapped, at addresses that it has reused.
    process = multiprocessing.get_context("spawn").Process(target=write_for_ever, args=(root,))
    process.start()
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not root.exists() or len(objects(root)) < 12:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.kill()
    process.join(PATIENCE_SECONDS)
    found = objects(root)
    server = serve(row_bytes=ROW_OF_KILLED)
    fetched = takewhile(lambda number: server.fetch(chr(number)), count())
    assert len([*fetched]) == len(found) >= 12
