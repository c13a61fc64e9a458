"""doctor's checks of the machine, on simulated machines."""

import re
import resource
from pathlib import Path
from typing import Any

import pytest

from simple_offload.cli.checks import Status
from simple_offload.cli.console import size_text
from simple_offload.cli.machine import (
    check_huge_pages,
    check_lock_limit,
    check_memory,
    check_numa,
    check_second_tier,
)
from simple_offload.config import SecondTierConfig
from simple_offload.memory import GIB
from tests.conftest import Machine


def test_memory(machine: Machine) -> None:
    machine.available = 60 * GIB
    assert check_memory(50 * GIB).status is Status.OK
    check = check_memory(50 * GIB + 1)
    assert check.status is Status.WARNING
    assert "50.00 GiB of host memory asked for" in check.advice
    reserved = "10 GiB reserved for other processes"
    assert check_memory(None).found == f"60 GiB available of 100 GiB; {reserved}"
    machine.write("/sys/bus/virtio/drivers/virtio_mem/virtio3/device", "")
    assert "; a hypervisor may add more; " in check_memory(None).found
    machine.write("/proc/self/cgroup", "0::/")
    machine.write("/sys/fs/cgroup/memory.max", f"{20 * GIB}")
    machine.write("/sys/fs/cgroup/memory.current", f"{5 * GIB}")
    assert check_memory(13 * GIB).status is Status.OK
    check = check_memory(13 * GIB + 1)
    assert check.status is Status.WARNING
    assert check.found == (
        "15 GiB available of 100 GiB, cgroup limit 20 GiB; 2 GiB reserved for other processes"
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


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 MiB"), (8 << 20, "8 MiB"), (GIB, "1 GiB"), (12.5 * GIB, "12.5 GiB"),
     (2000 * GIB, "2,000 GiB")],
)  # fmt: skip
def test_bytes_in_words(num_bytes: float, text: str) -> None:
    assert size_text(num_bytes) == text


def test_numa(machine: Machine) -> None:
    machine.write("/sys/devices/system/node/node0/numastat", "")
    assert check_numa([None]).found == "one node"
    for node in (1, 2):
        machine.write(f"/sys/devices/system/node/node{node}/numastat", "")
    assert check_numa([]).found == "3 nodes"
    assert check_numa([0, 2]).status is Status.OK  # this kernel does not say what is allowed
    machine.write("/proc/self/status", "Mems_allowed:\t3\nMems_allowed_list:\t0-1,5\n")
    assert check_numa([0, 1, None]).status is Status.OK
    check = check_numa([2, 0, 2])
    assert (check.status, check.found) == (Status.WARNING, "3 nodes; devices on 0, 2")
    assert "memory of nodes 0-1,5 only" in check.advice


def test_the_kernel_lists_the_allowed_nodes() -> None:
    text = Path("/proc/self/status").read_text()
    assert re.search(r"^Mems_allowed_list:\t[\d,-]+$", text, re.MULTILINE)


def test_huge_pages(machine: Machine) -> None:
    assert check_huge_pages().found == "unknown"
    for text, found, status in (
        ("always [madvise] never\n", "madvise", Status.OK),
        ("always madvise [never]\n", "never", Status.WARNING),
    ):
        machine.write("/sys/kernel/mm/transparent_hugepage/enabled", text)
        check = check_huge_pages()
        assert (check.found, check.status) == (found, status)


@pytest.mark.parametrize(
    ("options", "status", "words"),
    [
        ({"bytes": "1KiB"}, Status.OK, r"\w+, [\d,.]+ GiB free of [\d,.]+ GiB"),
        ({"bytes": "900TiB"}, Status.WARNING, r"is more than the disk has"),
        (
            {"root_dir": "/proc/kv", "bytes": "1KiB"},
            Status.ERROR,
            r"/proc: .*choose another root_dir",
        ),
        ({"root_dir": f"/{300 * 'a'}", "bytes": "1KiB"}, Status.ERROR, r"name too long"),
        ({"type": "obj", "store_config": {}}, Status.OK, r"obj, not tried"),
    ],
    ids=str,
)
def test_the_second_tier(
    options: dict[str, Any], status: Status, words: str, tmp_path: Path
) -> None:
    """In a folder that is not there yet, its parent is tried. Nothing is left."""
    wanted = {"type": "fs", "root_dir": str(tmp_path / "new" / "kv")} | options
    check = check_second_tier(SecondTierConfig(**wanted))
    assert check.status is status
    assert re.search(words, f"{check.found} {check.advice}")
    assert not list(tmp_path.iterdir())


def test_a_second_tier_in_a_chroot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel lists no file system for its root."""
    monkeypatch.setattr("simple_offload.cli.machine.psutil.disk_partitions", lambda **_: [])
    files = SecondTierConfig(type="fs", bytes=4096, root_dir=str(tmp_path))
    check = check_second_tier(files)
    assert (check.status, "unknown file system, " in check.found) == (Status.OK, True)
