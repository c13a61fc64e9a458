"""doctor's checks of the machine, on simulated machines."""

import resource
from pathlib import Path

import pytest

from simple_offload.cli import machine as facts
from simple_offload.cli.checks import Status
from simple_offload.cli.machine import check_huge_pages, check_lock_limit, check_memory, check_numa
from simple_offload.memory import GIB, MemoryShortageError, require
from tests.conftest import Machine


def test_memory(machine: Machine) -> None:
    """The connector applies the same limit."""
    machine.available = 60 * GIB
    assert check_memory(50 * GIB).status is Status.OK
    check = check_memory(50 * GIB + 1)
    assert check.status is Status.WARNING
    assert "asks for 50.0 GiB" in check.advice
    with pytest.raises(MemoryShortageError):
        require(50 * GIB + 1)
    reserved = "10.0 GiB reserved for other processes"
    assert check_memory(None).found == f"60.0 GiB available of 100.0 GiB; {reserved}"
    machine.write("/sys/bus/virtio/drivers/virtio_mem/virtio3/device", "")
    assert "; a hypervisor may add more; " in check_memory(None).found
    machine.write("/proc/self/cgroup", "0::/")
    machine.write("/sys/fs/cgroup/memory.max", f"{20 * GIB}")
    machine.write("/sys/fs/cgroup/memory.current", f"{5 * GIB}")
    assert check_memory(13 * GIB).status is Status.OK
    check = check_memory(13 * GIB + 1)
    assert check.status is Status.WARNING
    assert check.found == (
        "15.0 GiB available of 100.0 GiB, cgroup limit 20.0 GiB; "
        "2.0 GiB reserved for other processes"
    )


@pytest.mark.parametrize(
    ("limit", "pinned", "status"),
    [
        (resource.RLIM_INFINITY, True, Status.OK),
        (8 * GIB, True, Status.OK),
        (8 * GIB - 1, True, Status.WARNING),
        (8 << 20, False, Status.OK),
    ],
)
def test_lock_limit(
    limit: int, pinned: bool, status: Status, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("simple_offload.cli.machine.resource.getrlimit", lambda _: (limit, limit))
    assert check_lock_limit(8 * GIB, pinned).status is status


def test_numa(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "_NODES", tmp_path)
    allowed = facts._allowed_nodes()  # as the kernel lists them
    assert allowed is not None
    assert 0 in allowed
    monkeypatch.setattr(facts, "_allowed_nodes", lambda: {0})
    (tmp_path / "node0").mkdir()
    assert check_numa([0]).found == "one node"
    (tmp_path / "node1").mkdir()
    assert check_numa([]).found == "2 nodes"
    assert check_numa([0, None]).status is Status.OK
    check = check_numa([0, 1])
    assert (check.status, check.found) == (Status.WARNING, "2 nodes; devices on 0, 1")


def test_huge_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "enabled"
    monkeypatch.setattr(facts, "_HUGE_PAGES", file)
    assert check_huge_pages().found == "unknown"
    file.write_text("always [madvise] never\n")
    assert (check_huge_pages().found, check_huge_pages().status) == ("madvise", Status.OK)
    file.write_text("always madvise [never]\n")
    assert (check_huge_pages().found, check_huge_pages().status) == ("never", Status.WARNING)
