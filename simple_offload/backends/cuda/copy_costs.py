"""CopyCosts: what copies of one direction cost on this machine, and which path is cheaper."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

_WORTHWHILE, _SURPRISING = 0.95, 0.8
"""SMs have better uses: by kernel a size has to take so much less time than by DMA. Large ones even
less, since DMA can hardly lose there: most likely something else took the machine's time."""
_LARGE = 128 << 10


class Division(NamedTuple):
    """How a batch is to be copied."""

    by_kernel: Bools | bool
    """Whether the kernel takes it, of each size or, if they go one way, of all. What it does not
    take goes by DMA."""
    seconds: float
    """How long all of it should take."""


class _Cheaper(NamedTuple):
    """Of some sizes, all arrays ``[k]``."""

    by_dma: Floats
    seconds: Floats
    """On the path that is cheaper."""
    by_kernel: Bools


class _Alike(NamedTuple):
    """The same of one size."""

    by_dma: float
    seconds: float
    by_kernel: bool


@dataclass(frozen=True, slots=True)
class CopyCosts:
    """By descriptor size (ascending, bytes), all arrays ``[k]``."""

    sizes: Floats
    dma: Floats
    """Seconds a descriptor by DMA."""
    kernel: Floats
    """Seconds a descriptor by kernel; infinite where there is none."""
    kernel_start: float = 0.0
    """Seconds that a batch pays once for having the kernel take part."""
    _known: dict[int, _Alike] = field(default_factory=dict, init=False, repr=False)
    """What has been worked out, by size: small copies have no time to do it again."""

    @property
    def by_kernel(self) -> Bools:
        """Which of the sizes the kernel copies, where there are enough."""
        return _is_worthwhile(self.sizes, self.dma, self.kernel)

    def by_kernel_at(self, size: int) -> bool:
        """Whether the kernel copies descriptors of ``size`` bytes, where there are enough."""
        return self._of_size(size).by_kernel

    def describe(self) -> str:
        """By size GB/s of the cheaper path, and whether that is the kernel's, in a line."""
        return ", ".join(
            f"{int(size) >> 10}K {size / (kernel if better else dma) / 1e9:.0f} GB/s"
            + (" by kernel" if better else "")
            for size, dma, kernel, better in zip(
                self.sizes, self.dma, self.kernel, self.by_kernel, strict=True
            )
        )

    def divide(self, sizes: npt.NDArray[np.int64], times: int = 1) -> Division:
        """How to copy descriptors of these sizes, each ``times`` over, quickest if equal ones lie
        together. Between measured sizes, and above, costs go by the bytes, at a pace interpolated
        by log size; below, a descriptor costs what the smallest one does.

        Each size goes one way. Shared out between both paths, which the bus limits together, it
        gained less than planning for both cost.
        """
        if not len(sizes):
            return Division(False, 0.0)
        (ends,) = (sizes[1:] != sizes[:-1]).nonzero()
        by_kernel: Bools | bool
        if len(ends):
            starts = [0, *(ends + 1).tolist()]
            counts = np.diff(starts, append=len(sizes))
            costs = self._of_sizes(sizes[starts].astype(np.float64))
            by_dma, seconds = float(costs.by_dma @ counts), float(costs.seconds @ counts)
            by_kernel = bool(costs.by_kernel[0])
            if (costs.by_kernel != by_kernel).any():
                by_kernel = np.repeat(costs.by_kernel, counts)
        else:
            alike = self._of_size(int(sizes[0]))
            by_dma, seconds = len(sizes) * alike.by_dma, len(sizes) * alike.seconds
            by_kernel = alike.by_kernel
        with_kernel = times * seconds + self.kernel_start
        if by_kernel is False or times * by_dma <= with_kernel:
            return Division(False, times * by_dma)
        return Division(by_kernel, with_kernel)

    def _of_size(self, size: int) -> _Alike:
        if (known := self._known.get(size)) is None:
            by_dma, seconds, by_kernel = self._of_sizes(np.array([size], np.float64))
            known = _Alike(float(by_dma[0]), float(seconds[0]), bool(by_kernel[0]))
            self._known[size] = known
        return known

    def _of_sizes(self, sizes: Floats) -> _Cheaper:
        by_dma = self._interpolate(sizes, self.dma)
        by_kernel = self._interpolate(sizes, self.kernel)
        better = _is_worthwhile(sizes, by_dma, by_kernel)
        return _Cheaper(by_dma, np.where(better, by_kernel, by_dma), better)

    def _interpolate(self, wanted: Floats, seconds: Floats) -> Floats:
        # Between rungs interpolate seconds a byte, which is flat where bandwidth is.
        pace: Floats = np.interp(np.log2(wanted), np.log2(self.sizes), seconds / self.sizes)
        floor: Floats = np.where(wanted < self.sizes[0], seconds[0], 0.0)
        total: Floats = np.maximum(pace * wanted, floor)
        return total


def _is_worthwhile(sizes: Floats, dma: Floats, kernel: Floats) -> Bools:
    """Of which sizes the kernel is the better choice, by the seconds that either takes."""
    better: Bools = kernel < dma * np.where(sizes < _LARGE, _WORTHWHILE, _SURPRISING)
    return better


Timer = Callable[[int, int, int], float]


class Path(NamedTuple):
    """How to find out what copies by one path cost."""

    count: Callable[[int], int]
    """How many descriptors of a size, in bytes, make a batch."""
    further: int
    """How many batches more than one are timed."""
    time: Timer
    """Copies so many (third argument) batches of so many (second) descriptors of a size
    (first), one behind the other, and returns the seconds that took."""


def measure_costs(sizes: list[int], dma: Path, kernel: Path | None) -> CopyCosts:
    """Costs at descriptor sizes ``sizes`` (bytes, ascending). ``kernel`` is None where there is
    none.

    A descriptor costs what further batches take: of large copies later parts are submitted
    while the device copies earlier ones, and the submission of the first weighs nothing.
    """

    def measure(path: Path) -> tuple[float, Floats]:
        """What a batch costs however small it is, and each size's cost of a descriptor."""
        descriptors = []
        for size in sizes:
            count = path.count(size)
            further = path.time(size, count, 1 + path.further) - path.time(size, count, 1)
            descriptors.append(max(further / path.further, 1e-9) / count)
        return path.time(sizes[0], 1, 1), np.array(descriptors)

    dma_start, by_dma = measure(dma)
    if kernel is None:
        return CopyCosts(np.array(sizes, np.float64), by_dma, np.full(len(sizes), math.inf))
    kernel_start, by_kernel = measure(kernel)
    start = max(0.0, kernel_start - dma_start)
    return CopyCosts(np.array(sizes, np.float64), by_dma, by_kernel, start)
