"""NpuBackend on the real torch_npu: copies and compute in the right order on the device."""

from typing import Any

import numpy as np
import pytest
import torch_npu

from simple_offload.backends.base import Direction
from tests.acl_sim.on_npu.conftest import MakeSides
from tests.acl_sim.on_npu.sides import Sides
from tests.conftest import within_patience

BLOCKS = np.arange(16)


# Both barriers


@pytest.mark.parametrize("path", ["batch", "single"])
def test_a_store_waits_for_the_compute_that_fills_its_blocks(
    make_sides: MakeSides, path: str
) -> None:
    sides = make_sides(copy_path=path)
    with sides.sim.held(sides.compute_stream()):
        sides.fill(5)
        pending = sides.copy(Direction.STORE, BLOCKS, BLOCKS, sides.backend.barrier())
        sides.sim.settle(sides.stream(Direction.STORE))
        assert not pending.done()
    pending.wait()
    assert (sides.host_pages()[0] == 5).all()


@pytest.mark.parametrize("path", ["batch", "single"])
def test_a_load_waits_for_the_compute_that_reads_its_blocks(
    make_sides: MakeSides, path: str
) -> None:
    sides = make_sides(copy_path=path)
    before = sides.device_pages()[0]
    reader = sides.backend.allocate_host(before.nbytes)
    with sides.sim.held(sides.compute_stream()):
        device = sides.device[0]
        sides.sim.call(
            "aclrtMemcpyAsync",
            *(reader.data_ptr(), reader.nbytes, device.data_ptr(), reader.nbytes, 2),
            sides.compute_stream(),
        )
        pending = sides.copy(Direction.LOAD, BLOCKS, BLOCKS, sides.backend.barrier())
        sides.sim.settle(sides.stream(Direction.LOAD))
        assert not pending.done()
    pending.wait()
    np.testing.assert_array_equal(reader.numpy(), before.ravel())
    np.testing.assert_array_equal(sides.device_pages()[0], sides.host_pages()[0])


@pytest.mark.proves("I3")
def test_without_its_barrier_a_store_reads_too_soon(make_sides: MakeSides) -> None:
    """So the two tests above detect a missing barrier."""
    sides = make_sides()
    before = sides.device_pages()[0]
    with sides.sim.held(sides.compute_stream()):
        sides.fill(5)
        pending = sides.copy(Direction.STORE, BLOCKS, BLOCKS, None)
        sides.sim.settle(sides.stream(Direction.STORE))
    pending.wait()
    np.testing.assert_array_equal(sides.host_pages()[0], before)


def test_directions_do_not_wait_for_each_other(make_sides: MakeSides) -> None:
    sides = make_sides()
    with sides.sim.held(sides.stream(Direction.STORE)):
        store = sides.copy(Direction.STORE, [1], [2])
        load = sides.copy(Direction.LOAD, [3], [4])
        stream = sides.stream(Direction.LOAD)
        within_patience(lambda: sides.sim.settle(stream))
        assert load.done()
        assert not store.done()
    store.wait()


def test_compute_can_be_held_until_a_load_has_ended(make_sides: MakeSides) -> None:
    sides = make_sides()
    expected = sides.expected(Direction.LOAD, BLOCKS, BLOCKS)
    reader = sides.backend.allocate_host(expected[0][0].nbytes)
    with sides.sim.held(sides.stream(Direction.LOAD)):
        pending = sides.copy(Direction.LOAD, BLOCKS, BLOCKS)
        pending.hold_compute()
        assert not pending.done()  # the caller does not wait
        sides.sim.call(
            "aclrtMemcpyAsync",
            *(reader.data_ptr(), reader.nbytes, sides.device[0].data_ptr(), reader.nbytes, 2),
            sides.compute_stream(),
        )
        assert sides.sim.num_tasks(sides.compute_stream()) == 2
    torch_npu.npu.synchronize()
    np.testing.assert_array_equal(reader.numpy(), expected[0][0].ravel())


# torch_npu's queue: the wait stays in it until code reads the stream's handle


class Stream:
    """A stream whose queued waits reach the device only when its handle is read after them.
    torch_npu may behave like this."""

    def __init__(self, sides: Sides, direction: Direction) -> None:
        self._sides = sides
        self._real = sides.backend._streams[direction]
        self._waits = False

    @property
    def npu_stream(self) -> int:
        if self._waits:
            self._sides.sim.hold_waits(False)
        return int(self._real.npu_stream)

    def wait_event(self, event: Any) -> None:
        self._sides.sim.hold_waits(True)
        self._real.wait_event(event)
        self._waits = True

    def record_event(self) -> Any:
        return self._real.record_event()


class CachedStream(Stream):
    """The fault: the handle is read once, before any wait."""

    def __init__(self, sides: Sides, direction: Direction) -> None:
        super().__init__(sides, direction)
        self._handle = super().npu_stream

    @property
    def npu_stream(self) -> int:
        return self._handle


def stored_behind_compute(sides: Sides, stream: Stream) -> bool:
    """Whether a store through ``stream`` comes after the compute that its barrier stands for."""
    handle = sides.stream(Direction.STORE)
    sides.backend._streams[Direction.STORE] = stream
    with sides.sim.held(sides.compute_stream()):
        sides.fill(5)
        barrier = sides.backend.barrier()
        try:
            pending = sides.copy(Direction.STORE, BLOCKS, BLOCKS, barrier)
        finally:
            sides.sim.hold_waits(False)
        sides.compute_stream()  # to read a handle empties torch_npu's queue
        sides.sim.settle(handle)
    pending.wait()
    return bool((sides.host_pages()[0] == 5).all())


@pytest.mark.parametrize("path", ["batch", "single"])
def test_a_copy_does_not_pass_a_wait_that_is_queued_on_the_host(
    make_sides: MakeSides, path: str
) -> None:
    sides = make_sides(copy_path=path)
    assert stored_behind_compute(sides, Stream(sides, Direction.STORE))


@pytest.mark.parametrize("path", ["batch", "single"])
def test_with_a_cached_handle_it_does(make_sides: MakeSides, path: str) -> None:
    """So the test above detects the fault."""
    sides = make_sides(copy_path=path)
    assert not stored_behind_compute(sides, CachedStream(sides, Direction.STORE))


def test_barriers_and_waits_share_the_queue(make_sides: MakeSides) -> None:
    """This thread records, it and the copy threads wait, and copies bypass the queue. Every round
    stores the bytes that were written just before it, not those written next."""
    sides = make_sides()
    sides.sim.library.acl_sim_delay_all(50)
    for value in range(1, 100):
        sides.fill(value)
        store = sides.copy(Direction.STORE, BLOCKS, BLOCKS, sides.backend.barrier())
        store.hold_compute()
        sides.fill(-value)
        store.wait()
        assert (sides.host_pages()[0] == value).all()
