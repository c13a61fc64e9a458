"""Available memory, and the reserve that processes leave when they allocate."""

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from simple_offload import memory
from simple_offload.memory import GIB, Limit, MemoryShortageError
from tests import cgroups
from tests.conftest import PATIENCE_SECONDS, Machine
from tests.memory_ranks import CHUNK_BYTES

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def _a_folder_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The lock is in a folder of this test's own, since other tests take turns too."""
    monkeypatch.setattr(memory, "_LOCKED", tmp_path)


# Available memory


def test_a_machine(machine: Machine) -> None:
    machine.available = 60 * GIB
    assert memory.limit() == Limit(100 * GIB, is_final=True)
    assert memory.available_bytes() == 60 * GIB


V1, V2 = "/sys/fs/cgroup/memory", "/sys/fs/cgroup"


def group_of_v1(machine: Machine, path: str, limit: int, used: int, *cached: int) -> None:
    machine.write(f"{V1}{path}/memory.limit_in_bytes", f"{limit * GIB}\n")
    machine.write(f"{V1}{path}/memory.usage_in_bytes", f"{used * GIB}\n")
    names = ("total_inactive_file", "total_active_file")
    lines = [f"{name} {size * GIB}" for name, size in zip(names, cached, strict=True)]
    machine.write(f"{V1}{path}/memory.stat", "\n".join(["inactive_file 7", *lines, ""]))


def group_of_v2(
    machine: Machine, path: str, limit: str | int, used: int, *cached: int, high: str | int = "max"
) -> None:
    for name, value in (("max", limit), ("high", high)):
        text = value if isinstance(value, str) else str(value * GIB)
        machine.write(f"{V2}{path}/memory.{name}", text + "\n")
    machine.write(f"{V2}{path}/memory.current", f"{used * GIB}\n")
    names = ("inactive_file", "active_file")
    lines = [f"{name} {size * GIB}" for name, size in zip(names, cached, strict=True)]
    machine.write(f"{V2}{path}/memory.stat", "\n".join(["anon 5", *lines, ""]))


def test_available_memory_of_a_cgroup(machine: Machine) -> None:
    """Page cache counts as available: the kernel frees it before it kills a process. Loading
    weights leaves much of it."""
    machine.write("/proc/self/cgroup", "0::/pod/server\n")
    group_of_v2(machine, "/pod/server", 64, 50, 10, 20)
    group_of_v2(machine, "/pod", 80, 60, 0, 0)
    assert memory.available_bytes() == 20 * GIB  # of the pod
    group_of_v2(machine, "/pod", "max", 60, 0, 0)
    assert memory.available_bytes() == 44 * GIB
    machine.available = 3 * GIB
    assert memory.available_bytes() == 3 * GIB


def test_available_memory_of_a_cgroup_of_version_1(machine: Machine) -> None:
    machine.write("/proc/self/cgroup", "4:memory:/pod/server\n0::/\n")
    group_of_v1(machine, "/pod/server", 64, 50, 1, 2)
    group_of_v1(machine, "", 2**33, 90, 0, 0)  # the root's limit is none
    assert memory.available_bytes() == 17 * GIB
    assert memory.limit() == Limit(64 * GIB, is_final=True)


def test_a_container_sees_its_cgroup_as_the_root(machine: Machine) -> None:
    """Docker on cgroup version 1 without a namespace: the path is the host's, the files are the
    container's."""
    machine.write("/proc/self/cgroup", "4:memory:/docker/1234\n")
    group_of_v1(machine, "", 64, 50, 0, 0)
    assert memory.available_bytes() == 14 * GIB


def test_memory_high_limits_a_cgroup(machine: Machine) -> None:
    machine.write("/proc/self/cgroup", "0::/\n")
    group_of_v2(machine, "", 64, 30, 0, 0, high=40)
    assert memory.limit().num_bytes == 40 * GIB
    assert memory.available_bytes() == 10 * GIB


def test_a_cgroup_beyond_its_limit(machine: Machine) -> None:
    machine.write("/proc/self/cgroup", "0::/\n")
    group_of_v2(machine, "", 10, 11, 0, 0)
    assert memory.available_bytes() == 0


