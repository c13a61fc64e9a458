"""Regions are grouped by page size, and copies go to the right streams in pieces. Needs no GPU."""

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch

from simple_offload.backends.base import Direction
from simple_offload.backends.cuda.queues import CudaQueues, classify_regions
from simple_offload.backends.descriptors import Descriptors, Regions


def descriptors(*rows: tuple[int, int, int]) -> Descriptors:
    return Descriptors(*np.array(rows, np.uint64).T.copy())


class Log(list[tuple[str, str, int]]):
    """The work of streams: (stream, "copy", bytes) and (stream, "after " other stream, 0)."""

    def stream(self, name: str) -> Any:
        def wait_stream(other: Any) -> None:
            self.append((name, f"after {other.name}", 0))

        return SimpleNamespace(name=name, wait_stream=wait_stream)

    def submit(
        self, plan: Descriptors, direction: Direction, stream: Any, *, keep_lock: bool = False
    ) -> None:
        assert direction.value in (stream.name, "store")
        self.append((stream.name, "keep" if keep_lock else "copy", int(plan.sizes.sum())))


def queues_with(log: Log) -> CudaQueues:
    queues = CudaQueues.__new__(CudaQueues)  # needs no GPU as long as it is not initialised
    queues._streams = {direction: log.stream(direction.value) for direction in Direction}
    queues._spare_stream = log.stream("spare")
    queues.submit_dma = log.submit
    return queues


MIB = 1 << 20
SMALL = descriptors((100, 200, 16), (300, 400, 64), (500, 600, 32))
LARGE = descriptors(*((64 * MIB * index, 0, 6 * MIB) for index in range(7)))


def test_a_store_changes_streams_and_keeps_its_order() -> None:
    """Each piece waits for the one before, including the last piece of the previous copy."""
    log = Log()
    queues = queues_with(log)
    pieces = [
        *queues._submit_by_dma(Direction.STORE, LARGE),
        *queues._submit_by_dma(Direction.STORE, SMALL),
    ]
    assert [(cast(Any, p.stream).name, p.num_bytes) for p in pieces] == [
        ("store", 18 * MIB),
        ("spare", 18 * MIB),
        ("store", 6 * MIB),
        ("spare", 112),
    ]
    assert log == [
        ("store", "copy", 18 * MIB),
        ("spare", "after store", 0),
        ("spare", "copy", 18 * MIB),
        ("store", "after spare", 0),
        ("store", "copy", 6 * MIB),
        ("spare", "after store", 0),
        ("spare", "copy", 112),
        ("store", "after spare", 0),
    ]
    assert cast(Any, queues._streams[Direction.STORE]).name == "store"


def test_a_load_stays_on_its_stream() -> None:
    log = Log()
    twice = Descriptors.concatenate([LARGE, LARGE])
    pieces = list(queues_with(log)._submit_by_dma(Direction.LOAD, twice))
    assert log == [("load", "copy", 66 * MIB), ("load", "copy", 18 * MIB)]
    assert [piece.num_bytes for piece in pieces] == [66 * MIB, 18 * MIB]


def test_few_descriptors_a_call() -> None:
    """The device begins when the driver has read all descriptors of a call."""
    log = Log()
    many = descriptors(*((4096 * index, 0, 4096) for index in range(600)))
    list(queues_with(log)._submit_by_dma(Direction.LOAD, many))
    assert log == [("load", "copy", count * 4096) for count in (256, 256, 88)]


def test_the_lock_is_kept_if_asked_for() -> None:
    log = Log()
    list(queues_with(log)._submit_by_dma(Direction.LOAD, LARGE, keep_lock=True))
    assert log == [("load", "keep", 42 * MIB)]


# Regions


PAGES = (4096, 20_000, 4608, 16_384)


def regions(num_blocks: int) -> Regions:
    return Regions.from_tensors([torch.empty(num_blocks, page, dtype=torch.int8) for page in PAGES])


def test_pages_of_similar_size_go_together() -> None:
    device, host = regions(3), regions(5)
    small, large = classify_regions(device, host, kernels=False)
    assert (small.page, large.page) == (4608, 20_000)
    for alike, chosen in ((small, [0, 2]), (large, [1, 3])):
        assert alike.device.pages.tolist() == [PAGES[index] for index in chosen]
        assert np.array_equal(alike.device.bases, device.bases[chosen])
        assert np.array_equal(alike.host.bases, host.bases[chosen])
        assert (alike.device.num_blocks, alike.host.num_blocks) == (3, 5)
        assert alike.sides(Direction.STORE) == (alike.device, alike.host)
        assert alike.sides(Direction.LOAD) == (alike.host, alike.device)
        assert alike.kernel == {}
