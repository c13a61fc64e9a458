"""Host memory that a device can reach."""

import ctypes
import mmap
import platform
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from simple_offload.backends import host_memory
from simple_offload.backends.host_memory import map_memory, node_of_pci_device
from simple_offload.memory import MemoryShortageError
from tests.conftest import Machine
from tests.forked import in_child

PAGE = mmap.PAGESIZE


# Mapping


@pytest.mark.parametrize("num_bytes", [1, PAGE, 3 * PAGE + 17, 1 << 20])
def test_memory_is_as_large_as_asked_and_empty(num_bytes: int) -> None:
    memory = map_memory(num_bytes)
    assert (memory.dtype, memory.shape) == (torch.int8, (num_bytes,))
    assert memory.untyped_storage().nbytes() == num_bytes
    assert memory.data_ptr() % PAGE == 0  # a mapping of its own, which can be pinned alone
    assert not memory.any()
    part = memory[num_bytes // 2 :]
    del memory  # it lives as long as any part
    part.fill_(7)
    assert bool((part == 7).all())


def test_pages_are_in_place() -> None:
    num_bytes = 64 << 20
    before = psutil.Process().memory_info().rss
    memory = map_memory(num_bytes)
    assert psutil.Process().memory_info().rss - before > num_bytes // 2
    assert memory.nbytes == num_bytes


def test_more_than_there_is_available(machine: Machine) -> None:
    machine.available = 23 << 29
    with pytest.raises(
        MemoryShortageError, match=r"2\.00 GiB of host memory asked for, 11\.50 GiB available"
    ):
        map_memory(2 << 30)


def test_more_than_the_kernel_promises() -> None:
    """There may be more later, as with vm.overcommit_memory=2, when other programs end."""
    with pytest.raises(MemoryShortageError, match=r"32768\.00 GiB of host memory"):
        map_memory(1 << 45)


def is_mapped(address: int) -> bool:
    lines = Path("/proc/self/maps").read_text().splitlines()
    spans = (line.split()[0].split("-") for line in lines)
    return any(int(first, 16) <= address < int(last, 16) for first, last in spans)


def test_a_forked_process_has_none_of_it() -> None:
    """A forked process would get copies of pinned pages at once: twice the memory."""
    memory = map_memory(16 << 20)
    assert is_mapped(memory.data_ptr())
    assert not in_child(is_mapped, memory.data_ptr())


def test_a_kernel_without_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 12345, raising=False)
    assert map_memory(PAGE).nbytes == PAGE


# NUMA nodes


class Kernel:
    """Replaces libc on a machine of this kind: records the calls of ``syscall``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, machine: str, answer: int = 0) -> None:
        self.answer = answer
        self.calls: list[tuple[Any, ...]] = []
        monkeypatch.setattr(ctypes, "CDLL", lambda name, use_errno: self)
        monkeypatch.setattr(platform, "machine", lambda: machine)

    def syscall(self, number: int, *arguments: Any) -> int:
        self.calls.append((number, *arguments))
        return self.answer


@pytest.mark.parametrize(("machine", "number"), [("x86_64", 237), ("aarch64", 235)])
@pytest.mark.parametrize("node", [0, 3, 64, 130])
def test_memory_is_bound_to_a_node(
    monkeypatch: pytest.MonkeyPatch, machine: str, number: int, node: int
) -> None:
    kernel = Kernel(monkeypatch, machine)
    monkeypatch.setattr(ctypes, "memset", lambda *_: kernel.calls.append(("touch",)))
    memory = map_memory(PAGE, numa_node=node)
    (called, address, length, policy, mask, num_bits, flags), touched = kernel.calls
    assert touched == ("touch",)  # then, because the first touch of a page places it
    assert called == number
    assert (address.value, length.value) == (memory.data_ptr(), PAGE)
    assert (policy.value, flags.value) == (1, 0)  # preferred, not strict
    assert sum(bits << 64 * word for word, bits in enumerate(mask._obj)) == 1 << node
    assert num_bits.value >= node + 1


@pytest.mark.parametrize(("machine", "num_calls"), [("x86_64", 1), ("riscv64", 0)])
def test_a_refused_binding_is_no_error(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    machine: str,
    num_calls: int,
) -> None:
    """It is logged once: a tier has thousands of chunks. The kernel of an unknown machine is not
    asked."""
    caplog.set_level("INFO")
    kernel = Kernel(monkeypatch, machine, answer=-1)
    for _ in range(3):
        assert not map_memory(PAGE, numa_node=1).any()
    assert len(kernel.calls) == 3 * num_calls
    assert caplog.text.count("not bound to NUMA node 1") == num_calls


@pytest.fixture
def system(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder in place of /sys, with two nodes, and a PCI device on the second."""
    nodes = tmp_path / "sys/devices/system/node"
    for name in ("node0", "node1", "power"):
        (nodes / name).mkdir(parents=True)
    (tmp_path / "sys/bus/pci/devices/0000:1b:00.0").mkdir(parents=True)
    monkeypatch.setattr(host_memory, "Path", lambda path: tmp_path / path.removeprefix("/"))
    return tmp_path / "sys"


@pytest.mark.parametrize(
    ("address", "content", "node"),
    [
        ("0000:1b:00.0", "1\n", 1),
        ("0000:1B:00.0", "1\n", 1),
        ("0000:1b:00.0", "-1\n", None),
        ("0000:1b:00.0", "", None),
        ("0000:1b:00.0", "none\n", None),
        ("0000:ff:00.0", "1\n", None),  # no such device
    ],
)
def test_the_node_of_a_device(system: Path, address: str, content: str, node: int | None) -> None:
    (system / "bus/pci/devices/0000:1b:00.0/numa_node").write_text(content)
    assert node_of_pci_device(address) == node


def test_with_one_node_there_is_nothing_to_choose(system: Path) -> None:
    (system / "bus/pci/devices/0000:1b:00.0/numa_node").write_text("1\n")
    (system / "devices/system/node/node1").rmdir()
    assert node_of_pci_device("0000:1b:00.0") is None
