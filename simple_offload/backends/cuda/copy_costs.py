"""CopyCosts: what copies of one direction cost on this GPU, and which path is cheaper."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

_WORTHWHILE, _SURPRISING = 0.95, 0.8
"""The kernel must beat DMA by this factor to be chosen, since it takes SMs from compute. For large
copies by more: DMA hardly loses there, so a win of the kernel is likely noise."""
_LARGE = 128 << 10


class PathChoice(NamedTuple):
    """The path of each descriptor of a batch, and the batch's cost."""

    by_kernel: Bools | bool
    """Per size, True where the kernel copies; one bool if all sizes go the same way. DMA copies
    the others."""
    seconds: float
    """Expected time of the whole batch."""


class _Costs(NamedTuple):
    """Costs of one descriptor of each of k sizes, all arrays ``[k]``."""

    by_dma: Floats
    seconds: Floats
    """On the chosen path."""
    by_kernel: Bools


class _Cost(NamedTuple):
    """Costs of one descriptor of one size."""

    by_dma: float
    seconds: float
    by_kernel: bool


@dataclass(frozen=True, slots=True)
class CopyCosts:
    """Costs measured at k descriptor sizes, all arrays ``[k]``."""

    sizes: Floats
    """Ascending, in bytes."""
    dma: Floats
    """Seconds per descriptor by DMA."""
    kernel: Floats
    """Seconds per descriptor by kernel; infinite where there is none."""
    kernel_start: float = 0.0
    """Seconds once per batch in which the kernel copies."""
    _cache: dict[int, _Cost] = field(default_factory=dict, init=False, repr=False)
    """By size, since interpolation takes too long for small copies."""

    @property
    def by_kernel(self) -> Bools:
        """The sizes that the kernel copies if a batch has enough of them."""
        return _is_worthwhile(self.sizes, self.dma, self.kernel)

    def is_by_kernel(self, size: int) -> bool:
        """Whether the kernel copies descriptors of ``size`` bytes if a batch has enough of them."""
        return self._cost_at(size).by_kernel

    def describe(self) -> str:
        """One line: per size, GB/s of the cheaper path, and whether that is the kernel."""
        return ", ".join(
            f"{int(size) >> 10}K {size / (kernel if better else dma) / 1e9:.0f} GB/s"
            + (" by kernel" if better else "")
            for size, dma, kernel, better in zip(
                self.sizes, self.dma, self.kernel, self.by_kernel, strict=True
            )
        )

    def choose(self, sizes: npt.NDArray[np.int64], times: int = 1) -> PathChoice:
        """Choose the path of descriptors of these ``sizes``, each ``times`` over. Quickest if equal
        sizes are neighbours.

        Between measured sizes, and above them, the seconds per byte are interpolated by the log of
        the size. Below them a descriptor costs as much as the smallest one.

        All descriptors of a size take the same path. The bus limits both paths together, and
        sharing a size between them gained less than its planning cost.
        """
        if not len(sizes):
            return PathChoice(False, 0.0)
        (ends,) = (sizes[1:] != sizes[:-1]).nonzero()
        by_kernel: Bools | bool
        if len(ends):
            starts = [0, *(ends + 1).tolist()]
            counts = np.diff(starts, append=len(sizes))
            costs = self._costs_at(sizes[starts].astype(np.float64))
            by_dma, seconds = float(costs.by_dma @ counts), float(costs.seconds @ counts)
            by_kernel = bool(costs.by_kernel[0])
            if (costs.by_kernel != by_kernel).any():
                by_kernel = np.repeat(costs.by_kernel, counts)
        else:
            cost = self._cost_at(int(sizes[0]))
            by_dma, seconds = len(sizes) * cost.by_dma, len(sizes) * cost.seconds
            by_kernel = cost.by_kernel
        with_kernel = times * seconds + self.kernel_start
        if by_kernel is False or times * by_dma <= with_kernel:
            return PathChoice(False, times * by_dma)
        return PathChoice(by_kernel, with_kernel)

    def _cost_at(self, size: int) -> _Cost:
        if (cost := self._cache.get(size)) is None:
            by_dma, seconds, by_kernel = self._costs_at(np.array([size], np.float64))
            cost = _Cost(float(by_dma[0]), float(seconds[0]), bool(by_kernel[0]))
            self._cache[size] = cost
        return cost

    def _costs_at(self, sizes: Floats) -> _Costs:
        by_dma = self._interpolate(sizes, self.dma)
        by_kernel = self._interpolate(sizes, self.kernel)
        better = _is_worthwhile(sizes, by_dma, by_kernel)
        return _Costs(by_dma, np.where(better, by_kernel, by_dma), better)

    def _interpolate(self, wanted: Floats, seconds: Floats) -> Floats:
        # Seconds per byte are flat where the bandwidth is.
        pace: Floats = np.interp(np.log2(wanted), np.log2(self.sizes), seconds / self.sizes)
        floor: Floats = np.where(wanted < self.sizes[0], seconds[0], 0.0)
        total: Floats = np.maximum(pace * wanted, floor)
        return total


def _is_worthwhile(sizes: Floats, dma: Floats, kernel: Floats) -> Bools:
    """Per size, whether to prefer the kernel, given the seconds of both paths."""
    better: Bools = kernel < dma * np.where(sizes < _LARGE, _WORTHWHILE, _SURPRISING)
    return better


Timer = Callable[[int, int, int], float]


class Path(NamedTuple):
    """How to measure the costs of one path."""

    count: Callable[[int], int]
    """Descriptors in a batch, given their size in bytes."""
    further: int
    """Batches to time after the first."""
    time: Timer
    """``time(size, count, batches)`` copies ``batches`` batches of ``count`` descriptors of
    ``size`` bytes, one after another, and returns the seconds."""


def measure_costs(sizes: list[int], dma: Path, kernel: Path | None) -> CopyCosts:
    """Measure the costs at ``sizes`` (bytes, ascending). ``kernel`` is None where there is none.

    The cost of a descriptor is taken from the batches after the first: in a large copy the device
    copies one batch while the next is submitted, and the first submission does not count.
    """

    def measure(path: Path) -> tuple[float, Floats]:
        """Seconds of the smallest batch, and per size the seconds of a descriptor."""
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
