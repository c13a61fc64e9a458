"""What copies cost on this GPU, by direction, path and descriptor size."""

import math
import time
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from simple_offload.backends.base import Direction
from simple_offload.backends.cuda.copy_costs import CopyCosts, Division, Path, measure_costs
from simple_offload.backends.cuda.queues import CALL_DESCRIPTORS, CudaQueues, match_regions
from simple_offload.backends.descriptors import Regions, Runs

_LADDER = tuple(4096 << step for step in range(7))  # 4 KiB to 256 KiB
LARGEST_SIZE = _LADDER[-1]
"""Bytes. Above it a descriptor costs what its bytes do."""
_SMALL, _SPREAD = 64 << 10, 1.15
"""Below this size (bytes) a descriptor takes DMA longer by at least this factor in a tier of many
GiB than in the scratch memory: at 32 KiB 29 to 51 GB/s were seen (docs/measurements.md) where 47 to
51 had been measured."""
SCRATCH_BYTES = 64 << 20
"""What a measurement needs on each side."""


def sizes_from(smallest_page: int) -> list[int]:
    """The descriptor sizes to measure where no page has less than ``smallest_page`` bytes:
    smaller ones do not occur, larger ones do, as runs of pages."""
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
        regions = (Regions.within(side, size) for side in (device, host))
        sides = match_regions(*regions, kernels=bool(queues.kernels))
        runs = _scattered(len(device) // size, count)
        division = Division(by_kernel, 0.0)
        best = math.inf
        # The least counts: whatever else the machine does takes its time too. One batch is soon
        # timed, and too long a time for it makes all further ones look quick.
        for _ in range(3 if batches == 1 else 2):
            torch.cuda.synchronize(device.device)
            start = time.perf_counter()
            kept = [list(queues.submit(direction, sides, runs, [division])) for _ in range(batches)]
            torch.cuda.synchronize(device.device)
            best = min(best, time.perf_counter() - start)
            del kept
        return best

    # Many batches: with thousands of descriptors queued the driver takes longer for each.
    dma = Path(
        lambda size: min(CALL_DESCRIPTORS, (8 << 20) // size), 16, partial(timed, by_kernel=False)
    )
    if not queues.kernels:
        return measure_costs(sizes, dma, None)
    for size in sizes:
        timed(size, 8, 1, by_kernel=True)  # compiles it
    # Larger ones: the host is to take less time to launch one than the device to copy it.
    kernel = Path(lambda size: min(4096, (32 << 20) // size), 2, partial(timed, by_kernel=True))
    costs = measure_costs(sizes, dma, kernel)
    return replace(costs, dma=costs.dma * np.where(costs.sizes < _SMALL, _SPREAD, 1.0))


def _scattered(num_blocks: int, count: int) -> Runs:
    """``count`` random pairs of ``num_blocks`` blocks."""
    random = np.random.default_rng(0)
    source, destination = (random.permutation(num_blocks)[:count] for _ in range(2))
    return Runs(source, destination, np.ones_like(source))