@pytest.mark.parametrize(
    ("total", "reserve"), [(10, 1.0), (24, 2.4), (160, 16.0), (2048, 16.0)], ids=str
)
def test_the_reserve_for_other_processes(machine: Machine, total: int, reserve: float) -> None:
    machine.num_bytes = total * GIB
    assert memory.reserve_bytes() == int(reserve * GIB)
    machine.write("/proc/self/cgroup", "0::/\n")
    group_of_v2(machine, "", 5, 0, 0, 0)
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
    machine.write("/proc/self/cgroup", "0::/\n")
    group_of_v2(machine, "", 300, 0, 0, 0)
    assert memory.limit() == Limit(300 * GIB, is_final=True)


def test_this_machine() -> None:
    limit = memory.limit()
    assert 0 < memory.available_bytes() <= memory.total_bytes()
    assert 0 < limit.num_bytes <= memory.total_bytes()


# Turns

HOLD = """
import sys
from pathlib import Path
from simple_offload import memory
memory._LOCKED = Path(sys.argv[1])
with memory.claim(1):
    print("taking", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the lock while it allocates memory."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "taking\n"
        yield process
        process.kill()


def is_locked(folder: Path) -> bool:
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False


@pytest.mark.parametrize("how", ["ends", "is killed"])
def test_processes_take_turns(
    holder: subprocess.Popen[str], how: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    looks = 0

    def look_again(seconds: float) -> None:
        nonlocal looks
        looks += 1
        if looks == 3 and is_locked(tmp_path):
            if how == "is killed":
                holder.send_signal(signal.SIGKILL)
            else:
                assert holder.stdin is not None
                holder.stdin.close()
            holder.wait(PATIENCE_SECONDS)

    monkeypatch.setattr(memory, "time", SimpleNamespace(monotonic=lambda: 0.0, sleep=look_again))
    assert is_locked(tmp_path)
    with memory.claim(1):
        assert is_locked(tmp_path)
        assert looks == 3
    assert not is_locked(tmp_path)


def test_waiting_for_a_turn_has_a_limit(
    holder: subprocess.Popen[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The holder may be a stopped process, or a hostile one of another user."""
    caplog.set_level("INFO")
    memory._warn_without_turns.cache_clear()
    now = 0.0

    def pass_time(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(memory, "time", SimpleNamespace(monotonic=lambda: now, sleep=pass_time))
    with memory.claim(1):
        assert 60 <= now < 61
    assert "taken without waiting for other processes" in caplog.text
    assert holder.poll() is None


@pytest.mark.parametrize("folder", ["nowhere", "closed"])
def test_where_there_is_nothing_to_lock(
    folder: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    memory._warn_without_turns.cache_clear()
    if folder == "closed":

        def refuse(path: Path, flags: int) -> int:
            raise PermissionError(errno.EACCES, "Permission denied")

        monkeypatch.setattr(os, "open", refuse)
    monkeypatch.setattr(memory, "_LOCKED", tmp_path / folder)
    for _ in range(2):
        with memory.claim(1):
            pass
    assert [r.message.split(":")[0] for r in caplog.records] == [
        "Host memory is taken without waiting for other processes"
    ]


def test_a_turn_ends_with_an_error(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), memory.claim(1):
        raise ZeroDivisionError
    assert not is_locked(tmp_path)


# In a real container


def test_ranks_that_open_at_once_stay_within_their_cgroup() -> None:
    """No rank is killed, and the tiers hold most of the available memory."""
    limit, num_ranks = 512 << 20, 4
    try:
        with cgroups.limited(limit) as group:
            command = [sys.executable, "-m", "tests.memory_ranks", str(group)]
            process = subprocess.Popen(
                [*command, str(num_ranks), str(limit)],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            with process:
                assert process.stdin is not None
                assert process.stdout is not None
                lines = [process.stdout.readline() for _ in range(num_ranks)]
                process.stdin.close()
                assert process.wait(PATIENCE_SECONDS) == 0, "ranks have been killed"
    except cgroups.NoCgroupError as reason:
        pytest.skip(f"this machine lets no test make a cgroup: {reason}")
    reports = [json.loads(line) for line in lines]
    assert all("for more memory" in rank["message"] for rank in reports)
    opened = sum(rank["num_bytes"] for rank in reports)
    assert 0.9 * limit - num_ranks * (16 << 20) - 2 * CHUNK_BYTES <= opened <= limit
    # A rank that starts late takes its first chunk out of the reserve.
    assert all(rank["num_bytes"] > 0 for rank in reports)
