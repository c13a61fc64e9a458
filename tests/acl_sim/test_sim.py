"""The simulated ACL runtime behaves as other tests assume, and refuses calls that the real one
refuses."""

import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.acl_sim.sim import Sim

SIZE = 64


class Bench:
    """Two streams, a host and a device buffer of SIZE bytes each."""

    def __init__(self, sim: Sim) -> None:
        self.sim = sim
        self.streams = [sim.create("aclrtCreateStream") for _ in range(2)]
        self.host = sim.create("aclrtMallocHost", SIZE)
        self.device = sim.create("aclrtMalloc", SIZE, 0)
        ctypes.memset(self.host, 7, SIZE)
        ctypes.memset(self.device, 0, SIZE)

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


# on_npu/ordering.py shows that streams are queues, and wait for each other by events only.


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


def test_handles_of_another_device_or_kind_are_refused(bench: Bench) -> None:
    assert bench.batch(bench.host)[0] == 107017
    assert bench.sim.code("aclrtRecordEvent", bench.host, bench.streams[0]) == 107017
    bench.sim.call("aclrtSetDevice", 1)
    assert bench.batch(bench.streams[0])[0] == 107003
    bench.sim.call("aclrtSetDevice", 0)


def test_memory_that_is_not_pinned_blocks(bench: Bench) -> None:
    stream = bench.streams[0]
    plain = np.full(SIZE, 3, np.int8)
    bench.sim.take_counts()
    half = SIZE // 2
    assert bench.batch(stream, sources=[plain.ctypes.data, plain.ctypes.data + half])[0] == 0
    assert bench.device_bytes() == bytes([3]) * SIZE  # by now
    assert bench.sim.take_counts().blocking == 2


@pytest.mark.parametrize(
    ("change", "answer"),
    [
        ({"number": 0}, (100000, None)),
        ({"failed": None}, (100000, None)),
        ({"rooms": [31, 32]}, (100000, None)),
        ({"attributes": [0, 1, 0, 0, 1, 0, 0, 0]}, (100000, None)),  # reserved
        ({"first": 1}, (107000, None)),
        ({"sizes": [32, 0]}, (107000, 1)),
        ({"attributes": [0, 0, 0, 0, 0, 0, 0, 0]}, (107000, 0)),  # type of the destination
        ({"attributes": [1, 1, 0, 0, 0, 0, 0, 0]}, (107000, 0)),  # its device
        ({"attributes": [0, 1, 0, 1, 0, 0, 0, 0]}, (107000, 0)),  # type of the source
    ],
)
def test_a_batch_that_is_wrong_as_a_whole_or_at_an_entry(
    bench: Bench, change: dict[str, Any], answer: tuple[int, int | None]
) -> None:
    """Entries before the wrong one are submitted."""
    code, index = bench.batch(bench.streams[0], **change)
    assert code == answer[0]
    num_submitted = answer[1] or 0
    assert index == num_submitted if answer[1] is not None else index > 1
    assert bench.sim.take_counts().descriptors == num_submitted
    bench.sim.call("aclrtSynchronizeStream", bench.streams[0])
    assert bench.device_bytes() == (bytes([7]) * (SIZE // 2) * num_submitted).ljust(SIZE, b"\0")
