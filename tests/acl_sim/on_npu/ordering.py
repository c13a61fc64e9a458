"""NpuBackend on the real torch_npu: copies and compute in the right order on the device."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch_npu

from simple_offload.backends.base import Direction
from tests.acl_sim.on_npu.sides import MakeSides, NpuSides
from tests.acl_sim.sim import Sim
from tests.conftest import within_patience

BLOCKS = np.arange(16)
LOAD, STORE = Direction.LOAD, Direction.STORE
both_paths = pytest.mark.parametrize("path", ["batch", "single"])


def queue_read(sides: NpuSides) -> torch.Tensor:
    """Queue compute that reads the device's region. Returns what it has read, once it has run."""
    device = sides.device[0]
    reader = sides.backend.allocate_host(device.numel())
    sides.sim.call(
        "aclrtMemcpyAsync",
        *(reader.data_ptr(), reader.nbytes, device.data_ptr(), reader.nbytes, 2),
        sides.compute_stream(),
    )
    return reader.view(device.shape)


# Both barriers


@pytest.mark.proves("I3")
@both_paths
@pytest.mark.parametrize("barrier", [True, False])
def test_without_its_barrier_a_store_reads_too_soon(
    make_sides: MakeSides, path: str, barrier: bool
) -> None:
    """With it, the store reads what the compute before it has written."""
    sides = make_sides(copy_path=path)
    (before,) = sides.contents()[0]
    with sides.sim.held(sides.compute_stream()):
        sides.fill(5)
        pending = sides.copy(STORE, BLOCKS, BLOCKS, sides.backend.barrier() if barrier else None)
        sides.sim.settle(sides.stream(STORE))
        assert pending.done() is not barrier
    pending.wait()
    assert torch.equal(sides.host[0], torch.full_like(before, 5) if barrier else before)


@both_paths
def test_a_load_waits_for_the_compute_that_reads_its_blocks(
    make_sides: MakeSides, path: str
) -> None:
    sides = make_sides(copy_path=path)
    (before,) = sides.contents()[0]
    with sides.sim.held(sides.compute_stream()):
        read = queue_read(sides)
        pending = sides.copy(LOAD, BLOCKS, BLOCKS, sides.backend.barrier())
        sides.sim.settle(sides.stream(LOAD))
        assert not pending.done()
    pending.wait()
    assert torch.equal(read, before)
    device, host = sides.contents()
    assert torch.equal(device[0], host[0])


def test_directions_do_not_wait_for_each_other(make_sides: MakeSides) -> None:
    sides = make_sides()
    with sides.sim.held(sides.stream(STORE)):
        store = sides.copy(STORE, [1], [2])
        load = sides.copy(LOAD, [3], [4])
        stream = sides.stream(LOAD)
        within_patience(lambda: sides.sim.settle(stream))
        assert load.done()
        assert not store.done()
    store.wait()


def test_compute_can_be_held_until_a_load_has_ended(make_sides: MakeSides) -> None:
    sides = make_sides()
    with sides.sim.held(sides.stream(LOAD)):
        pending = sides.copy(LOAD, BLOCKS, BLOCKS)
        pending.hold_compute()
        assert not pending.done()  # the caller does not wait
        read = queue_read(sides)
        assert sides.sim.num_tasks(sides.compute_stream()) == 2
    torch_npu.npu.synchronize()
    assert torch.equal(read, sides.host[0])


# torch_npu's queue: the wait stays in it until code reads the stream's handle


class Stream:
    """A stream whose queued waits reach the device only when its handle is read after them.
    torch_npu may behave like this. With ``cached``, the fault: the handle is read once, before any
    wait."""

    def __init__(self, sim: Sim, real: Any, *, cached: bool) -> None:
        self._sim, self._real = sim, real
        self._waits = False
        self._cached = int(self._real.npu_stream) if cached else None

    @property
    def npu_stream(self) -> int:
        if self._cached is not None:
            return self._cached
        if self._waits:
            self._sim.hold_waits(False)
        return int(self._real.npu_stream)

    def wait_event(self, event: Any) -> None:
        self._sim.hold_waits(True)
        self._real.wait_event(event)
        self._waits = True

    def record_event(self) -> Any:
        return self._real.record_event()

    def synchronize(self) -> None:
        self._real.synchronize()


@both_paths
@pytest.mark.parametrize("cached", [False, True])
def test_a_copy_does_not_pass_a_wait_that_is_queued_on_the_host(
    sim: Sim, make_sides: MakeSides, path: str, cached: bool
) -> None:
    """With a cached handle it does."""
    sides = make_sides(copy_path=path, wrap=partial(Stream, sim, cached=cached))
    handle = sides.stream(STORE)
    with sides.sim.held(sides.compute_stream()):
        sides.fill(5)
        barrier = sides.backend.barrier()
        try:
            pending = sides.copy(STORE, BLOCKS, BLOCKS, barrier)
        finally:
            sides.sim.hold_waits(False)
        sides.compute_stream()  # to read a handle empties torch_npu's queue
        sides.sim.settle(handle)
    pending.wait()
    assert bool((sides.host[0] == 5).all()) is not cached


def test_barriers_and_waits_share_the_queue(make_sides: MakeSides) -> None:
    """This thread records, it and the copy threads wait, and copies bypass the queue. Every round
    stores the bytes that were written just before it, not those written next."""
    sides = make_sides()
    sides.sim.library.acl_sim_delay_all(50)
    for value in range(1, 100):
        sides.fill(value)
        store = sides.copy(STORE, BLOCKS, BLOCKS, sides.backend.barrier())
        store.hold_compute()
        sides.fill(-value)
        store.wait()
        assert (sides.host[0] == value).all()
