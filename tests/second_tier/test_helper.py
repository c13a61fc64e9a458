"""The helper's process: real, over memory that both processes have."""

import fcntl
import os
import select
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from simple_offload.second_tier import helper as helper_module
from simple_offload.second_tier import helper_main
from simple_offload.second_tier.directory import Directory
from simple_offload.second_tier.helper import Helper, start_helper
from simple_offload.second_tier.process import Process
from simple_offload.second_tier.rows import Rows
from simple_offload.second_tier.seals import Seals
from simple_offload.shared_memory import SEAL_BYTES, SharedMemory
from tests.conftest import PATIENCE_SECONDS

NUM_ROWS, ROW_BYTES = 4, 4096
LIMIT = 1 << 20
NAMES = [b"first", b"second", b"third", b"fourth"]


@pytest.fixture
def rows() -> Iterator[Rows]:
    memory = SharedMemory.create()
    memory.map(NUM_ROWS * ROW_BYTES, stays_open=True)
    rows = Rows(memory.address, NUM_ROWS, ROW_BYTES)
    rows.array[:] = [[number] for number in range(NUM_ROWS)]
    yield rows
    memory.free()


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """Those of helpers that are started from now on."""
    processes: list[subprocess.Popen[bytes]] = []

    class Watched(Process):
        def __init__(self, *arguments: object) -> None:
            super().__init__(*arguments)  # type: ignore[arg-type]
            processes.append(self._process)

    monkeypatch.setattr(helper_module, "Process", Watched)
    return processes


@pytest.fixture
def helper(
    rows: Rows, tmp_path: Path, processes: list[subprocess.Popen[bytes]]
) -> Iterator[Helper]:
    helper = start_helper(rows, tmp_path / "objects", LIMIT)
    yield helper
    processes[0].send_signal(signal.SIGCONT)
    helper.close()
    assert all(each.returncode is not None for each in processes), "a process is left"


def poll_until(helper: Helper, is_done: Callable[[], bool]) -> None:
    for _ in range(30):
        if is_done():
            return
        helper.poll(1.0)
    pytest.fail("it does not end")


def test_it_makes_and_checks_seals(helper: Helper, rows: Rows) -> None:
    seals = helper.ask(Seals.make, [0, 1, 2, 3], NAMES)
    helper.wait()
    assert seals.result() == Seals(rows.array, SEAL_BYTES).make([0, 1, 2, 3], NAMES)
    rows.seal([0, 1, 2, 3], seals.result())
    rows.array[2, 0] ^= 1
    count = helper.ask(Seals.count_whole, [0, 1, 2, 3], NAMES)
    helper.wait()
    assert count.result() == 2
    assert helper.waiting_since is None


