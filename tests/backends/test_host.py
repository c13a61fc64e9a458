"""HostBackend: it copies exactly the requested rows, and other Python threads run meanwhile."""

import sys
import threading
import weakref
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from simple_offload.backends.base import Direction
from simple_offload.backends.host import HostBackend
from simple_offload.metadata import Transfer
from tests.backends.sides import Sides

both_ways = pytest.mark.parametrize("direction", Direction)


@given(
    pages=st.lists(st.integers(1, 40), max_size=3),
    direction=st.sampled_from(Direction),
    device=st.lists(st.integers(0, 6), unique=True),
    host=st.permutations(range(9)),
)
def test_exactly_the_asked_rows_move(
    pages: list[int], direction: Direction, device: list[int], host: list[int]
) -> None:
    sides = Sides(HostBackend(), pages, 7, num_host_blocks=9)
    sides.copy_and_check(direction, device, host[: len(device)])


@both_ways
def test_one_block_may_go_to_several(direction: Direction) -> None:
    sides = Sides(HostBackend(), [16, 8], 4)
    several, same = [0, 2, 3], [1, 1, 1]
    blocks = (several, same) if direction is Direction.LOAD else (same, several)
    sides.copy_and_check(direction, *blocks)


@both_ways
@pytest.mark.parametrize(
    ("device", "host", "named"),
    [
        ([1, 4], [0, 1], "device blocks 1 to 4; there are 4"),
        ([10**9], [0], "device blocks 1000000000 to 1000000000; there are 4"),
        ([0, -1], [0, 1], "device blocks -1 to 0; there are 4"),
        ([0, 1], [6, 2], "host blocks 2 to 6; there are 6"),
        ([0, 1], [5, -6], "host blocks -6 to 5; there are 6"),
    ],
)
def test_a_block_outside_the_regions(
    direction: Direction, device: list[int], host: list[int], named: str
) -> None:
    """The copy fails before any byte moves. Every backend makes this check."""
    sides = Sides(HostBackend(), [16, 8], 4, num_host_blocks=6)
    before = sides.contents()
    with pytest.raises(IndexError, match=f"transfer 0 names {named}"):
        sides.copy(direction, device, host)
    sides.check(before)


@pytest.mark.parametrize("num_bytes", [0, 1, 5 * 24])
def test_host_memory_is_as_large_as_asked(num_bytes: int) -> None:
    memory = HostBackend().allocate_host(num_bytes)
    assert (memory.shape, memory.dtype) == ((num_bytes,), torch.int8)
    assert memory.untyped_storage().nbytes() == num_bytes


def test_all_host_memory_is_one_chunk() -> None:
    """Host memory is not pinned here, so opening it in chunks would gain nothing."""
    assert HostBackend.chunk_bytes > 2**60
    with pytest.raises(AssertionError, match="there is one chunk"):
        Sides(HostBackend(), [16], 2, chunk_blocks=1)


def test_closing_frees_memory() -> None:
    backend = HostBackend()
    memory = [np.zeros((2, 16), dtype=np.int8) for _ in range(2)]
    backend.open([torch.from_numpy(memory[0])])
    backend.add_host_chunk([torch.from_numpy(memory[1])])
    held = [weakref.ref(array) for array in memory]
    memory.clear()
    assert all(ref() is not None for ref in held)
    backend.close()
    assert all(ref() is None for ref in held)


# The interpreter lock


@pytest.fixture
def no_forced_switches() -> Iterator[None]:
    """During this test, a thread that holds the interpreter lock releases it only by itself."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)
    yield
    sys.setswitchinterval(interval)


def another_thread_runs_during(work: Callable[[], object], attempts: int) -> bool:
    """Whether, in any of the attempts, a waiting Python thread ran before ``work`` had ended.
    Forced switches are off, so it runs only if ``work`` releases the lock."""
    for _ in range(attempts):
        ran: list[bool] = []
        ready, go = threading.Event(), threading.Lock()
        go.acquire()

        def wait_and_run(ready: threading.Event, go: threading.Lock, ran: list[bool]) -> None:
            ready.set()
            with go:
                ran.append(True)

        thread = threading.Thread(target=wait_and_run, args=(ready, go, ran))
        thread.start()
        ready.wait()
        go.release()  # from here on the thread lacks nothing but the interpreter lock
        work()
        ran_during = bool(ran)
        thread.join()
        if ran_during:
            return True
    return False


@pytest.mark.usefixtures("no_forced_switches")
@both_ways
def test_python_runs_while_bytes_move(direction: Direction) -> None:
    """One attempt is enough in nearly all runs: the copy takes milliseconds. On a busy machine the
    kernel may schedule the other thread too late, so there are several attempts."""
    blocks = np.arange(256)
    sides = Sides(HostBackend(), [2**16], len(blocks))
    transfer = Transfer(0, blocks, blocks[::-1])
    copy = sides.backend.copy
    assert another_thread_runs_during(lambda: copy(direction, transfer, None), attempts=100)


@pytest.mark.usefixtures("no_forced_switches")
def test_a_copy_that_keeps_the_lock_is_detected() -> None:
    source, target = bytes(2**24), bytearray(2**24)

    def copy() -> None:
        target[:] = source

    assert not another_thread_runs_during(copy, attempts=10)
