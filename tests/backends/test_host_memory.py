"""Host memory that a device can reach."""

import ctypes
import mmap
import multiprocessing
import platform
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from simple_offload.backends import host_memory
from simple_offload.backends.host_memory import map_memory, node_of_pci_device
from simple_offload.memory import MemoryShortageError
from tests.conftest import Machine

PAGE = mmap.PAGESIZE


# Mapping


@pytest.mark.parametrize("num_bytes", [1, PAGE, 3 * PAGE + 17, 1 << 20])
def test_memory_is_as_large_as_asked_and_empty(num_bytes: int) -> None:
    memory = map_memory(num_bytes)
    assert (memory.dtype, memory.shape) == (torch.int8, (num_bytes,))
    assert memory.untyped_storage().nbytes() == num_bytes
    assert memory.data_ptr() % PAGE == 0  # a mapping of its own, which can be pinned alone
    assert not memory.any()
    memory.fill_(7)
    assert bool((memory == 7).all())


def test_memory_lives_as_long_as_its_tensor() -> None:
    part = map_memory(2 * PAGE)[PAGE:]
    part.fill_(3)
    assert bool((part == 3).all())


def test_every_byte_is_touched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver would clear untouched pages, with one thread."""
    touched: list[tuple[int, int]] = []
    clear = ctypes.memset

    def note_and_clear(address: int, value: int, size: int) -> int:
        touched.append((address, size))
        return clear(address, value, size)

    monkeypatch.setattr(host_memory, "_TOUCH_BYTES", 4 * PAGE)
    monkeypatch.setattr(ctypes, "memset", note_and_clear)
    memory = map_memory(10 * PAGE + 5)
    assert [(address - memory.data_ptr(), size) for address, size in sorted(touched)] == [
        (0, 4 * PAGE),
        (4 * PAGE, 4 * PAGE),
        (8 * PAGE, 2 * PAGE + 5),
    ]


def resident_bytes() -> int:
    return int(psutil.Process().memory_info().rss)


def test_pages_are_in_place() -> None:
    num_bytes = 64 << 20
    before = resident_bytes()
    memory = map_memory(num_bytes)
    assert resident_bytes() - before > num_bytes // 2
    assert memory.nbytes == num_bytes


def test_more_than_there_is_available(machine: Machine) -> None:
    machine.available = 23 << 29
    with pytest.raises(
        MemoryShortageError, match=r"2\.00 GiB of host memory asked for, 11\.50 GiB available"
    ):
        map_memory(2 << 30)


def test_a_forked_process_has_none_of_it() -> None:
    """A forked process would get copies of pinned pages at once: twice the memory."""
    memory = map_memory(16 << 20)
    address = memory.data_ptr()

    def is_mapped() -> bool:
        lines = Path("/proc/self/maps").read_text().splitlines()
        spans = (line.split()[0].split("-") for line in lines)
        return any(int(first, 16) <= address < int(last, 16) for first, last in spans)

    assert is_mapped()
    process = multiprocessing.get_context("fork").Process(target=lambda: sys.exit(is_mapped()))
    process.start()
    process.join()
    assert process.exitcode == 0


def test_a_kernel_without_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 12345, raising=False)
    assert map_memory(PAGE).nbytes == PAGE


# NUMA nodes


class Kernel:
    """Replaces libc: records the calls of ``syscall``."""

    def __init__(self, answer: int) -> None:
        self.answer = answer
        self.calls: list[tuple[Any, ...]] = []

    def syscall(self, number: int, *arguments: Any) -> int:
        self.calls.append((number, *arguments))
        return self.answer


@pytest.mark.parametrize(("machine", "number"), [("x86_64", 237), ("aarch64", 235)])
@pytest.mark.parametrize("node", [0, 3, 64, 130])
def test_memory_is_bound_to_a_node(
    monkeypatch: pytest.MonkeyPatch, machine: str, number: int, node: int
) -> None:
    kernel = Kernel(0)
    monkeypatch.setattr(ctypes, "CDLL", lambda name, use_errno: kernel)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    memory = map_memory(PAGE, numa_node=node)
    ((called, address, length, policy, mask, num_bits, flags),) = kernel.calls
    assert called == number
    assert (address.value, length.value) == (memory.data_ptr(), PAGE)
    assert (policy.value, flags.value) == (1, 0)  # preferred, not strict
    nodes = [
        64 * word + bit
        for word, bits in enumerate(mask._obj)
        for bit in range(64)
        if bits >> bit & 1
    ]
    assert nodes == [node]
    assert num_bits.value >= node + 1


def test_memory_is_bound_before_it_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel places a page when it is first touched."""
    order: list[str] = []
    clear = ctypes.memset
    monkeypatch.setattr(host_memory, "_prefer_node", lambda tensor, node: order.append("bind"))

    def note_and_clear(address: int, value: int, size: int) -> int:
        order.append("touch")
        return clear(address, value, size)

    monkeypatch.setattr(ctypes, "memset", note_and_clear)
    map_memory(PAGE, numa_node=0)
    assert order == ["bind", "touch"]


def test_a_refused_binding_is_no_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(ctypes, "CDLL", lambda name, use_errno: Kernel(-1))
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    assert not map_memory(PAGE, numa_node=1).any()
    assert "not bound to NUMA node 1" in caplog.text


def test_an_unknown_machine_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel(0)
    monkeypatch.setattr(ctypes, "CDLL", lambda name, use_errno: kernel)
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    map_memory(PAGE, numa_node=1)
    assert kernel.calls == []


@pytest.fixture
def system(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder in place of /sys, with two nodes, and a PCI device on the second."""
    nodes = tmp_path / "sys/devices/system/node"
    for name in ("node0", "node1", "power"):
        (nodes / name).mkdir(parents=True)
    device = tmp_path / "sys/bus/pci/devices/0000:1b:00.0"
    device.mkdir(parents=True)
    (device / "numa_node").write_text("1\n")
    monkeypatch.setattr(host_memory, "_NODES", nodes)
    monkeypatch.setattr(host_memory, "Path", lambda path: tmp_path / path.removeprefix("/"))
    return tmp_path / "sys"


@pytest.mark.parametrize("address", ["0000:1b:00.0", "0000:1B:00.0"])
@pytest.mark.usefixtures("system")
def test_the_node_of_a_device(address: str) -> None:
    assert node_of_pci_device(address) == 1


def test_with_one_node_there_is_nothing_to_choose(system: Path) -> None:
    (system / "devices/system/node/node1").rmdir()
    assert node_of_pci_device("0000:1b:00.0") is None


@pytest.mark.parametrize("content", ["-1\n", "", "none\n"])
def test_a_device_whose_node_is_not_known(system: Path, content: str) -> None:
    (system / "bus/pci/devices/0000:1b:00.0/numa_node").write_text(content)
    assert node_of_pci_device("0000:1b:00.0") is None


@pytest.mark.usefixtures("system")
def test_a_device_that_is_not_there() -> None:
    assert node_of_pci_device("0000:ff:00.0") is None