def test_it_keeps_the_directory(helper: Helper, tmp_path: Path) -> None:
    """At its end it does what it was told."""
    poll_until(helper, lambda: helper.room > 0)
    assert helper.room == LIMIT // 4
    written, useless = tmp_path / "objects" / "a", tmp_path / "objects" / "b"
    for path in (written, useless):
        path.touch()
    helper.on_written([str(written)], LIMIT // 8)
    assert helper.room == LIMIT // 8
    poll_until(helper, lambda: helper.room == LIMIT // 4)  # half the room was used
    helper.tell(Directory.remove, [str(useless)])
    helper.close()
    assert stat.S_IMODE(written.stat().st_mode) == 0o600
    assert not useless.exists()


def test_it_scans_a_full_directory_until_it_is_not(rows: Rows, tmp_path: Path) -> None:
    (tmp_path / ("a" * 64 + ".bin")).write_bytes(bytes(LIMIT))
    with (tmp_path / ".lock").open("x") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another server is removing files
        helper = start_helper(rows, tmp_path, LIMIT)
        helper.poll(1.0)
        assert helper.room == 0
    poll_until(helper, lambda: helper.room == LIMIT // 4)
    helper.close()


def test_a_long_scan_delays_no_changes_and_ends_with_the_process(
    rows: Rows,
    tmp_path: Path,
    processes: list[subprocess.Popen[bytes]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slow = SimpleNamespace(__name__="tests.second_tier.slow_scans")
    monkeypatch.setattr(helper_module, "helper_main", slow)
    helper = start_helper(rows, tmp_path, LIMIT)
    (useless := tmp_path / "useless").touch()
    helper.tell(Directory.remove, [str(useless)])
    poll_until(helper, lambda: not useless.exists())
    helper.close()
    assert processes[0].returncode == 0


def test_another_process_takes_the_place_of_a_killed_one(
    helper: Helper, rows: Rows, processes: list[subprocess.Popen[bytes]]
) -> None:
    processes[0].send_signal(signal.SIGSTOP)
    seals = helper.ask(Seals.make, [0], NAMES[:1])
    processes[0].kill()
    helper.wait()
    assert seals.cancelled()
    assert helper.error is not None
    assert helper.ask(Seals.count_whole, [1], [b"name"]).cancelled()
    assert helper.waiting_since is None
    helper.tell(Directory.on_read, ["/no/such/file"])  # without effect
    helper.poll()
    helper.restart()
    poll_until(helper, lambda: helper.room > 0)  # it has the directory
    seals = helper.ask(Seals.make, [3], NAMES[3:])
    helper.wait()
    assert seals.result() == Seals(rows.array, SEAL_BYTES).make([3], NAMES[3:])


def test_a_process_that_may_not_use_the_directory_any_more_answers_nothing(
    helper: Helper, tmp_path: Path, processes: list[subprocess.Popen[bytes]]
) -> None:
    """Whoever waits for an answer is told so."""
    processes[0].kill()
    poll_until(helper, lambda: helper.error is not None)
    (tmp_path / "objects").rename(tmp_path / "away")
    (tmp_path / "objects").touch()
    helper.restart()
    count = helper.ask(Seals.count_whole, [1], [b"name"])
    helper.wait()
    assert "objects cannot be kept in" in str(helper.error)
    assert (count.cancelled(), helper.waiting_since) == (True, None)


def test_nothing_waits_for_a_stopped_process(
    helper: Helper, processes: list[subprocess.Popen[bytes]]
) -> None:
    """What the pipe has no room for is sent once it goes on."""
    processes[0].send_signal(signal.SIGSTOP)
    for _ in range(20):
        helper.tell(Directory.on_read, ["/no/such/file" * 100] * 100)
    seals = helper.ask(Seals.make, [0], NAMES[:1])
    helper.poll()
    assert helper.waiting_since is not None
    processes[0].send_signal(signal.SIGCONT)
    helper.wait()
    assert len(seals.result()) == 1


def test_a_process_that_does_not_end_is_killed(
    helper: Helper, processes: list[subprocess.Popen[bytes]], caplog: pytest.LogCaptureFixture
) -> None:
    processes[0].send_signal(signal.SIGSTOP)
    helper.close(0.1)
    assert "did not end and is killed" in caplog.text
    assert processes[0].wait(PATIENCE_SECONDS) == -signal.SIGKILL


SERVER = """
import sys
from pathlib import Path
from simple_offload.second_tier.helper import start_helper
from simple_offload.second_tier.rows import Rows
from simple_offload.shared_memory import SharedMemory

memory = SharedMemory.create()
memory.map(4096, stays_open=True)
helper = start_helper(Rows(memory.address, 1, 4096), Path(sys.argv[1]), 1 << 20)
print("process", helper._connection._process.pid, flush=True)
sys.stdin.read()
"""


def test_it_ends_with_a_killed_server(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SERVER, str(tmp_path / "objects")]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        pid = next(line.split()[1] for line in server.stdout if line.startswith("process"))
        its_process = os.pidfd_open(int(pid))
        server.kill()
        ended, _, _ = select.select([its_process], [], [], PATIENCE_SECONDS)
        os.close(its_process)
    assert ended


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_to_all_processes_of_a_server_do_not_end_it(
    helper: Helper, processes: list[subprocess.Popen[bytes]], number: signal.Signals
) -> None:
    processes[0].send_signal(number)
    seals = helper.ask(Seals.make, [0], NAMES[:1])
    helper.wait()
    assert len(seals.result()) == 1


def test_its_process_loads_neither_torch_nor_vllm() -> None:
    code = f"import sys, {helper_main.__name__}; print({{'torch', 'vllm'}} & {{*sys.modules}})"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={**os.environ}
    )
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize("is_answer", [True, False])
def test_a_process_that_cannot_do_what_it_is_told_ends(helper: Helper, is_answer: bool) -> None:
    seals = helper.ask(Seals.make, [NUM_ROWS if is_answer else 0], NAMES[:1])
    helper.tell(Directory.on_read, ["/no/such/file" if is_answer else "\0"])
    poll_until(helper, lambda: helper.error is not None)
    assert seals.cancelled() or not is_answer
