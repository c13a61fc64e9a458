"""Which copies the engine's thread submits itself: no GPU needed."""

import math

import numpy as np
import pytest

from simple_offload.backends.base import Direction
from simple_offload.backends.copy_costs import CopyCosts
from simple_offload.backends.cuda import CudaBackend
from simple_offload.backends.cuda_regions import AlikeRegions
from simple_offload.backends.plan import Regions
from simple_offload.metadata import Transfer


def quick_backend(page: int, num_regions: int, *, kernel: bool = False) -> CudaBackend:
    """Where descriptors of less than 64 KiB go by kernel, if there is one."""
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
