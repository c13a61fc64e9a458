"""SharedMemory, in one process and between processes."""

import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from simple_offload.shared_memory import Address, SharedMemory
from tests.forked import in_child
from tests.worker import memory_process
from tests.worker.memory_process import MemoryProcess, num_open_files

MIB = 1 << 20
MakeProcess = Callable[..., MemoryProcess]


@pytest.fixture
def make_process() -> Iterator[MakeProcess]:
    processes: list[MemoryProcess] = []

    def make(address: Address | None = None) -> MemoryProcess:
        processes.append(MemoryProcess(address))
        return processes[-1]

    yield make
    for process in processes:
        process.kill()


def shmem_bytes() -> int:
    """Memory of the machine that files in memory take up."""
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    return next(int(line[1]) << 10 for line in lines if line[0] == "Shmem:")


# Between processes


def test_memory_lives_as_long_as_the_last_process_that_has_it(make_process: MakeProcess) -> None:
    """However that process ends. And it has no name, in /dev/shm or elsewhere, that could stay."""
    num_bytes = 64 * MIB
    creator = make_process()
    other = make_process(creator.ask(memory_process.address))
    for process in (other, creator):  # in this order: the first may be about to open it
        inherited = set(process.ask(memory_process.mappings))
        process.ask(SharedMemory.map, num_bytes)
        mapped = process.ask(memory_process.mappings)
        assert [file for file in mapped if "simple-offload" in file] == [
            "/memfd:simple-offload (deleted)"
        ]
        assert not any(file.startswith("/dev/shm") for file in set(mapped) - inherited)
    before = shmem_bytes()
    creator.ask(memory_process.fill, 0, num_bytes, 5)
    assert shmem_bytes() - before > num_bytes // 2  # other programs have such memory too
    creator.ask(SharedMemory.on_ready)
    creator.kill()
    assert other.ask(memory_process.extremes, 0, num_bytes) == (5, 5)
    other.ask(memory_process.fill, 0, MIB, 6)
    assert other.ask(memory_process.extremes, 0, num_bytes) == (5, 6)
    assert other.ask(memory_process.num_ready) == 1
    assert shmem_bytes() - before > num_bytes // 2
    other.kill()
    assert shmem_bytes() - before < num_bytes // 2


def test_addresses_that_lead_elsewhere(make_process: MakeProcess) -> None:
    """A process's number may be given to another one, and so may the numbers of its files."""
    creator = make_process()
    meant = creator.ask(memory_process.address)
    pipe = os.pipe()
    other_file = os.memfd_create("something else")
    num_open = num_open_files()
    for wrong in (
        meant._replace(token=bytes(len(meant.token))),
        meant._replace(pid=os.getpid()),
        meant._replace(descriptor=9999),
        meant._replace(pid=os.getpid(), descriptor=pipe[0]),
        meant._replace(pid=os.getpid(), descriptor=other_file),
    ):
        with pytest.raises(OSError, match=f"/proc/{wrong.pid}/fd/{wrong.descriptor}"):
            SharedMemory.open(wrong)
    SharedMemory.open(meant).close()
    creator.ask(SharedMemory.map, MIB)  # all who want it have opened it by then
    with pytest.raises(OSError, match=f"/proc/{meant.pid}/fd/{meant.descriptor}"):
        SharedMemory.open(meant)
    assert num_open_files() == num_open
    creator.kill()
    with pytest.raises(OSError, match=f"/proc/{meant.pid}/fd"):
        SharedMemory.open(meant)
    for descriptor in (*pipe, other_file):
        os.close(descriptor)


# In one process


def test_memory_is_zeroed_and_takes_up_nothing_until_it_is_written() -> None:
    memory = SharedMemory.create()
    address = memory.address
    watched = os.open(f"/proc/{address.pid}/fd/{address.descriptor}", os.O_RDONLY)
    few = 8 * MIB  # pages may be huge
    try:
        memory.map(512 * MIB)
        assert memory.num_ready == 0
        assert os.fstat(watched).st_blocks * 512 < few
        assert memory.part(256 * MIB, MIB).unique().tolist() == [0]
        memory.part(0, 1).fill_(1)
        memory.part(512 * MIB - 1, 1).fill_(1)
        assert os.fstat(watched).st_blocks * 512 < few
        assert (memory.num_ready, memory.part(0, 512 * MIB).nbytes) == (0, 512 * MIB)
    finally:
        os.close(watched)


def test_who_maps_more_than_the_others() -> None:
    """Nobody's memory becomes smaller."""
    creator = SharedMemory.create()
    other = SharedMemory.open(creator.address)
    creator.map(2 * MIB)
    other.map(MIB)
    other.part(0, MIB).fill_(1)
    creator.part(MIB, MIB).fill_(2)
    assert creator.part(0, 2 * MIB).unique().tolist() == [1, 2]
    assert creator.part(0, MIB).unique().tolist() == [1]


def test_a_python_without_memfd_create(monkeypatch: pytest.MonkeyPatch) -> None:
    """uv's Pythons are built for a libc that had none."""
    for name in ("memfd_create", "MFD_CLOEXEC"):
        monkeypatch.delattr(os, name)
    memory = SharedMemory.create()
    assert not os.get_inheritable(memory.address.descriptor)
    memory.map(MIB)
    assert is_mapped()


def create_without_a_free_descriptor() -> SharedMemory:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, most))
    return SharedMemory.create()


def test_the_system_says_why_there_is_no_memory() -> None:
    with pytest.raises(OSError, match="Too many open files"):
        in_child(create_without_a_free_descriptor)


def is_mapped() -> bool:
    return "memfd:simple-offload" in Path("/proc/self/maps").read_text()


def test_a_forked_process_has_none_of_it() -> None:
    """A fork would copy each pinned page at once: twice the memory."""
    memory = SharedMemory.create()
    memory.map(MIB)
    assert is_mapped()
    assert not in_child(is_mapped)
    memory.close()
