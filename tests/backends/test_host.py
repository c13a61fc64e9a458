"""HostBackend: it copies exactly the requested rows, and other Python threads run meanwhile."""

import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from simple_offload.backends.base import Direction
from simple_offload.backends.host import HostBackend
from simple_offload.metadata import Transfer

Bytes = npt.NDArray[np.int8]


@dataclass(frozen=True)
class Form:
    """A region on the device: rows of ``page`` bytes, ``gap`` bytes between them and ``in_front``
    of the first."""

    page: int
    gap: int = 0
    in_front: int = 0


class Bench:
    """Device and host memory of random bytes, with a backend that copies between their regions."""

    def __init__(
        self, forms: Sequence[Form], num_device_blocks: int, num_host_blocks: int, seed: int = 0
    ) -> None:
        noise = np.random.default_rng(seed)
        self.backend = HostBackend()
        self.forms = forms
        self.device_memory: list[Bytes] = []
        device, host = [], []
        memory_of_host = self.backend.allocate_host(
            num_host_blocks * sum(form.page for form in forms)
        )
        parts = memory_of_host.split([num_host_blocks * form.page for form in forms])
        for form, part in zip(forms, parts, strict=True):
            stride = form.page + form.gap
            memory = noise.integers(
                -128, 128, form.in_front + num_device_blocks * stride, dtype=np.int8
            )
            self.device_memory.append(memory)
            rows = torch.from_numpy(memory)[form.in_front :].view(num_device_blocks, stride)
            device.append(rows[:, : form.page])
            host.append(part.view(num_host_blocks, form.page))
            host[-1].copy_(torch.from_numpy(noise.integers(-128, 128, host[-1].shape, np.int8)))
        self.host_memory: list[Bytes] = [region.numpy() for region in host]
        self.backend.open(device)
        self.backend.add_host_chunk(host)

    def snapshot(self) -> tuple[list[Bytes], list[Bytes]]:
        return [m.copy() for m in self.device_memory], [m.copy() for m in self.host_memory]

    def copy(self, direction: Direction, device: Sequence[int], host: Sequence[int]) -> None:
        self.backend.copy(direction, Transfer.pairing(1, device, host), self.backend.barrier())

    def expect(
        self,
        before: tuple[list[Bytes], list[Bytes]],
        direction: Direction,
        pairs: Sequence[tuple[int, int]],
    ) -> None:
        """Fail unless memory equals ``before`` with the pairs copied byte by byte."""
        for form, device, host in zip(self.forms, *before, strict=True):
            for device_block, host_block in pairs:
                start = form.in_front + device_block * (form.page + form.gap)
                page = slice(start, start + form.page)
                if direction is Direction.LOAD:
                    device[page] = host[host_block]
                else:
                    host[host_block] = device[page]
        device_found, host_found = self.snapshot()
        for wanted, found in zip(
            (*before[0], *before[1]), (*device_found, *host_found), strict=True
        ):
            assert np.array_equal(found, wanted)


FORMS = st.lists(
    st.builds(Form, st.integers(1, 40), st.integers(0, 9), st.integers(0, 9)), max_size=3
)


@given(
    forms=FORMS,
    direction=st.sampled_from(Direction),
    device=st.lists(st.integers(0, 6), unique=True),
    host=st.permutations(range(9)),
)
def test_exactly_the_asked_rows_move(
    forms: list[Form], direction: Direction, device: list[int], host: list[int]
) -> None:
    bench = Bench(forms, 7, 9)
    before = bench.snapshot()
    host = host[: len(device)]
    bench.copy(direction, device, host)
    bench.expect(before, direction, list(zip(device, host, strict=True)))


@pytest.mark.parametrize("direction", Direction)
def test_one_block_may_go_to_several(direction: Direction) -> None:
    bench = Bench([Form(16), Form(8, gap=8)], 4, 4)
    before = bench.snapshot()
    several, same = [0, 2, 3], [1, 1, 1]
    device, host = (several, same) if direction is Direction.LOAD else (same, several)
    bench.copy(direction, device, host)
    bench.expect(before, direction, list(zip(device, host, strict=True)))


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize(
    ("device", "host"),
    [([0, 4], [0, 1]), ([0, 1], [0, 6]), ([10**9], [0]), ([0, -1], [0, 1]), ([0, 1], [0, -6])],
)
def test_a_block_outside_the_regions(
    direction: Direction, device: list[int], host: list[int]
) -> None:
    """The copy fails before any byte moves."""
    bench = Bench([Form(16), Form(8)], 4, 6)
    before = bench.snapshot()
    with pytest.raises(IndexError):
        bench.copy(direction, device, host)
    bench.expect(before, direction, [])


@pytest.mark.parametrize("num_bytes", [0, 1, 5 * 24])
def test_host_memory_is_as_large_as_asked(num_bytes: int) -> None:
    memory = HostBackend().allocate_host(num_bytes)
    assert (memory.shape, memory.dtype) == ((num_bytes,), torch.int8)
    assert memory.untyped_storage().nbytes() == num_bytes


def test_all_host_memory_is_one_chunk() -> None:
    """Host memory is not pinned here, so opening it in chunks would gain nothing."""
    assert HostBackend.chunk_bytes > 2**60
    bench = Bench([Form(16)], 2, 2)
    with pytest.raises(AssertionError, match="there is one chunk"):
        bench.backend.add_host_chunk([torch.zeros((2, 16), dtype=torch.int8)])


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
@pytest.mark.parametrize("gap", [0, 64])
@pytest.mark.parametrize("direction", Direction)
def test_python_runs_while_bytes_move(direction: Direction, gap: int) -> None:
    """One attempt is enough in nearly all runs: the copy takes milliseconds. On a busy machine the
    kernel may schedule the other thread too late, so there are several attempts."""
    num_blocks = 256
    bench = Bench([Form(2**16, gap=gap)], num_blocks, num_blocks)
    blocks = list(range(num_blocks))
    transfer = Transfer.pairing(1, blocks, blocks[::-1])
    copy = bench.backend.copy
    assert another_thread_runs_during(lambda: copy(direction, transfer, None), attempts=100)


@pytest.mark.usefixtures("no_forced_switches")
def test_a_copy_that_keeps_the_lock_is_detected() -> None:
    source, target = bytes(2**24), bytearray(2**24)

    def copy() -> None:
        target[:] = source

    assert not another_thread_runs_during(copy, attempts=10)
