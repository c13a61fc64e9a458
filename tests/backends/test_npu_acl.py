"""Acl's calls of the runtime: on the simulated one, without torch_npu."""

import ctypes
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from simple_offload.backends.base import Direction
from simple_offload.backends.descriptors import Descriptors
from simple_offload.backends.npu.acl import (
    DEVICE,
    HOST,
    UNREGISTERED,
    Acl,
    AclError,
    Location,
    Locations,
)
from tests.acl_sim import build
from tests.acl_sim.sim import Sim

SIZE = 64


class Bench:
    """A stream of device 1, host memory from Acl, and device memory, SIZE bytes each."""

    locations = Locations(Location(0, HOST), Location(1, DEVICE))

    def __init__(self) -> None:
        self.sim = Sim(build.library())
        self.sim.reset()
        self.sim.call("aclrtSetDevice", 1)
        self.acl = Acl(self.sim.library)
        self.stream = self.sim.create("aclrtCreateStream")
        self.host = self.acl.malloc_host(SIZE)
        self.device = self.sim.create("aclrtMalloc", SIZE, 0)
        ctypes.memset(self.host, 1, SIZE)
        ctypes.memset(self.device, 2, SIZE)

    def plan(self, direction: Direction, *sizes: int) -> Descriptors:
        """Adjacent descriptors, from the start of both sides."""
        offsets = np.cumsum([0, *sizes[:-1]])
        sides = [self.device + offsets, self.host + offsets]
        if direction is Direction.STORE:
            sides.reverse()
        return Descriptors(*(np.array(part, np.uint64) for part in (*sides, sizes)))

    def copy(self, plan: Descriptors, direction: Direction, *, batch: bool) -> None:
        if batch:
            self.acl.copy_batch(plan, direction, self.locations, self.stream)
        else:
            self.acl.copy_each(plan, direction, self.stream)

    def contents(self) -> tuple[bytes, bytes]:
        """Bytes of the device and of the host, after the end of the stream."""
        self.sim.call("aclrtSynchronizeStream", self.stream)
        return ctypes.string_at(self.device, SIZE), ctypes.string_at(self.host, SIZE)


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.sim.reset()
    bench.sim.call("aclrtDestroyStream", bench.stream)
    bench.sim.call("aclrtFree", bench.device)
    bench.acl.free_host(bench.host)
    bench.sim.call("aclrtSetDevice", 0)


@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize("batch", [True, False])
def test_copies(bench: Bench, direction: Direction, batch: bool) -> None:
    plan = bench.plan(direction, 8, 16, 1)
    bench.copy(plan, direction, batch=batch)
    device, host = bytes([2]) * SIZE, bytes([1]) * SIZE
    if direction is Direction.LOAD:
        device = host[:25] + device[25:]
    else:
        host = device[:25] + host[25:]
    assert bench.contents() == (device, host)
    counts = bench.sim.take_counts()
    assert (counts.batch_calls, counts.single_calls) == ((1, 0) if batch else (0, 3))


@pytest.mark.parametrize("batch", [True, False])
def test_a_refusal_has_its_index_and_its_text(bench: Bench, batch: bool) -> None:
    bench.sim.fail_after(2, 207001)
    plan = bench.plan(Direction.LOAD, 8, 8, 8, 8)
    with pytest.raises(AclError) as caught:
        bench.copy(plan, Direction.LOAD, batch=batch)
    assert (caught.value.code, caught.value.index) == (207001, 2)
    assert str(caught.value).endswith(": error 207001 at descriptor 2: requested failure")
    assert bench.contents()[0] == (bytes([1]) * 16).ljust(SIZE, b"\2")


def test_a_refusal_of_the_whole_call_has_no_index(bench: Bench) -> None:
    bench.sim.take_batches(False)
    plan = bench.plan(Direction.LOAD, 8)
    with pytest.raises(AclError) as caught:
        bench.acl.copy_batch(plan, Direction.LOAD, bench.locations, bench.stream)
    assert (caught.value.code, caught.value.index) == (207000, None)
    assert str(caught.value) == (
        "aclrtMemcpyBatchAsync: error 207000: this chip has no batched copies"
    )


def test_a_batch_that_declares_another_device(bench: Bench) -> None:
    locations = bench.locations._replace(device=Location(0, DEVICE))
    plan = bench.plan(Direction.LOAD, 8)
    with pytest.raises(AclError, match="107000 at descriptor 0: destination is of type 1"):
        bench.acl.copy_batch(plan, Direction.LOAD, locations, bench.stream)


def test_a_thread_without_context(bench: Bench) -> None:
    messages: list[str] = []

    def run() -> None:
        try:
            bench.acl.malloc_host(SIZE)
        except AclError as error:
            messages.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    (message,) = messages
    assert message == "aclrtMallocHost: error 107002: aclrtMallocHost: this thread has no context"


def test_location_of_memory(bench: Bench) -> None:
    plain = np.zeros(SIZE, np.int8)
    found = [bench.acl.location(a) for a in (bench.host, bench.device, plain.ctypes.data)]
    assert [location and (location.id, location.type) for location in found] == [
        (0, HOST),
        (1, DEVICE),
        (0, UNREGISTERED),
    ]


def test_memory_that_was_not_allocated(bench: Bench) -> None:
    with pytest.raises(AclError, match="aclrtFreeHost: error 107000"):
        bench.acl.free_host(bench.device)


@pytest.mark.parametrize(
    ("number", "text"), [(80501000, "8.5.1"), (90200000, "9.2.0"), (90110000, "9.1.10")]
)
def test_the_version(bench: Bench, number: int, text: str) -> None:
    bench.sim.library.acl_sim_set_version(number)
    assert bench.acl.version() == text


def test_a_runtime_before_batches(bench: Bench) -> None:
    assert bench.acl.has_batch
    old = Acl(ctypes.CDLL(str(build.library(has_batch=False))))
    assert not old.has_batch
    assert old.version() == "of unknown version"
    assert old.location(bench.device) is None
