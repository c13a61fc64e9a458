"""CudaBackend's decisions about a copy, and their streams and pieces: no GPU needed."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from simple_offload.backends.base import Direction
from simple_offload.backends.cuda.backend import CudaBackend
from simple_offload.backends.cuda.copy_costs import CopyCosts, PathCost
from simple_offload.backends.cuda.queues import CudaQueues, classify_regions
from simple_offload.backends.descriptors import Descriptors, Regions, find_extents
from simple_offload.transfer import Transfer

LOAD, STORE = Direction.LOAD, Direction.STORE
MIB = 1 << 20


class Queues(CudaQueues):
    """Streams without a device. ``log``: the stream, "copy", "copy with lock", "mark" or "after"
    another stream, and bytes."""

    def __init__(self) -> None:
        self.kernel_on = None
        self.log: list[tuple[str, str, int]] = []
        self._streams = {direction: self._stream(direction.value) for direction in Direction}
        self._spare_streams = {direction: self._stream("spare") for direction in Direction}
        self.submit_dma = self._note

    def _stream(self, name: str) -> Any:
        def wait_stream(other: Any) -> None:
            self.log.append((name, f"after {other.name}", 0))

        return SimpleNamespace(name=name, wait_stream=wait_stream)

    def _note(self, plan: Descriptors, direction: Direction, stream: Any, keep_lock: bool) -> None:
        streams: Any = self._streams
        assert stream is streams[direction]
        kind = "copy with lock" if keep_lock else "copy"
        self.log.append((stream.name, kind, int(plan.sizes.sum())))

    def begin(self, direction: Direction, barrier: Any) -> Any:
        return "start"

    def mark(self, stream: Any) -> Any:
        self.log.append((stream.name, "mark", 0))
        return "mark"

    def take(self, *kinds: str) -> list[tuple[str, str, int]]:
        """Entries of these kinds, without those of earlier calls."""
        taken = [entry for entry in self.log if entry[1].split()[0] in kinds]
        self.log.clear()
        return taken


def make_backend(
    page: int, num_regions: int = 1, *, kernel: bool = False
) -> tuple[CudaBackend, Queues]:
    """A backend whose costs send descriptors of less than 64 KiB by kernel, if there is one."""
    backend = CudaBackend.__new__(CudaBackend)  # needs no GPU as long as it is not initialised
    num_blocks = 1 << 16
    pages = np.full(num_regions, page, np.uint64)
    bases = np.zeros((num_regions, 1), np.uint64)
    regions = Regions(bases, pages, pages, num_blocks, num_blocks, is_dense=True)
    crossing = 64 << 10 if kernel else 0
    costs = CopyCosts(crossing, PathCost(2e-6, 3e-11), PathCost(1e-7, 3e-11), 1e-5)
    backend._costs = dict.fromkeys(Direction, costs)
    backend._copy_path = "auto"
    backend._block_bytes = regions.block_bytes
    backend._classes = classify_regions(regions, regions, None)
    backend._queues = queues = Queues()
    return backend, queues


def scattered(count: int) -> Transfer:
    return Transfer(0, np.arange(count), np.arange(count)[::-1] * 3 % max(count, 1))


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
    page: int, num_regions: int, kernel: bool, few: int, many: int
) -> None:
    """No request waits for a store."""
    backend, _ = make_backend(page, num_regions, kernel=kernel)
    assert backend.is_quick(LOAD, scattered(few))
    assert not backend.is_quick(LOAD, scattered(many))
    assert not backend.is_quick(STORE, scattered(1))


def test_only_a_quick_copy_keeps_the_lock() -> None:
    backend, queues = make_backend(2 * MIB)
    for copy, kind in ((backend.copy, "copy"), (backend.copy_quickly, "copy with lock")):
        copy(LOAD, scattered(64), None)
        assert {entry[1] for entry in queues.take("copy")} == {kind}


# Pieces and streams


@pytest.mark.parametrize(
    ("direction", "page", "count", "expected"),
    [
        # The first piece is a smaller one; each later one of a load has 64 MiB or just more.
        (LOAD, 6 * MIB, 14, [("load", 12 * MIB), ("spare", 66 * MIB), ("load", 6 * MIB)]),
        (STORE, 6 * MIB, 7, [("store", 12 * MIB), ("spare", 18 * MIB), ("store", 12 * MIB)]),
        # The device begins when the driver has read all descriptors of a call: 256.
        (LOAD, 4096, 600, [("load", 1 * MIB), ("spare", 1 * MIB), ("load", 88 * 4096)]),
    ],
)
def test_copies_go_in_pieces(
    direction: Direction, page: int, count: int, expected: list[tuple[str, int]]
) -> None:
    backend, queues = make_backend(page)
    backend.copy(direction, scattered(count), None)
    assert [(stream, size) for stream, _, size in queues.take("copy")] == expected


def test_a_store_changes_streams_and_keeps_its_order() -> None:
    """Each piece waits for the one before, including the last piece of the previous copy."""
    backend, queues = make_backend(6 * MIB)
    backend.copy(STORE, scattered(5), None)
    backend.copy(STORE, scattered(1), None)
    assert queues.take("copy", "after") == [
        ("store", "copy", 12 * MIB),
        ("spare", "after store", 0),
        ("spare", "copy", 18 * MIB),
        ("store", "after spare", 0),
        ("store", "copy", 6 * MIB),
        ("spare", "after store", 0),
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
    direction: Direction, page: int, count: int, num_events: int
) -> None:
    backend, queues = make_backend(page)
    seconds = [mark.seconds for mark in backend.copy(direction, scattered(count), None).marks]
    log = queues.take("copy", "mark")
    assert [entry[1] for entry in log].count("mark") == len(seconds) == num_events
    assert log[-1][1] == "mark"
    assert sum(size for _, _, size in log) == count * page
    assert sum(seconds) == pytest.approx(count * max(2e-6, page * 3e-11))
    assert count == 0 or min(seconds) > 0


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
