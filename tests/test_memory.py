"""Available memory, and the reserve that processes leave when they allocate."""

import fcntl
import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from simple_offload import memory
from simple_offload.memory import GIB, Limit, MemoryShortageError
from tests.conftest import Machine
from tests.memory_ranks import CHUNK_BYTES
from tests.worker.memory_process import num_open_files

ROOT = Path(__file__).parents[1]


# Available memory


def write_group(
    machine: Machine,
    path: str,
    limit: str | int,
    used: int = 0,
    cached: tuple[int, int] = (0, 0),
    *,
    high: str | int = "max",
) -> None:
    """Write the kernel's files of a cgroup of version 2. Sizes are in GiB."""
    for name, value in {"max": limit, "high": high, "current": used}.items():
        text = value if isinstance(value, str) else str(value * GIB)
        machine.write(f"/sys/fs/cgroup{path}/memory.{name}", f"{text}\n")
    inactive, active = (size * GIB for size in cached)
    stat = f"anon 5\ninactive_file {inactive}\nactive_file {active}\n"
    machine.write(f"/sys/fs/cgroup{path}/memory.stat", stat)


def test_a_cgroup_and_those_above_it(machine: Machine) -> None:
    """The smallest limit counts. Page cache counts as available: the kernel frees it before it
    kills a process. Loading weights leaves much of it."""
    machine.write("/proc/self/cgroup", "0::/pod/server\n")
    write_group(machine, "/pod/server", 64, 50, (10, 20))
    write_group(machine, "/pod", 80, 60)
    assert memory.limit() == Limit(64 * GIB, is_final=True)
    assert memory.available_bytes() == 20 * GIB  # of the pod
    write_group(machine, "/pod", "max", 60)
    assert memory.available_bytes() == 44 * GIB
    write_group(machine, "/pod", 64, 30, high=40)
    assert memory.limit().num_bytes == 40 * GIB
    assert memory.available_bytes() == 10 * GIB
    machine.available = 3 * GIB
    assert memory.available_bytes() == 3 * GIB
    write_group(machine, "/pod", 10, 11)  # more than its limit
    assert memory.limit() == Limit(10 * GIB, is_final=True)
    assert memory.available_bytes() == 0


@pytest.mark.parametrize(
    ("membership", "path"),
    [
        ("4:memory:/\n0::/", ""),
        ("9:pids:/elsewhere\n4:cpu,memory:/pod/server\n0::/", "/pod/server"),
        # Docker without a namespace: the path is the host's, the files are the container's.
        ("4:memory:/docker/1234", ""),
    ],
    ids=["at the root", "below the root", "in a container"],
)
def test_a_cgroup_of_version_1(machine: Machine, membership: str, path: str) -> None:
    machine.write("/proc/self/cgroup", membership)
    files = {
        "limit_in_bytes": 9223372036854771712,  # none
        "usage_in_bytes": 50 * GIB,
        "stat": f"inactive_file 7\ntotal_inactive_file {GIB}\ntotal_active_file {2 * GIB}\n",
    }
    for name, value in files.items():
        machine.write(f"/sys/fs/cgroup/memory{path}/memory.{name}", f"{value}\n")
    machine.write("/sys/fs/cgroup/memory/elsewhere/memory.limit_in_bytes", "5\n")  # another's
    assert memory.limit() == Limit(100 * GIB, is_final=True)
    machine.write(f"/sys/fs/cgroup/memory{path}/memory.limit_in_bytes", f"{64 * GIB}\n")
    assert memory.limit() == Limit(64 * GIB, is_final=True)
    assert memory.available_bytes() == 17 * GIB


