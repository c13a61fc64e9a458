"""CopyCosts: the cheaper path and its time, from measurements."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simple_offload.backends.cuda.copy_costs import CopyCosts, PathCost, measure_costs, sizes_from
from simple_offload.backends.descriptors import Extents

KIB, MIB = 1 << 10, 1 << 20
BANDWIDTH = 50e9  # bytes a second
START, LAUNCH = 5e-6, 20e-6
"""Minimum time of a batch in seconds, by DMA and by kernel."""


class Machine:
    """A device. A DMA batch takes ``START`` seconds and, for each descriptor, the larger of a
    microsecond and the time of its bytes. A kernel batch takes ``LAUNCH`` seconds and ``slower``
    times the time of its bytes."""

    def __init__(self, slower: float = 1.0) -> None:
        self.slower = slower
        self.timed: set[str] = set()

    def time(self, size: int, count: int, batches: int, by_kernel: bool) -> float:
        self.timed.add("kernel" if by_kernel else "dma")
        num_bytes = batches * count * size
        if by_kernel:
            return LAUNCH + self.slower * num_bytes / BANDWIDTH
        return START + max(batches * count * 1e-6, num_bytes / BANDWIDTH)

    def measure(self, *sizes: int, has_kernel: bool = True) -> CopyCosts:
        return measure_costs(sizes or sizes_from(4 * KIB), self.time, has_kernel=has_kernel)


def choose(costs: CopyCosts, page: int, *lengths: int, times: int = 1) -> Any:
    """The ``PathChoice`` for extents of these lengths, in pages."""
    array = np.array(lengths, np.int64)
    return costs.choose(Extents(array, array, array), sum(lengths), page, times)


# Measuring


@pytest.mark.parametrize(
    ("smallest_page", "first", "last"),
    [(512, 4, 256), (4 << 10, 4, 256), (8 << 10, 8, 256), (9000, 8, 256), (256 << 10, 256, 256)],
)
def test_sizes_that_occur_are_measured(smallest_page: int, first: int, last: int) -> None:
    sizes = sizes_from(smallest_page)
    assert (sizes[0], sizes[-1]) == (first * KIB, last * KIB)
    assert all(later == 2 * earlier for earlier, later in pairwise(sizes))


def test_costs_are_those_of_the_machine() -> None:
    costs = Machine().measure(4 * KIB, 8 * KIB)
    # In a large tier small DMA takes longer than here.
    assert costs.dma == pytest.approx((1.15e-6, 1.15e-6 / (8 * KIB)))
    assert costs.kernel == pytest.approx((4 * KIB / BANDWIDTH, 1 / BANDWIDTH))
    # A launch is paid once. Both starts were timed with one descriptor.
    assert costs.kernel_start == pytest.approx(LAUNCH + 4 * KIB / BANDWIDTH - (START + 1e-6))


def test_without_a_kernel_all_goes_by_dma() -> None:
    machine = Machine()
    costs = machine.measure(has_kernel=False)
    assert machine.timed == {"dma"}
    assert (costs.crossing, costs.kernel_start) == (0, 0.0)
    assert costs.describe() == "all by DMA at 50 GB/s"
    assert choose(costs, 4 * KIB, *[1] * 5000) == (False, pytest.approx(5000 * 1.15e-6))


@pytest.mark.parametrize(
    ("size", "slower", "worthwhile"),
    [
        (32, 1.0, True),
        (32, 1.2, False),
        (128, 0.9, False),  # something else took the time that DMA seemed to take
        (128, 0.7, True),
    ],
)
def test_the_kernel_has_to_be_worth_its_sms(size: int, slower: float, worthwhile: bool) -> None:
    slower *= max(1.0, 1e-6 * BANDWIDTH / (size * KIB))  # than DMA of this size
    costs = Machine(slower).measure(size * KIB)
    assert costs.crossing == (2 * size * KIB if worthwhile else 0)


def test_a_time_below_resolution_is_not_zero() -> None:
    """With zero seconds, a copy would end at once, and no path would be cheaper than the other."""
    costs = measure_costs([4096], lambda *_: 1e-3, has_kernel=True)
    assert min(*costs.dma, *costs.kernel) > 0


def test_one_size_divides_the_paths() -> None:
    """The kernel has to win at all smaller ones: a win at a larger one is noise."""
    costs = Machine().measure()
    assert costs.crossing == 64 * KIB
    assert costs.describe() == "below 64K by kernel at 50 GB/s, others by DMA at 50 GB/s"

    def time(size: int, count: int, batches: int, by_kernel: bool) -> float:
        lost = {16 * KIB: 3e-6}
        return batches * count * (lost.get(size, 1e-7) if by_kernel else 1e-6)

    assert measure_costs(sizes_from(4 * KIB), time, has_kernel=True).crossing == 16 * KIB


# Choosing


def test_a_few_descriptors_go_by_dma_and_many_small_ones_by_kernel() -> None:
    """The turning point is where both cost the same. Regions start the kernel together."""
    costs = Machine().measure()
    assert choose(costs, 4 * KIB) == (False, 0.0)
    assert choose(costs, 4 * KIB, 1, 1, 1) == (False, pytest.approx(3 * 1.15e-6))
    by_kernel = pytest.approx(5000 * costs.kernel.per_descriptor + costs.kernel_start)
    assert choose(costs, 4 * KIB, *[1] * 5000) == (True, by_kernel)
    assert choose(costs, 4 * KIB, *[1] * 5, times=1000) == (True, by_kernel)
    by_dma = pytest.approx(5000 * MIB / BANDWIDTH)
    assert choose(costs, MIB, *[1] * 5, times=1000) == (False, by_dma)
    turn = costs.kernel_start / (costs.dma.per_descriptor - costs.kernel.per_descriptor)
    assert choose(costs, 4 * KIB, *[1] * int(turn)).by_kernel is False
    assert choose(costs, 4 * KIB, *[1] * (int(turn) + 1)).by_kernel is True


COST = st.builds(PathCost, st.floats(1e-7, 1e-3), st.floats(1e-12, 1e-8))
COSTS = st.builds(CopyCosts, st.sampled_from([0, 4096, 1 << 16]), COST, COST, st.floats(0.0, 1e-3))
"""Possible measurements."""


@given(COSTS, st.integers(1, 1 << 17), st.lists(st.integers(1, 16), min_size=1, max_size=50))
def test_the_cheaper_way_is_taken(costs: CopyCosts, page: int, lengths: list[int]) -> None:
    """More descriptors never take less time. The cost never exceeds that of DMA for all."""
    choices = [choose(costs, page, *lengths[:count]) for count in range(1, len(lengths) + 1)]
    assert all(
        later.seconds >= earlier.seconds * (1 - 1e-9) for earlier, later in pairwise(choices)
    )
    by_dma = choose(costs._replace(crossing=0), page, *lengths)
    assert by_dma.by_kernel is False
    assert choices[-1].seconds <= by_dma.seconds
    if choices[-1].by_kernel is not False:
        by_kernel = np.broadcast_to(choices[-1].by_kernel, len(lengths)).tolist()
        assert by_kernel == [page * length < costs.crossing for length in lengths]
        assert choices[-1].seconds < by_dma.seconds
