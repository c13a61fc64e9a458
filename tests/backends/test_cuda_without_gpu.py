"""CudaBackend's decisions about a copy: no GPU needed."""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from simple_offload.backends.base import Direction
from simple_offload.backends.cuda.backend import CudaBackend
from simple_offload.backends.cuda.copy_costs import CopyCosts
from simple_offload.backends.cuda.queues import CudaQueues, RegionClass
from simple_offload.backends.descriptors import Descriptors, Extents, Regions, find_extents
from simple_offload.metadata import Transfer


def quick_backend(page: int, num_regions: int, *, kernel: bool = False) -> CudaBackend:
    """A backend whose costs send descriptors of less than 64 KiB by kernel, if there is one."""
    backend = CudaBackend.__new__(CudaBackend)  # needs no GPU as long as it is not initialised
    num_blocks = 1 << 16
    regions = Regions(
        np.zeros((num_regions, 1), np.uint64),
        np.full(num_regions, page, np.uint64),
        num_blocks,
        num_blocks,
    )
    sizes = np.array([4096.0, 32768.0, 65536.0])
    by_kernel = np.array([1e-7, 1e-6, 4e-6]) if kernel else np.full(3, math.inf)
    costs = CopyCosts(sizes, np.array([2e-6, 2e-6, 2e-6]), by_kernel, 1e-5)
    backend._costs = dict.fromkeys(Direction, costs)
    backend._copy_path = "auto"
    backend._device_regions, backend._block_bytes = regions, regions.block_bytes
    backend._classes = [RegionClass(regions, regions, {})]
    return backend


def pairs(count: int) -> Transfer:
    return Transfer(0, np.arange(count), np.arange(count))


@pytest.mark.parametrize(
    ("page", "num_regions", "kernel", "most"),
    [
        (2 << 20, 1, False, 1024),  # 2 GiB
        (64 << 10, 64, True, 32),
        (16 << 10, 64, False, 32),
        (16 << 10, 64, True, 2048),  # 2 GiB again: the kernel takes thousands at once
    ],
)
def test_loads_of_few_descriptors_are_quick(
    page: int, num_regions: int, kernel: bool, most: int
) -> None:
    backend = quick_backend(page, num_regions, kernel=kernel)
    assert backend.is_quick(Direction.LOAD, pairs(most))
    assert not backend.is_quick(Direction.LOAD, pairs(most + 1))


def test_stores_are_not_quick() -> None:
    """No request waits for a store."""
    backend = quick_backend(2 << 20, 1)
    assert not backend.is_quick(Direction.STORE, pairs(1))


class Log(CudaQueues):
    """Records its input: bytes for a call of the driver, and "mark" for an event."""

    def __init__(self) -> None:
        self.kernels = {}
        self.submit_dma = self._note
        stream: Any = SimpleNamespace(wait_stream=lambda _: None)
        self._streams = dict.fromkeys(Direction, stream)
        self._spare_stream = stream
        self.given: list[int | str] = []
        self.kept_lock: set[bool] = set()

    def _note(
        self, plan: Descriptors, direction: Direction, stream: Any, *, keep_lock: bool = False
    ) -> None:
        assert stream is self._streams[direction]
        self.given.append(int(plan.sizes.sum()))
        self.kept_lock.add(keep_lock)

    def begin(self, direction: Direction, barrier: Any) -> Any:
        return "start"

    def mark(self, stream: Any) -> Any:
        self.given.append("mark")
        return "mark"


def copy(backend: CudaBackend, direction: Direction, transfer: Transfer) -> tuple[Log, list[float]]:
    """The input of the queues, and the seconds of each part of the copy."""
    backend._queues = log = Log()
    pending = backend.copy(direction, transfer, None)
    return log, [part.seconds for part in pending.marks]


def scattered(count: int) -> Transfer:
    return Transfer(0, np.arange(count), np.arange(count)[::-1] * 3 % count)


def test_regions_start_the_kernel_together() -> None:
    """One region alone has so few pages that they would go by DMA."""
    few = Extents(np.arange(2), np.arange(2), np.ones(2, np.int64))
    for num_regions, by_kernel in ((1, False), (64, True)):
        backend = quick_backend(16 << 10, num_regions, kernel=True)
        division = backend._choose(Direction.STORE, backend._classes[0], few)
        assert division.by_kernel is by_kernel
        expected = backend._costs[Direction.STORE].choose(np.full(2 * num_regions, 16 << 10))
        assert division.seconds == pytest.approx(expected.seconds)


@pytest.mark.parametrize(
    ("page", "num_regions", "num_bytes"),
    [(2 << 20, 1, 16 << 20), (64 << 10, 64, 16 << 20), (4 << 10, 1, 8 << 20)],
)
def test_the_first_bytes_move_soon(
    page: int, num_regions: int, num_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first bytes move before most of the copy is planned."""
    planned: list[int] = []

    def find(source: Regions, destination: Regions, *blocks: Any) -> Any:
        planned.append(len(blocks[0]))
        return find_extents(source, destination, *blocks)

    monkeypatch.setattr("simple_offload.backends.cuda.backend.find_extents", find)
    backend = quick_backend(page, num_regions)
    copy(backend, Direction.LOAD, scattered(16384 // num_regions))
    assert planned[0] * page * num_regions == num_bytes
    assert sum(planned) == 16384 // num_regions


@pytest.mark.parametrize("direction", list(Direction))
def test_few_events_and_one_behind_the_last_byte(direction: Direction) -> None:
    """1 GiB and two pages, in pieces of 64 MiB at most, or 16 MiB: about eight events."""
    log, seconds = copy(quick_backend(2 << 20, 1), direction, scattered(514))
    num_events = {Direction.LOAD: 8, Direction.STORE: 9}[direction]
    assert log.given.count("mark") == len(seconds) == num_events
    assert log.given[-1] == "mark"
    assert sum(given for given in log.given if not isinstance(given, str)) == 514 << 21
    assert sum(seconds) == pytest.approx(514 * 2e-6 * 32)  # by the bytes, above 64 KiB
    assert min(seconds) > 0


def test_many_small_pieces_share_an_event() -> None:
    backend = quick_backend(16 << 10, 1)
    log, seconds = copy(backend, Direction.LOAD, scattered(4096))
    assert len(log.given) > 16  # 256 descriptors a call
    expected = backend._costs[Direction.LOAD].choose(np.full(4096, 16 << 10)).seconds
    assert seconds == [pytest.approx(expected)]


def test_a_copy_of_nothing_has_an_end() -> None:
    log, seconds = copy(quick_backend(4096, 1), Direction.LOAD, pairs(0))
    assert (log.given, seconds) == (["mark"], [0.0])


def test_only_a_quick_copy_keeps_the_lock() -> None:
    backend = quick_backend(2 << 20, 1)
    log, _ = copy(backend, Direction.LOAD, scattered(64))
    assert log.kept_lock == {False}
    backend.copy_quickly(Direction.LOAD, scattered(64), None)
    assert log.kept_lock == {False, True}