@pytest.mark.parametrize(
    ("total", "reserve"), [(10, 1.0), (24, 2.4), (160, 16.0), (2048, 16.0)], ids=str
)
def test_the_reserve_for_other_processes(machine: Machine, total: int, reserve: float) -> None:
    machine.num_bytes = total * GIB
    assert memory.reserve_bytes() == int(reserve * GIB)
    machine.write("/proc/self/cgroup", "0::/\n")
    write_group(machine, "", 5)
    assert memory.reserve_bytes() == GIB // 2  # in a container, a share of the container's memory


def test_the_reserve_is_not_taken(machine: Machine) -> None:
    machine.available = 12 * GIB
    with memory.claim(2 * GIB):
        pass
    with pytest.raises(MemoryShortageError) as caught, memory.claim(2 * GIB + 1):
        pytest.fail("it is taken")
    for part in ("2.00 GiB of host", "12.00 GiB available", "10.00 GiB of it reserved", "cpu_"):
        assert part in str(caught.value)


def test_the_first_chunk_may_use_the_reserve(machine: Machine) -> None:
    machine.available = 5 * GIB
    with memory.using_reserve():
        memory.require(GIB)
        with pytest.raises(MemoryShortageError):
            memory.require(GIB + 1)
    with pytest.raises(MemoryShortageError):
        memory.require(1)
    machine.available = GIB - 1
    with memory.using_reserve(), pytest.raises(MemoryShortageError):
        memory.require(GIB)
    machine.available = 15 * GIB
    with memory.using_reserve():
        memory.require(5 * GIB)  # beside the reserve


# Machines that get more memory later


def test_memory_in_a_balloon_counts_as_the_machine_s(machine: Machine) -> None:
    """Memory that the kernel has not initialised yet (deferred_init) counts too: MemTotal lacks it,
    but it is present."""
    machine.num_bytes = 31 * GIB
    page = os.sysconf("SC_PAGE_SIZE")
    machine.write(
        "/proc/zoneinfo",
        "Node 0, zone    DMA32\n"
        "  pages free     9\n        spanned  1044480\n"
        f"        present  {3 * GIB // page}\n        managed  772915\n"
        "Node 0, zone   Normal\n"
        f"        present  {252 * GIB // page}\n        managed  5\n",
    )
    assert memory.limit() == Limit(255 * GIB, is_final=True)


@pytest.mark.parametrize(
    "device",
    ["virtio/drivers/virtio_mem/virtio3", "vmbus/drivers/hv_balloon/1eccfd72-4b41-45ef-b73a"],
)
def test_memory_that_a_hypervisor_may_add(machine: Machine, device: str) -> None:
    machine.write(f"/sys/bus/{Path(device).parent}/bind", "")  # a driver without a device
    assert memory.limit() == Limit(100 * GIB, is_final=True)
    machine.write(f"/sys/bus/{device}/device", "")
    assert memory.limit() == Limit(100 * GIB, is_final=False)
    machine.write("/proc/self/cgroup", "4:memory:/\n0::/\n")
    machine.write("/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")  # none
    assert memory.limit() == Limit(100 * GIB, is_final=False)
    write_group(machine, "", 300)
    assert memory.limit() == Limit(300 * GIB, is_final=True)


# Turns


