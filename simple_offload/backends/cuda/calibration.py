"""Calibration: what copies cost on this GPU, by direction, path and descriptor size."""

import math
import time
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from simple_offload.backends.base import Direction
from simple_offload.backends.cuda.copy_costs import CopyCosts, Path, PathChoice, measure_costs
from simple_offload.backends.cuda.queues import CALL_DESCRIPTORS, CudaQueues, classify_regions
from simple_offload.backends.descriptors import Extents, Regions

_LADDER = tuple(4096 << step for step in range(7))  # 4 KiB to 256 KiB
LARGEST_SIZE = _LADDER[-1]
"""Bytes. A larger descriptor costs as much per byte as one of this size."""
_SMALL, _SPREAD = 64 << 10, 1.15
"""Below this size (bytes) DMA takes longer per descriptor in a tier of many GiB than in the scratch
memory, by at least this factor: at 32 KiB 29 to 51 GB/s were seen (docs/measurements.md) where
calibration had measured 47 to 51."""
SCRATCH_BYTES = 64 << 20
"""Scratch memory of a measurement, on each side."""


def sizes_from(smallest_page: int) -> list[int]:
    """The descriptor sizes to measure where every page has at least ``smallest_page`` bytes.
    Smaller descriptors do not occur; larger ones do, as extents of pages."""
    sizes = [size for size in _LADDER if 2 * size > smallest_page]
    return sizes or [min(smallest_page, SCRATCH_BYTES // 8)]


def measure_direction(
    queues: CudaQueues,
    direction: Direction,
    sizes: list[int],
    device: torch.Tensor,
    host: torch.Tensor,
) -> CopyCosts:
    """Time copies between ``device`` and ``host``, int8 ``[SCRATCH_BYTES]`` each, in descriptors
    of ``sizes`` bytes (ascending). Nothing else is queued; the buffers are overwritten."""

    def timed(size: int, count: int, batches: int, *, by_kernel: bool) -> float:
        regions = (Regions.in_buffer(side, size) for side in (device, host))
        classes = classify_regions(*regions, kernels=bool(queues.kernels))
        extents = _scattered(len(device) // size, count)
        choice = PathChoice(by_kernel, 0.0)
        best = math.inf
        # The shortest time counts: other work on the machine only makes it longer. One batch is
        # timed more often: it takes little time, and if it is timed too long, all further batches
        # look quick.
        for _ in range(3 if batches == 1 else 2):
            torch.cuda.synchronize(device.device)
            start = time.perf_counter()
            pieces = [
                list(queues.submit(direction, classes, extents, [choice])) for _ in range(batches)
            ]
            torch.cuda.synchronize(device.device)
            best = min(best, time.perf_counter() - start)
            del pieces
        return best

    # Many batches: the driver takes longer per descriptor with thousands of them queued.
    dma = Path(
        lambda size: min(CALL_DESCRIPTORS, (8 << 20) // size), 16, partial(timed, by_kernel=False)
    )
    if not queues.kernels:
        return measure_costs(sizes, dma, None)
    for size in sizes:
        timed(size, 8, 1, by_kernel=True)  # compiles the kernel
    # Larger batches, so that a launch takes the host less time than the copy takes the device.
    kernel = Path(lambda size: min(4096, (32 << 20) // size), 2, partial(timed, by_kernel=True))
    costs = measure_costs(sizes, dma, kernel)
    return replace(costs, dma=costs.dma * np.where(costs.sizes < _SMALL, _SPREAD, 1.0))


def _scattered(num_blocks: int, count: int) -> Extents:
    """``count`` random pairs of ``num_blocks`` blocks."""
    random = np.random.default_rng(0)
    source, destination = (random.permutation(num_blocks)[:count] for _ in range(2))
    return Extents(source, destination, np.ones_like(source))
