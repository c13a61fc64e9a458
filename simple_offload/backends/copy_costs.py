"""CopyCosts: what copies of one direction cost on this machine, and which path is cheaper."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

KERNEL_SHARES = (0.3, 0.8, 1.0)
"""Shares of a batch that are tried on the kernel while DMA copies the rest: together they fill
gaps that either leaves on the bus."""
_WORTHWHILE = 0.95
"""SMs have better uses: a batch has to take this much less time with the kernel than without."""


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
        if not len(sizes):
            return Division(np.zeros(0, dtype=np.bool_), 0.0)
        # Equal sizes lie together, since batches are sorted.
        starts = np.flatnonzero(np.concatenate(([True], sizes[1:] != sizes[:-1])))
        counts = np.diff(starts, append=len(sizes))
        kinds = sizes[starts]
        dma = float(self._interpolate(kinds, self.dma) @ counts)
        divided = float(self._interpolate(kinds, self.divided) @ counts)
        share = np.interp(np.log2(kinds.astype(np.float64)), np.log2(self.sizes), self.shares)
        with_kernel = divided + self.kernel_start
        if not share.any() or dma <= with_kernel:
            return Division(np.zeros(len(sizes), dtype=np.bool_), dma)
        if (share == 1.0).all():
            return Division(np.ones(len(sizes), dtype=np.bool_), with_kernel)
        # Every 1 / share-th descriptor, whatever their order: the running total passes a whole
        # number there.
        shares = np.repeat(share, counts)
        total = np.cumsum(shares) + 1e-9
        return Division(np.floor(total) > np.floor(total - shares), with_kernel)

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
    # What a batch costs however small it is, is none of the descriptors'.
    dma_start = time_dma(sizes[0], 1)
    kernel_start = time_divided(sizes[0], 1, 1.0) if time_divided is not None else 0.0
    dma, divided, shares = [], [], []
    for size in sizes:
        number = count(size)
        best = by_dma = time_dma(size, number)
        best_share = 0.0
        for share in KERNEL_SHARES if time_divided is not None else ():
            assert time_divided is not None
            seconds = time_divided(size, number, share)
            if seconds < min(best, by_dma * _WORTHWHILE):
                best, best_share = seconds, share
        start = kernel_start if best_share else dma_start
        dma.append(max(by_dma - dma_start, 1e-9) / number)
        divided.append(max(best - start, 1e-9) / number)
        shares.append(best_share)
    start = max(0.0, kernel_start - dma_start) if any(shares) else 0.0
    return CopyCosts(
        np.array(sizes, np.float64), np.array(dma), np.array(divided), np.array(shares), start
    )