@pytest.fixture
def held(machine: Machine) -> Iterator[int]:
    """The lock as another process holds it, with a descriptor of its own."""
    handle = os.open(machine.turns, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    yield handle
    os.close(handle)


def is_locked(machine: Machine) -> bool:
    handle = os.open(machine.turns, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False


def test_processes_take_turns(held: int, monkeypatch: pytest.MonkeyPatch, machine: Machine) -> None:
    looks, num_open = 0, num_open_files()

    def look_again(seconds: float) -> None:
        nonlocal looks
        looks += 1
        if looks == 3:
            fcntl.flock(held, fcntl.LOCK_UN)

    monkeypatch.setattr(memory, "time", SimpleNamespace(monotonic=lambda: 0.0, sleep=look_again))
    with memory.claim(1):
        assert is_locked(machine)
        assert looks == 3
    assert not is_locked(machine)
    with pytest.raises(ZeroDivisionError), memory.claim(1):
        raise ZeroDivisionError
    assert not is_locked(machine)
    assert num_open_files() == num_open


def test_waiting_for_a_turn_has_a_limit(
    held: int, monkeypatch: pytest.MonkeyPatch, machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    """The holder may be a stopped process, or a hostile one of another user. A tier claims many
    chunks: they do not wait for it again, but for the next one."""
    caplog.set_level("INFO")
    now = 0.0

    def pass_time(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(memory, "time", SimpleNamespace(monotonic=lambda: now, sleep=pass_time))
    waits = []
    for is_held in (True, True, False, True, False):
        fcntl.flock(held, fcntl.LOCK_EX if is_held else fcntl.LOCK_UN)
        began = now
        with memory.claim(1):
            waits.append(round(now - began))
            assert is_locked(machine)
    assert waits == [60, 1, 0, 60, 0]
    assert "taken without waiting for other processes" in caplog.text


def test_without_a_folder_to_lock_memory_is_taken_all_the_same(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    machine.turns.rmdir()
    for _ in range(2):
        with memory.claim(1):
            pass
    assert caplog.text.count("taken without waiting for other processes") == 1


def test_a_process_forked_during_a_turn_does_not_keep_it(machine: Machine) -> None:
    context = multiprocessing.get_context("fork")
    end = context.Event()
    child = context.Process(target=end.wait, daemon=True)
    with memory.claim(1):
        child.start()
        assert is_locked(machine)
    assert not is_locked(machine)
    end.set()
    child.join()


# In a real container


@contextmanager
def limited_cgroup(num_bytes: int) -> Iterator[Path]:
    """A group below this process's own. Write the ids of its processes to its ``cgroup.procs``, and
    end them before the context ends. Skips the test on machines that let none make a group."""
    # A line of the kernel's is hierarchy:controllers:path; version 2 has no controllers there.
    lines = [line.split(":", 2) for line in memory.read("proc/self/cgroup").splitlines()]
    paths = {name: path for _, controllers, path in lines for name in controllers.split(",")}
    is_v2 = "memory" not in paths
    root = Path("/sys/fs/cgroup", "" if is_v2 else "memory")
    # Docker without a namespace: the path is the host's, the files are the container's.
    groups = [root / paths.get("" if is_v2 else "memory", "").lstrip("/"), root]
    parent = next((group for group in groups if group.is_dir()), None)
    if parent is None:
        pytest.skip("no cgroups with a memory controller")
    group = parent / f"simple-offload-test-{os.getpid()}"
    limit = group / ("memory.max" if is_v2 else "memory.limit_in_bytes")
    try:
        group.mkdir()
        if is_v2 and not limit.exists():
            (parent / "cgroup.subtree_control").write_text("+memory")
        limit.write_text(str(num_bytes))
    except OSError as error:
        if group.exists():
            group.rmdir()
        pytest.skip(f"this machine lets no test make a cgroup: {error}")
    try:
        yield group
    finally:
        group.rmdir()


def test_ranks_that_open_at_once_stay_within_their_cgroup() -> None:
    """No rank is killed, and the tiers hold most of the available memory."""
    limit, num_ranks = 512 << 20, 4
    with limited_cgroup(limit) as group:
        command = [sys.executable, "-m", "tests.memory_ranks", str(group), str(num_ranks)]
        done = subprocess.run([*command, str(limit)], cwd=ROOT, stdout=subprocess.PIPE, check=True)
    reports = json.loads(done.stdout)
    assert all("for more memory" in rank["message"] for rank in reports)
    opened = sum(rank["num_bytes"] for rank in reports)
    assert 0.9 * limit - num_ranks * (16 << 20) - 2 * CHUNK_BYTES <= opened <= limit
    # A rank that starts late takes its first chunk out of the reserve.
    assert all(rank["num_bytes"] > 0 for rank in reports)
