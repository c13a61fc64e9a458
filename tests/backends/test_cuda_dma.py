"""Calls of the driver for copies by DMA, with a fake driver: no GPU needed."""

import ctypes
import sys
from enum import IntEnum
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simple_offload.backends.base import Direction
from simple_offload.backends.cuda import dma
from simple_offload.backends.cuda.dma import CudaCopyError
from simple_offload.backends.descriptors import Descriptors

IN_STREAM_ORDER, ANY_ORDER = 1, 3
"""cuda.h: CU_MEMCPY_SRC_ACCESS_ORDER_STREAM and CU_MEMCPY_SRC_ACCESS_ORDER_ANY."""


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
    """The functions of cuda.bindings.driver that the code uses."""

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
    monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", fake)
    return fake


def descriptors(*rows: tuple[int, int, int]) -> Descriptors:
    return Descriptors(*np.array(rows, np.uint64).reshape(-1, 3).T.copy())


STREAM = cast(Any, SimpleNamespace(cuda_stream=7))
PLAN = descriptors((100, 200, 16), (300, 400, 64), (500, 600, 32))


def test_one_call_for_all_descriptors(driver: Driver) -> None:
    submit = dma.resolve_dma()
    submit(PLAN, Direction.LOAD, STREAM, False)
    submit(PLAN, Direction.STORE, STREAM, False)
    lists = ([100, 300, 500], [200, 400, 600], [16, 64, 32])
    assert driver.calls == [(*lists, ANY_ORDER), (*lists, IN_STREAM_ORDER)]


@pytest.mark.parametrize("has_batch", [True, False])
def test_a_refusal_names_error_and_descriptor(driver: Driver, has_batch: bool) -> None:
    driver.has_batch = has_batch
    submit = dma.resolve_dma()
    driver.fails_at = 1
    with pytest.raises(CudaCopyError, match="CUDA_ERROR_INVALID_VALUE at descriptor 1 of 3"):
        submit(PLAN, Direction.LOAD, STREAM, False)


def test_a_driver_without_batches(driver: Driver, caplog: pytest.LogCaptureFixture) -> None:
    driver.has_batch = False
    submit = dma.resolve_dma()
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    for part in ("no cuMemcpyBatchAsync", "CUDA_ERROR_NOT_FOUND", "one descriptor at a time"):
        assert part in record.getMessage()
    submit(PLAN, Direction.LOAD, STREAM, False)
    assert [call[:3] for call in driver.calls] == [
        ([100], [200], [16]),
        ([300], [400], [64]),
        ([500], [600], [32]),
    ]


@given(st.lists(st.tuples(*[st.integers(0, 2**63 - 1)] * 2, st.integers(1, 9))))
def test_descriptors_are_ordered_by_descending_size(rows: list[tuple[int, int, int]]) -> None:
    ordered = dma.largest_first(descriptors(*rows))
    again = list(zip(*(part.tolist() for part in ordered), strict=True))
    assert sorted(again) == sorted(rows)
    assert [row[2] for row in again] == sorted((row[2] for row in rows), reverse=True)
    assert all(part.flags.c_contiguous for part in ordered)  # the driver is given addresses
    assert dma.largest_first(ordered) is ordered
