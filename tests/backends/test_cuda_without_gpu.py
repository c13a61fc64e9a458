"""CudaBackend's decisions about a copy, their streams and pieces, and how it pins memory: no GPU
needed."""

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from simple_offload.backends.base import Direction
from simple_offload.backends.cuda import backend as backend_module
from simple_offload.backends.cuda import copy_costs
from simple_offload.backends.cuda import queues as queues_module
from simple_offload.backends.cuda.backend import CudaBackend
from simple_offload.backends.cuda.copy_costs import CopyCosts, PathCost
from simple_offload.backends.cuda.queues import classify_regions
from simple_offload.backends.descriptors import Descriptors, Regions, find_extents
from simple_offload.memory import GIB
from simple_offload.transfer import Transfer
from tests.conftest import Machine

LOAD, STORE = Direction.LOAD, Direction.STORE
MIB = 1 << 20


class Stream:
    """Of a GPU that is not there; or an event."""

    def __init__(self, gpu: "Gpu") -> None:
        self._gpu = gpu
        self.copies: set[int] = set()
        """Numbers of the copies that come before whatever is queued next."""

    def wait_stream(self, other: "Stream") -> None:
        self._gpu.note(self, f"after {self._gpu.number(other)}")
        self.copies |= other.copies

    def record(self, stream: "Stream") -> None:
        self._gpu.note(stream, "mark")

    def synchronize(self) -> None:
        self._gpu.under_way -= self.copies


class Gpu:
    """What torch and the driver say of a GPU, without one."""

    def __init__(self) -> None:
        self.log: list[tuple[int, str, int]] = []
        """The stream, numbered by first use, then "copy", "copy with lock", "mark" or "after"
        another stream, and bytes."""
        self.num_copies = 0
        self.under_way: set[int] = set()
        """Numbers of copies that nothing has waited for."""
        self.refused: int | None = None
        """Length of ``log`` at which a call is refused."""
        self.freed_under_way: set[int] = set()
        """As ``under_way``, when host memory was freed."""
        self._streams: list[Any] = []
        cudart = SimpleNamespace(
            cudaHostRegister=lambda *_: 0,
            cudaHostUnregister=lambda _: self.freed_under_way.update(self.under_way),
        )
        cuda = SimpleNamespace(
            Stream=lambda *_, **__: Stream(self),
            Event=lambda **_: Stream(self),
            current_device=lambda: 0,
            set_device=lambda device: None,
            cudart=lambda: cudart,
        )
        self.torch = SimpleNamespace(
            cuda=cuda, device=lambda *_: torch.device("meta"), empty=torch.empty, int8=torch.int8
        )
        self.driver = SimpleNamespace(
            CUstreamCaptureMode=SimpleNamespace(CU_STREAM_CAPTURE_MODE_RELAXED=2),
            cuThreadExchangeStreamCaptureMode=lambda mode: (0, 0),
            cuDeviceGet=lambda index: (0, index),
            cuDeviceGetPCIBusId=lambda length, device: (0, b"0000:3b:00.0\0"),
        )

    def number(self, stream: Any) -> int:
        if stream not in self._streams:
            self._streams.append(stream)
        return self._streams.index(stream)

    def note(self, stream: Any, kind: str, num_bytes: int = 0) -> None:
        if len(self.log) == self.refused:
            raise RuntimeError(f"refused: {kind}")
        self.log.append((self.number(stream), kind, num_bytes))

    def submit(self, plan: Descriptors, _: Direction, stream: Any, keep_lock: bool) -> None:
        self.note(stream, "copy with lock" if keep_lock else "copy", int(plan.sizes.sum()))
        self.num_copies += 1
        self.under_way.add(self.num_copies)
        stream.copies.add(self.num_copies)

    def take(self, *kinds: str) -> list[tuple[int, str, int]]:
        """Entries of these kinds, without those of earlier calls."""
        taken = [entry for entry in self.log if entry[1].split()[0] in kinds]
        self.log.clear()
        return taken


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    gpu = Gpu()
    bindings = SimpleNamespace(driver=gpu.driver)
    for name in ("cuda", "cuda.bindings"):
        monkeypatch.setitem(sys.modules, name, bindings)
    for module in (backend_module, queues_module):
        monkeypatch.setattr(module, "torch", gpu.torch)
    monkeypatch.setattr(queues_module, "resolve_dma", lambda: gpu.submit)
    return gpu


