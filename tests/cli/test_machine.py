"""What of the machine doctor looks at: on machines made up for it."""

import resource
from pathlib import Path
from types import SimpleNamespace

import pytest

from simple_offload.cli import machine
from simple_offload.cli.checks import Status
from simple_offload.cli.machine import (
    GIB,
    check_huge_pages,
    check_lock_limit,
    check_memory,
    check_numa,
)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """100 GiB, half of which is available, and no cgroup."""
    memory = SimpleNamespace(total=100 * GIB, available=50 * GIB)
    monkeypatch.setattr("simple_offload.cli.machine.psutil.virtual_memory", lambda: memory)
    monkeypatch.setattr(machine, "memory_limit_bytes", lambda: 100 * GIB)
    return memory


def test_memory(memory: SimpleNamespace) -> None:
    assert check_memory(50 * GIB).status is Status.OK
    check = check_memory(51 * GIB)
    assert check.status is Status.WARNING
    assert "asks for 51.0 GiB" in check.advice
    assert check_memory(None).found == "50.0 GiB available of 100.0 GiB"


def test_the_cgroup_counts(memory: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "memory_limit_bytes", lambda: 20 * GIB)
    check = check_memory(21 * GIB)
    assert check.status is Status.WARNING
    assert check.found.endswith("cgroup limit 20.0 GiB")


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
    monkeypatch.setattr(machine, "_NODES", tmp_path)
    monkeypatch.setattr(machine, "_allowed_nodes", lambda: {0})
    (tmp_path / "node0").mkdir()
    assert check_numa([0]).found == "one node"
    (tmp_path / "node1").mkdir()
    assert check_numa([]).found == "2 nodes"
    assert check_numa([0, None]).status is Status.OK
    check = check_numa([0, 1])
    assert (check.status, check.found) == (Status.WARNING, "2 nodes; devices on 0, 1")


def test_allowed_nodes_are_read_from_the_kernel() -> None:
    allowed = machine._allowed_nodes()
    assert allowed is not None
    assert 0 in allowed


@pytest.mark.parametrize(
    ("text", "found", "status"),
    [
        ("always [madvise] never\n", "madvise", Status.OK),
        ("always madvise [never]\n", "never", Status.WARNING),
    ],
)
def test_huge_pages(
    text: str, found: str, status: Status, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "enabled"
    monkeypatch.setattr(machine, "_HUGE_PAGES", file)
    assert check_huge_pages().found == "not known"
    file.write_text(text)
    assert (check_huge_pages().found, check_huge_pages().status) == (found, status)
