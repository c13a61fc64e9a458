"""The simulated ACL runtime behaves as other tests assume, and refuses calls that the real one
refuses."""

import ctypes
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.acl_sim import build
from tests.acl_sim.sim import Sim

SIZE = 64
NOT_READY, COMPLETE = 0, 1
H2D, D2H = 1, 2


class Bench:
    """Two streams, a host and a device buffer of SIZE bytes each."""

    def __init__(self, sim: Sim) -> None:
        self.sim = sim
        self.streams = [sim.create("aclrtCreateStream") for _ in range(2)]
        self.host = sim.create("aclrtMallocHost", SIZE)
        self.device = sim.create("aclrtMalloc", SIZE, 0)
        ctypes.memset(self.host, 7, SIZE)
        ctypes.memset(self.device, 0, SIZE)

    def store(self, stream: int) -> None:
        self.sim.call("aclrtMemcpyAsync", self.host, SIZE, self.device, SIZE, D2H, stream)

    def batch(self, stream: int, **changes: Any) -> tuple[int, int]:
        """Copy the host buffer's halves to the device's. Returns the code and the fail index."""
        half = SIZE // 2
        rows = {
            "destinations": [self.device, self.device + half],
            "sources": [self.host, self.host + half],
            "sizes": [half, half],
            "rooms": [half, half],
        }
        # device 0, type 1; host 0, type 0; reserved
        attributes = np.array([0, 1, 0, 0, 0, 0, 0, 0], np.uint32)
        attributes[:] = changes.pop("attributes", attributes)
        first = np.array([changes.pop("first", 0)], np.uint64)
        failed = np.array([99], np.uint64)
        number = changes.pop("number", 2)
        arrays = {name: np.array(changes.get(name, row), np.uint64) for name, row in rows.items()}
        code = self.sim.code(
            "aclrtMemcpyBatchAsync",
            *(arrays[name].ctypes.data for name in ("destinations", "rooms", "sources", "sizes")),
            number,
            attributes.ctypes.data,
            first.ctypes.data,
            1,
            changes.get("failed", failed.ctypes.data),
            stream,
        )
        return code, int(failed[0])

    def device_bytes(self) -> bytes:
        return ctypes.string_at(self.device, SIZE)

    def host_bytes(self) -> bytes:
        return ctypes.string_at(self.host, SIZE)

    def close(self) -> None:
        for stream in self.streams:
            self.sim.library.acl_sim_release(stream)
            self.sim.library.acl_sim_fail_stream(stream, 0)
            self.sim.call("aclrtDestroyStream", stream)
        self.sim.call("aclrtFreeHost", self.host)
        self.sim.call("aclrtFree", self.device)


@pytest.fixture
def bench(sim: Sim) -> Iterator[Bench]:
    bench = Bench(sim)
    yield bench
    bench.close()


# Streams and events


def test_bytes_move_when_the_stream_gets_there(bench: Bench) -> None:
    stream = bench.streams[0]
    with bench.sim.held(stream):
        assert bench.batch(stream) == (0, 2**64 - 1)
        assert bench.sim.num_tasks(stream) == 1
        assert bench.device_bytes() == bytes(SIZE)
    bench.sim.call("aclrtSynchronizeStream", stream)
    assert bench.device_bytes() == bytes([7]) * SIZE


def test_a_stream_is_a_queue(bench: Bench) -> None:
    stream = bench.streams[0]
    with bench.sim.held(stream):
        bench.sim.fill(bench.device, 1, SIZE, stream)
        bench.store(stream)
        bench.sim.fill(bench.device, 2, SIZE, stream)
    bench.sim.call("aclrtSynchronizeStream", stream)
    assert bench.host_bytes() == bytes([1]) * SIZE
    assert bench.device_bytes() == bytes([2]) * SIZE


def test_streams_wait_for_each_other_by_events_only(bench: Bench) -> None:
    compute, copies = bench.streams
    event = bench.sim.create("aclrtCreateEventExWithFlag", 0)
    with bench.sim.held(compute):
        bench.sim.fill(bench.device, 5, SIZE, compute)
        bench.store(copies)
        bench.sim.call("aclrtSynchronizeStream", copies)
        assert bench.host_bytes() == bytes(SIZE)  # ran past compute
        bench.sim.call("aclrtRecordEvent", event, compute)
        bench.sim.call("aclrtStreamWaitEvent", copies, event)
        bench.store(copies)
        status = ctypes.c_int(9)
        bench.sim.call("aclrtQueryEventStatus", event, ctypes.byref(status))
        assert status.value == NOT_READY
        bench.sim.settle(copies)
        assert bench.sim.num_tasks(copies) == 2
    bench.sim.call("aclrtSynchronizeStream", copies)
    assert bench.host_bytes() == bytes([5]) * SIZE
    bench.sim.call("aclrtQueryEventStatus", event, ctypes.byref(status))
    assert status.value == COMPLETE
    bench.sim.call("aclrtDestroyEvent", event)


def test_a_wait_before_the_record_waits_for_nothing(bench: Bench) -> None:
    compute, copies = bench.streams
    event = bench.sim.create("aclrtCreateEventExWithFlag", 0)
    with bench.sim.held(compute):
        bench.sim.call("aclrtStreamWaitEvent", copies, event)
        bench.sim.call("aclrtRecordEvent", event, compute)
        bench.sim.call("aclrtSynchronizeStream", copies)
    bench.sim.call("aclrtSynchronizeEvent", event)
    bench.sim.call("aclrtDestroyEvent", event)