MakeBackend = Callable[..., CudaBackend]


@pytest.fixture
def make_backend(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> MakeBackend:
    """A function that makes a backend. Its measurement sends descriptors of less than 64 KiB by
    kernel, if there is one."""

    def make(page: int, num_regions: int = 1, *, kernel: bool = False) -> CudaBackend:
        crossing = 64 << 10 if kernel else 0
        costs = CopyCosts(crossing, PathCost(2e-6, 3e-11), PathCost(1e-7, 3e-11), 1e-5)
        monkeypatch.setattr(copy_costs, "measure_direction", lambda *_: costs)
        backend = CudaBackend("auto" if kernel else "dma")
        regions = [torch.empty(1 << 16, page, dtype=torch.int8, device="meta")] * num_regions
        backend.open(regions)
        backend.add_host_chunk(regions)
        gpu.log.clear()
        return backend

    return make


def scattered(count: int) -> Transfer:
    return Transfer(0, np.arange(count), np.arange(count)[::-1] * 3 % max(count, 1))


def test_a_machine_with_little_memory_left(machine: Machine, make_backend: MakeBackend) -> None:
    """Its copies are measured too: a tier's first chunk may use the reserve, and comes later."""
    machine.available = GIB
    make_backend(2 * MIB)


# Which copies are quick


@pytest.mark.parametrize(
    ("page", "num_regions", "kernel", "few", "many"),
    [
        (2 * MIB, 1, False, 512, 4096),  # 1 GiB, and 8
        (64 << 10, 64, True, 8, 512),
        (16 << 10, 64, True, 512, 16_384),  # the kernel takes thousands at once
    ],
)
def test_loads_of_few_descriptors_are_quick(
    make_backend: MakeBackend, page: int, num_regions: int, kernel: bool, few: int, many: int
) -> None:
    """No request waits for a store."""
    backend = make_backend(page, num_regions, kernel=kernel)
    assert backend.is_quick(LOAD, scattered(few))
    assert not backend.is_quick(LOAD, scattered(many))
    assert not backend.is_quick(STORE, scattered(1))


def test_only_a_quick_copy_keeps_the_lock(gpu: Gpu, make_backend: MakeBackend) -> None:
    backend = make_backend(2 * MIB)
    for copy, kind in ((backend.copy, "copy"), (backend.copy_quickly, "copy with lock")):
        copy(LOAD, scattered(64), None)
        assert {entry[1] for entry in gpu.take("copy")} == {kind}


# Pieces and streams


@pytest.mark.parametrize(
    ("direction", "page", "count", "expected"),
    [
        # The first piece is a smaller one; each later one of a load has 64 MiB or just more.
        (LOAD, 6 * MIB, 14, [(0, 12 * MIB), (1, 66 * MIB), (0, 6 * MIB)]),
        (STORE, 6 * MIB, 7, [(0, 12 * MIB), (1, 18 * MIB), (0, 12 * MIB)]),
        # The device begins when the driver has read all descriptors of a call: 256.
        (LOAD, 4096, 600, [(0, 1 * MIB), (1, 1 * MIB), (0, 88 * 4096)]),
    ],
)
def test_copies_go_in_pieces(
    gpu: Gpu,
    make_backend: MakeBackend,
    direction: Direction,
    page: int,
    count: int,
    expected: list[tuple[int, int]],
) -> None:
    make_backend(page).copy(direction, scattered(count), None)
    assert [(stream, size) for stream, _, size in gpu.take("copy")] == expected


def test_a_store_changes_streams_and_keeps_its_order(gpu: Gpu, make_backend: MakeBackend) -> None:
    """Each piece waits for the one before, including the last piece of the previous copy."""
    backend = make_backend(6 * MIB)
    backend.copy(STORE, scattered(5), None)
    backend.copy(STORE, scattered(1), None)
    assert gpu.take("copy", "after") == [
        (0, "copy", 12 * MIB),
        (1, "after 0", 0),
        (1, "copy", 18 * MIB),
        (0, "after 1", 0),
        (0, "copy", 6 * MIB),
        (1, "after 0", 0),
    ]


# Events


@pytest.mark.parametrize(
    ("direction", "page", "count", "num_events"),
    [
        # 1 GiB and two pages, in pieces of 64 MiB at most, or 16 MiB
        (LOAD, 2 * MIB, 514, 8),
        (STORE, 2 * MIB, 514, 9),
        (LOAD, 16 << 10, 4096, 1),  # many small pieces share one
        (LOAD, 4096, 0, 1),  # a copy of nothing has an end
    ],
)
def test_few_events_and_one_behind_the_last_byte(
    gpu: Gpu,
    make_backend: MakeBackend,
    direction: Direction,
    page: int,
    count: int,
    num_events: int,
) -> None:
    pending = make_backend(page).copy(direction, scattered(count), None)
    seconds = [mark.seconds for mark in pending.marks]
    start, *log = gpu.take("copy", "mark")
    assert start[1] == "mark"
    assert [entry[1] for entry in log].count("mark") == len(seconds) == num_events
    assert log[-1][1] == "mark"
    assert sum(size for _, _, size in log) == count * page
    assert sum(seconds) == pytest.approx(count * max(2e-6, page * 3e-11))
    assert count == 0 or min(seconds) > 0


# Failures


@pytest.mark.parametrize("direction", Direction)
def test_a_refused_copy_fails_when_what_was_queued_has_ended(
    gpu: Gpu, make_backend: MakeBackend, direction: Direction
) -> None:
    """Whichever call is refused. The failed copy's blocks are given to others then."""
    backend = make_backend(6 * MIB)
    backend.copy(direction, scattered(40), None)
    num_calls = len(gpu.log)
    for gpu.refused in range(num_calls):
        gpu.log.clear()
        gpu.under_way.clear()
        with pytest.raises(RuntimeError, match="refused"):
            backend.copy(direction, scattered(40), None)
        assert not gpu.under_way


def test_no_memory_is_freed_while_it_is_copied(gpu: Gpu, make_backend: MakeBackend) -> None:
    """Nobody may have noted the last copies: a signal can end the rank at any line."""
    backend = make_backend(6 * MIB)
    backend.allocate_host(4096)
    for direction in Direction:
        backend.copy(direction, scattered(14), None)
    backend.close()
    assert not gpu.freed_under_way


# Regions


def test_pages_of_similar_size_go_together() -> None:
    pages = (4096, 20_000, 4608, 16_384)
    device, host = (
        Regions.from_tensors([torch.empty(count, page, dtype=torch.int8) for page in pages])
        for count in (3, 5)
    )
    small, large = classify_regions(device, host, None)
    assert (small.page, large.page) == (4608, 20_000)
    for alike, chosen in ((small, [0, 2]), (large, [1, 3])):
        assert alike.device.pages.tolist() == [pages[index] for index in chosen]
        assert np.array_equal(alike.device.bases, device.bases[chosen])
        assert np.array_equal(alike.host.bases, host.bases[chosen])
        assert np.array_equal(alike.host.strides, host.strides[chosen])
        assert (alike.device.num_blocks, alike.host.num_blocks) == (3, 5)
        assert alike.sides(STORE) == alike.sides(LOAD)[::-1] == (alike.device, alike.host)


@pytest.mark.parametrize("direction", Direction)
def test_one_region_with_rows_apart_keeps_all_classes_from_merging(direction: Direction) -> None:
    """The classes share their extents."""
    pages = (4096, 20_000)
    device = Regions.from_tensors([torch.empty(3, page, dtype=torch.int8) for page in pages])
    small = torch.empty(3, 4096, dtype=torch.int8)
    large = torch.empty(3, 20_016, dtype=torch.int8)[:, :20_000]
    for alike in classify_regions(device, Regions.from_tensors([small, large]), None):
        extents = find_extents(*alike.sides(direction), np.arange(3), np.arange(3))
        assert extents.lengths.tolist() == [1, 1, 1]
