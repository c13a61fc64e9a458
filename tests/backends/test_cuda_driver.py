"""How copies by DMA speak to the driver, with a driver made of Python: no GPU needed."""

import ctypes
import math
import sys
from enum import IntEnum
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simple_offload.backends import cuda_dma
from simple_offload.backends.base import Direction
from simple_offload.backends.copy_costs import CopyCosts
from simple_offload.backends.cuda import CudaBackend
from simple_offload.backends.cuda_dma import CudaCopyError
from simple_offload.backends.cuda_regions import AlikeRegions
from simple_offload.backends.plan import Descriptors, Regions
from simple_offload.metadata import Transfer


class CUresult(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_NOT_FOUND = 500


_pointer, _size = ctypes.c_void_p, ctypes.c_size_t
_Batch = ctypes.CFUNCTYPE(
    ctypes.c_uint, _pointer, _pointer, _pointer, _size, _pointer, _pointer, _size, _pointer,
    _pointer,
)  # fmt: skip


class Driver(ModuleType):
    """cuda.bindings.driver, as far as it is used."""

    CUresult = CUresult

    def __init__(self) -> None:
        super().__init__("cuda.bindings.driver")
        self.has_batch = True
        self.fails_at: int | None = None
        self.calls: list[tuple[list[int], list[int], list[int], int]] = []
        self._batch: Any = cast(Any, _Batch)(self._copy_batch)

    def cuGetProcAddress(  # noqa: N802 - the driver's own name
        self, name: bytes, version: int, flags: int
    ) -> tuple[Any, int, int]:
        assert name == b"cuMemcpyBatchAsync"
        if not self.has_batch:
            return CUresult.CUDA_ERROR_NOT_FOUND, 0, 0
        return CUresult.CUDA_SUCCESS, cast(int, ctypes.cast(self._batch, _pointer).value), 0

    def cuMemcpyAsync(  # noqa: N802
        self, destination: int, source: int, size: int, stream: int
    ) -> tuple[IntEnum]:
        self.calls.append(([destination], [source], [size], 0))
        failed = self.fails_at == len(self.calls) - 1
        return (CUresult.CUDA_ERROR_INVALID_VALUE if failed else CUresult.CUDA_SUCCESS,)

    def _copy_batch(
        self,
        destinations: int,
        sources: int,
        sizes: int,
        count: int,
        attributes: int,
        first_indices: int,
        num_attributes: int,
        failed: int,
        stream: int | None,
    ) -> int:
        numbers: Any = ctypes.c_uint64 * count
        order = ctypes.c_uint.from_address(attributes).value
        assert num_attributes == 1
        assert ctypes.c_size_t.from_address(first_indices).value == 0
        lists = [list(numbers.from_address(a)) for a in (destinations, sources, sizes)]
        self.calls.append((lists[0], lists[1], lists[2], order))
        if self.fails_at is None:
            return 0
        ctypes.c_size_t.from_address(failed).value = self.fails_at
        return int(CUresult.CUDA_ERROR_INVALID_VALUE)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    fake = Driver()
    bindings = ModuleType("cuda.bindings")
    bindings.driver = fake  # type: ignore[attr-defined]
    package = ModuleType("cuda")
    package.bindings = bindings  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cuda", package)
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", fake)
    return fake


def descriptors(*rows: tuple[int, int, int]) -> Descriptors:
    return Descriptors(*np.array(rows, np.uint64).T.copy())


STREAM = cast(Any, SimpleNamespace(cuda_stream=7))
PLAN = descriptors((100, 200, 16), (300, 400, 64), (500, 600, 32))


def test_one_call_for_all_descriptors(driver: Driver) -> None:
    submit = cuda_dma.resolve_dma()
    submit(PLAN, Direction.LOAD, STREAM)
    submit(PLAN, Direction.STORE, STREAM)
    lists = ([100, 300, 500], [200, 400, 600], [16, 64, 32])
    assert driver.calls == [(*lists, cuda_dma._ANY_ORDER), (*lists, cuda_dma._IN_STREAM_ORDER)]


def test_a_refusal_names_error_and_descriptor(driver: Driver) -> None:
    submit = cuda_dma.resolve_dma()
    driver.fails_at = 2
    with pytest.raises(CudaCopyError, match="CUDA_ERROR_INVALID_VALUE at descriptor 2 of 3"):
        submit(PLAN, Direction.LOAD, STREAM)


def test_a_driver_without_batches(driver: Driver, caplog: pytest.LogCaptureFixture) -> None:
    driver.has_batch = False
    submit = cuda_dma.resolve_dma()
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    for part in ("no cuMemcpyBatchAsync", "CUDA_ERROR_NOT_FOUND", "one descriptor at a time"):
        assert part in record.getMessage()
    submit(PLAN, Direction.LOAD, STREAM)
    assert [call[:3] for call in driver.calls] == [
        ([100], [200], [16]),
        ([300], [400], [64]),
        ([500], [600], [32]),
    ]


def test_a_refused_single_copy_names_its_descriptor(driver: Driver) -> None:
    driver.fails_at = 1
    with pytest.raises(CudaCopyError, match="INVALID_VALUE at descriptor 1 of 3"):
        cuda_dma.copy_one_by_one(PLAN, Direction.LOAD, STREAM)


def test_largest_first() -> None:
    assert [part.tolist() for part in cuda_dma.largest_first(PLAN)] == [
        [300, 500, 100],
        [400, 600, 200],
        [64, 32, 16],
    ]


@pytest.mark.parametrize(
    "plan",
    [
        descriptors((1, 2, 64), (3, 4, 64), (5, 6, 16)),
        descriptors((1, 2, 16)),
        Descriptors(*(np.empty(0, np.uint64) for _ in range(3))),
    ],
    ids=["equal sizes", "one", "none"],
)
def test_what_is_in_order_stays_as_it_is(plan: Descriptors) -> None:
    assert cuda_dma.largest_first(plan) is plan


@given(st.lists(st.tuples(*[st.integers(0, 2**63 - 1)] * 2, st.integers(1, 9)), min_size=1))
def test_the_same_copies_by_descending_size(rows: list[tuple[int, int, int]]) -> None:
    ordered = cuda_dma.largest_first(descriptors(*rows))
    again = list(zip(*(part.tolist() for part in ordered), strict=True))
    assert sorted(again) == sorted(rows)
    assert [row[2] for row in again] == sorted((row[2] for row in rows), reverse=True)
    assert all(part.flags.c_contiguous for part in ordered)  # the driver is given addresses


# Turns


class Log(list[tuple[str, str, int]]):
    """What streams are given: (stream, "copy", bytes) and (stream, "after " other stream, 0)."""

    def stream(self, name: str) -> Any:
        def wait_stream(other: Any) -> None:
            self.append((name, f"after {other.name}", 0))

        return SimpleNamespace(name=name, wait_stream=wait_stream)

    def submit(self, plan: Descriptors, _: Direction, stream: Any) -> None:
        self.append((stream.name, "copy", int(plan.sizes.sum())))


def backend_with(log: Log) -> CudaBackend:
    backend = CudaBackend.__new__(CudaBackend)  # needs no GPU as long as it is not initialised
    backend._streams = {direction: log.stream(direction.value) for direction in Direction}
    backend._spare_stream = log.stream("spare")
    backend._submit_dma = log.submit
    return backend


MIB = 1 << 20
LARGE = descriptors(*((64 * MIB * index, 0, 6 * MIB) for index in range(7)))


def test_a_store_changes_streams_and_keeps_its_order() -> None:
    """Each turn begins behind the one before, also that of the copy before."""
    log = Log()
    backend = backend_with(log)
    pieces = [
        *backend._submit_by_dma(Direction.STORE, LARGE),
        *backend._submit_by_dma(Direction.STORE, PLAN),
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
    assert cast(Any, backend._streams[Direction.STORE]).name == "store"


def test_a_load_stays_on_its_stream() -> None:
    log = Log()
    twice = Descriptors.joined([LARGE, LARGE])
    pieces = list(backend_with(log)._submit_by_dma(Direction.LOAD, twice))
    assert log == [("load", "copy", 66 * MIB), ("load", "copy", 18 * MIB)]
    assert [piece.num_bytes for piece in pieces] == [66 * MIB, 18 * MIB]


def test_few_descriptors_a_call() -> None:
    """The device begins when the driver has taken all of a call's."""
    log = Log()
    many = descriptors(*((4096 * index, 0, 4096) for index in range(600)))
    list(backend_with(log)._submit_by_dma(Direction.LOAD, many))
    assert log == [("load", "copy", count * 4096) for count in (256, 256, 88)]


# What the engine's thread submits itself


def quick_backend(page: int, num_regions: int, *, kernel: bool = False) -> CudaBackend:
    """Where descriptors of less than 64 KiB go by kernel, if there is one."""
    backend = backend_with(Log())
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
    backend._device_regions = regions
    backend._sides = [AlikeRegions(regions, regions, {})]
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
    """Nobody waits for them."""
    backend = quick_backend(2 << 20, 1)
    assert not backend.is_quick(Direction.STORE, pairs(1))