def test_a_task_that_fails_is_known_from_the_stream_and_its_events(bench: Bench) -> None:
    stream = bench.streams[0]
    event = bench.sim.create("aclrtCreateEventExWithFlag", 0)
    bench.sim.library.acl_sim_fail_stream(stream, 507011)
    bench.batch(stream)
    bench.sim.call("aclrtRecordEvent", event, stream)
    assert bench.sim.code("aclrtSynchronizeEvent", event) == 507011
    assert bench.sim.code("aclrtSynchronizeStream", stream) == 507011
    assert bench.device_bytes() == bytes(SIZE)
    bench.sim.call("aclrtDestroyEvent", event)


# Contexts and memory


def test_a_thread_has_no_context_until_it_sets_a_device(bench: Bench) -> None:
    codes: list[int] = []

    def use() -> None:
        address = ctypes.byref(ctypes.c_void_p())
        codes.append(bench.batch(bench.streams[0])[0])
        codes.append(bench.sim.code("aclrtMallocHost", address, 1))
        codes.append(bench.sim.code("aclrtSetDevice", 1))
        codes.append(bench.batch(bench.streams[0])[0])

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert codes == [107002, 107002, 0, 107003]  # no context; a stream of another device


def test_addresses_that_are_no_handles(bench: Bench) -> None:
    assert bench.batch(bench.host)[0] == 107017
    assert bench.sim.code("aclrtRecordEvent", bench.host, bench.streams[0]) == 107017


def test_memory_that_is_not_pinned_blocks(bench: Bench) -> None:
    stream = bench.streams[0]
    plain = np.full(SIZE, 3, np.int8)
    bench.sim.take_counts()
    half = SIZE // 2
    assert bench.batch(stream, sources=[plain.ctypes.data, plain.ctypes.data + half])[0] == 0
    assert bench.device_bytes() == bytes([3]) * SIZE  # by now
    assert bench.sim.take_counts().blocking == 2


def test_registered_memory_is_pinned(bench: Bench) -> None:
    memory = np.zeros(3 * 4096, np.int8)
    start = -memory.ctypes.data % 4096
    address = memory.ctypes.data + start
    bench.sim.call("aclrtHostRegisterV2", address, 4096, 0x10000000)
    assert bench.sim.code("aclrtHostRegisterV2", address, 4096, 0x10000000) == 107000
    assert bench.sim.code("aclrtHostRegisterV2", address + 8, 4096, 0x2) == 107000
    bench.sim.take_counts()
    bench.batch(bench.streams[0], sources=[address, address])
    assert bench.sim.take_counts().blocking == 0
    bench.sim.call("aclrtSynchronizeStream", bench.streams[0])
    bench.sim.call("aclrtHostUnregister", address)


def test_host_memory_has_a_limit(bench: Bench) -> None:
    address = ctypes.byref(ctypes.c_void_p())
    assert bench.sim.code("aclrtMallocHost", address, 200_000_000_001) == 207001


# What a batch refuses


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"number": 0}, 100000),
        ({"failed": None}, 100000),
        ({"rooms": [31, 32]}, 100000),
        ({"attributes": [0, 1, 0, 0, 1, 0, 0, 0]}, 100000),  # reserved
        ({"first": 1}, 107000),
    ],
)
def test_a_call_that_is_wrong_as_a_whole(bench: Bench, change: dict[str, Any], code: int) -> None:
    assert bench.batch(bench.streams[0], **change)[0] == code
    assert bench.sim.take_counts().descriptors == 0


@pytest.mark.parametrize(
    ("change", "index"),
    [
        ({"sizes": [32, 0]}, 1),
        ({"attributes": [0, 0, 0, 0, 0, 0, 0, 0]}, 0),  # type of the destination
        ({"attributes": [1, 1, 0, 0, 0, 0, 0, 0]}, 0),  # its device
        ({"attributes": [0, 1, 0, 1, 0, 0, 0, 0]}, 0),  # type of the source
    ],
)
def test_an_entry_that_is_wrong(bench: Bench, change: dict[str, Any], index: int) -> None:
    """Entries before the wrong one are submitted."""
    assert bench.batch(bench.streams[0], **change) == (107000, index)
    bench.sim.call("aclrtSynchronizeStream", bench.streams[0])
    assert bench.device_bytes() == (bytes([7]) * (SIZE // 2) * index).ljust(SIZE, b"\0")


def test_a_chip_without_batches(bench: Bench) -> None:
    bench.sim.take_batches(False)
    assert bench.batch(bench.streams[0])[0] == 207000


def test_a_cann_without_batches() -> None:
    old = Sim(build.library(has_batch=False))
    assert not hasattr(old.library, "aclrtMemcpyBatchAsync")
    assert hasattr(old.library, "aclrtMemcpyAsync")


def test_a_requested_failure(bench: Bench) -> None:
    bench.sim.fail_after(1, 107000)
    assert bench.batch(bench.streams[0]) == (107000, 1)
    assert bench.batch(bench.streams[0]) == (0, 2**64 - 1)
