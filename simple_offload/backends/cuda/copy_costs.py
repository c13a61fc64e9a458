"""CopyCosts: which copies of one direction go by kernel on this GPU, and how long copies take."""

import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from simple_offload.backends.base import Direction
from simple_offload.backends.cuda.queues import (
    CALL_DESCRIPTORS,
    CudaQueues,
    PathChoice,
    classify_regions,
)
from simple_offload.backends.descriptors import Extents, Regions

_LADDER = tuple(4096 << step for step in range(7))  # 4 KiB to 256 KiB
LARGEST_SIZE = _LADDER[-1]
"""Bytes. A larger descriptor costs as much per byte as one of this size."""
_SMALL, _SPREAD = 64 << 10, 1.15
"""Below this size (bytes) DMA takes longer per descriptor in a tier of many GiB than in the scratch
memory, by at least this factor: at 32 KiB 29 to 51 GB/s were seen (docs/measurements.md) where
the measurement had found 47 to 51."""
_LARGE = 128 << 10
_WORTHWHILE, _SURPRISING = 0.95, 0.8
"""The kernel must beat DMA by this factor to be chosen, since it takes SMs from compute. For large
copies by more: DMA hardly loses there, so a win of the kernel is likely noise."""
SCRATCH_BYTES = 64 << 20
"""Scratch memory of a measurement, on each side."""


class PathCost(NamedTuple):
    """The time that copies by one path take."""

    per_descriptor: float
    """Seconds, at least."""
    per_byte: float
    """Seconds, of large descriptors."""

    def seconds(self, num_descriptors: int, num_bytes: int) -> float:
        """Expected time of descriptors that have ``num_bytes`` together."""
        return max(num_descriptors * self.per_descriptor, num_bytes * self.per_byte)


class CopyCosts(NamedTuple):
    """The measurements of one direction."""

    crossing: int
    """Bytes. Smaller descriptors go by kernel if a batch has enough of them, all others by DMA. 0
    where DMA copies all."""
    dma: PathCost
    kernel: PathCost
    kernel_start: float = 0.0
    """Seconds once per batch in which the kernel copies."""

    def describe(self) -> str:
        """In a few words: the crossing size, and GB/s of each path in use."""
        by_dma = f"by DMA at {1e-9 / self.dma.per_byte:.0f} GB/s"
        if not self.crossing:
            return f"all {by_dma}"
        rate = 1e-9 / self.kernel.per_byte
        return f"below {self.crossing >> 10}K by kernel at {rate:.0f} GB/s, others {by_dma}"

    def choose(self, extents: Extents, num_pairs: int, page: int, times: int = 1) -> PathChoice:
        """Choose the path of each of ``extents``, which have ``num_pairs`` blocks together, in
        ``times`` regions with pages of ``page`` bytes.

        All descriptors of a size take the same path. The bus limits both paths together, and
        sharing a size between them gained less than its planning cost.
        """
        count, num_bytes = len(extents.lengths), num_pairs * page
        all_by_dma = PathChoice(False, self.dma.seconds(times * count, times * num_bytes))
        if page >= self.crossing:
            return all_by_dma
        by_kernel: npt.NDArray[np.bool_] | bool = True
        num_small, small_bytes = count, num_bytes
        if count < num_pairs:
            is_small = extents.lengths * page < self.crossing
            num_small = int(np.count_nonzero(is_small))
            small_bytes = page * int(extents.lengths[is_small].sum())
            by_kernel = num_small == count or is_small
        seconds = (
            self.kernel_start
            + self.kernel.seconds(times * num_small, times * small_bytes)
            + self.dma.seconds(times * (count - num_small), times * (num_bytes - small_bytes))
        )
        return PathChoice(by_kernel, seconds) if seconds < all_by_dma.seconds else all_by_dma


Timer = Callable[[int, int, int, bool], float]
"""``timer(size, count, batches, by_kernel)`` copies ``batches`` batches of ``count`` descriptors of
``size`` bytes, one after another, and returns the seconds."""


def sizes_from(smallest_page: int) -> list[int]:
    """The descriptor sizes to measure where every page has at least ``smallest_page`` bytes.
    Smaller descriptors do not occur; larger ones do, as extents of pages."""
    sizes = [size for size in _LADDER if 2 * size > smallest_page]
    return sizes or [min(smallest_page, SCRATCH_BYTES // 8)]


def measure_direction(
    queues: CudaQueues,
    direction: Direction,
    sizes: Sequence[int],
    device: torch.Tensor,
    host: torch.Tensor,
) -> CopyCosts:
    """Time copies between ``device`` and ``host``, int8 ``[SCRATCH_BYTES]`` each, in descriptors
    of ``sizes`` bytes (ascending). Nothing else is queued; the buffers are overwritten."""
    has_kernel, random = queues.kernel_on is not None, np.random.default_rng(0)

    def timed(size: int, count: int, batches: int, by_kernel: bool) -> float:
        num_blocks = SCRATCH_BYTES // size
        on_device, on_host = (
            Regions.from_tensors([side[: num_blocks * size].view(num_blocks, size)])
            for side in (device, host)
        )
        classes = classify_regions(on_device, on_host, queues.kernel_on)
        source, destination = (random.permutation(num_blocks)[:count] for _ in range(2))
        extents = Extents(source, destination, np.ones_like(source))
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

    for size in sizes if has_kernel else ():
        timed(size, 8, 1, True)  # compiles the kernel
    return measure_costs(sizes, timed, has_kernel=has_kernel)


def measure_costs(sizes: Sequence[int], timer: Timer, *, has_kernel: bool) -> CopyCosts:
    """Measure the costs at ``sizes`` (bytes, ascending, each twice the one before).

    The cost of a descriptor is taken from the batches after the first: in a large copy the device
    copies one batch while the next is submitted, and the first submission does not count.
    """

    def measure(by_kernel: bool, most: int, num_bytes: int, further: int) -> list[float]:
        """Seconds of a descriptor, per size. A batch has at most ``most`` descriptors and
        ``num_bytes``; ``further`` batches follow the first."""
        found = []
        for size in sizes:
            count = min(most, num_bytes // size)
            one, all_batches = (timer(size, count, n, by_kernel) for n in (1, 1 + further))
            spread = _SPREAD if size < _SMALL and not by_kernel else 1.0
            found.append(spread * max((all_batches - one) / further, 1e-9) / count)
        return found

    def cost(descriptors: list[float]) -> PathCost:
        return PathCost(descriptors[0], descriptors[-1] / sizes[-1])

    # Many batches: the driver takes longer per descriptor with thousands of them queued.
    by_dma = measure(False, CALL_DESCRIPTORS, 8 << 20, 16)
    if not has_kernel:
        return CopyCosts(0, cost(by_dma), cost(by_dma))
    # Larger batches, so that a launch takes the host less time than the copy takes the device.
    by_kernel = measure(True, 4096, 32 << 20, 2)
    crossing = 0
    for size, dma_seconds, seconds in zip(sizes, by_dma, by_kernel, strict=True):
        if seconds >= dma_seconds * (_WORTHWHILE if size < _LARGE else _SURPRISING):
            break
        crossing = 2 * size
    dma_start, kernel_start = (timer(sizes[0], 1, 1, path) for path in (False, True))
    return CopyCosts(crossing, cost(by_dma), cost(by_kernel), max(0.0, kernel_start - dma_start))
