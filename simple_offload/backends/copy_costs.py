"""CopyCosts: what copies of one direction cost on this machine, and which path is cheaper."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

KERNEL_SHARES = (0.1, 0.3, 0.5, 0.8, 1.0)
"""Shares of a batch that are tried on the kernel while DMA copies the rest: together they fill
gaps that either leaves on the bus."""
_WORTHWHILE = 0.98
"""SMs have better uses: the kernel has to save this much over DMA alone."""


class Division(NamedTuple):
    """How a batch is to be copied."""

    by_kernel: npt.NDArray[np.bool_]
    """Of each descriptor, whether the kernel takes it; the others go by DMA."""
    seconds: float
    """How long all of it should take."""


@dataclass(frozen=True, slots=True)
class CopyCosts:
    """By descriptor size (ascending, bytes), all arrays ``[k]``."""

    sizes: Floats
    dma: Floats
    """Seconds a descriptor, all by DMA."""
    divided: Floats
    """Seconds a descriptor, with the best share by kernel; as ``dma`` where none is better."""
    shares: Floats
    """That share, 0 to 1."""
    kernel_start: float = 0.0
    """Seconds that a batch pays once for having the kernel take part."""

    def divide(self, sizes: npt.NDArray[np.uint64]) -> Division:
        """How to copy descriptors of these sizes. Between measured sizes, and above, costs go
        by the bytes, at a pace interpolated by log size; below, a descriptor costs what the
        smallest one does."""
        dma = self._interpolate(sizes, self.dma)
        divided = self._interpolate(sizes, self.divided)
        share = np.interp(np.log2(sizes.astype(np.float64)), np.log2(self.sizes), self.shares)
        with_kernel = float(divided.sum()) + self.kernel_start
        if not share.any() or float(dma.sum()) <= with_kernel:
            return Division(np.zeros(len(sizes), dtype=np.bool_), float(dma.sum()))
        # Every 1 / share-th descriptor, whatever their order: the running total passes a whole
        # number there.
        total = np.cumsum(share) + 1e-9
        return Division(np.floor(total) > np.floor(total - share), with_kernel)

    def _interpolate(self, sizes: npt.NDArray[np.uint64], seconds: Floats) -> Floats:
        wanted = sizes.astype(np.float64)
        # Between rungs interpolate seconds a byte, which is flat where bandwidth is.
        pace: Floats = np.interp(np.log2(wanted), np.log2(self.sizes), seconds / self.sizes)
        floor: Floats = np.where(wanted < self.sizes[0], seconds[0], 0.0)
        total: Floats = np.maximum(pace * wanted, floor)
        return total


def measure_costs(
    sizes: list[int],
    count: Callable[[int], int],
    time_dma: Callable[[int, int], float],
    time_divided: Callable[[int, int, float], float] | None,
) -> CopyCosts:
    """Costs at descriptor sizes ``sizes`` (bytes, ascending).

    ``count(size)``: descriptors to time it with. ``time_dma(size, count)`` and
    ``time_divided(size, count, share)`` copy so many and return the seconds that took;
    ``time_divided`` is None where there is no kernel.
    """
    dma, divided, shares = [], [], []
    kernel_start = 0.0
    dma_start = time_dma(sizes[0], 1)
    for size in sizes:
        number = count(size)
        # What a batch costs however small it is, is none of the descriptors'.
        by_dma = max(time_dma(size, number) - dma_start, 1e-9) / number
        best, best_share = by_dma, 0.0
        for share in KERNEL_SHARES if time_divided is not None else ():
            assert time_divided is not None
            kernel_start = kernel_start or time_divided(sizes[0], 1, 1.0)
            seconds = max(time_divided(size, number, share) - kernel_start, 1e-9) / number
            if seconds < min(best, by_dma * _WORTHWHILE):
                best, best_share = seconds, share
        dma.append(by_dma)
        divided.append(best)
        shares.append(best_share)
    start = max(0.0, kernel_start - dma_start)
    return CopyCosts(
        np.array(sizes, np.float64), np.array(dma), np.array(divided), np.array(shares), start
    )
