"""CopyCosts: the cheaper path and its time, from measurements."""

import math
from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simple_offload.backends.cuda.copy_costs import CopyCosts, Path, measure_costs

SIZES = [4096, 16384, 65536]
BANDWIDTH = 50e9  # bytes a second
START, LAUNCH = 5e-6, 20e-6
"""Minimum time of a batch in seconds, by DMA and by kernel."""


class Machine:
    """A device. A DMA batch takes ``START`` seconds and, for each descriptor, the larger of a
    microsecond and the time of its bytes. A kernel batch takes ``LAUNCH`` seconds and the time of
    its bytes. The bus limits both."""

    def __init__(self) -> None:
        self.timed: Counter[tuple[str, int, int]] = Counter()

    def time_dma(self, size: int, count: int, batches: int) -> float:
        self.timed["dma", size, count] += batches
        return START + batches * count * max(1e-6, size / BANDWIDTH)

    def time_kernel(self, size: int, count: int, batches: int) -> float:
        self.timed["kernel", size, count] += batches
        return LAUNCH + batches * count * size / BANDWIDTH

    def measure(self, kernel: bool = True) -> CopyCosts:
        by_kernel = Path(lambda _: 500, 2, self.time_kernel)
        by_dma = Path(lambda _: 1000, 7, self.time_dma)
        return measure_costs(SIZES, by_dma, by_kernel if kernel else None)


def choose(costs: CopyCosts, sizes: npt.NDArray[np.int64], times: int = 1) -> tuple[Any, Any]:
    """Whether the kernel copies, and the seconds."""
    choice = costs.choose(sizes, times)
    return choice.by_kernel, choice.seconds


def many(size: int, count: int) -> npt.NDArray[np.int64]:
    return np.full(count, size, np.int64)


# Measuring


def test_each_size_is_timed_both_ways() -> None:
    machine = Machine()
    costs = machine.measure()
    # The start of each path is timed too.
    assert set(machine.timed) == {
        (path, size, count)
        for path, batch in (("dma", 1000), ("kernel", 500))
        for size, count in ((SIZES[0], 1), *((size, batch) for size in SIZES))
    }
    # A batch, and the further ones behind another.
    assert machine.timed["dma", SIZES[1], 1000] == 1 + (1 + 7)
    assert machine.timed["kernel", SIZES[1], 500] == 1 + (1 + 2)
    assert costs.sizes.tolist() == SIZES
    assert costs.dma.tolist() == pytest.approx([1e-6, 1e-6, 65536 / BANDWIDTH])
    assert costs.kernel.tolist() == pytest.approx([size / BANDWIDTH for size in SIZES])
    # A launch is paid once. Both starts were timed with one descriptor.
    assert costs.kernel_start == pytest.approx(LAUNCH + 4096 / BANDWIDTH - (START + 1e-6))


def test_without_a_kernel_all_goes_by_dma() -> None:
    machine = Machine()
    costs = machine.measure(kernel=False)
    assert {path for path, _, _ in machine.timed} == {"dma"}
    assert not costs.by_kernel.any()
    assert costs.kernel_start == 0.0
    assert choose(costs, many(4096, 5000)) == (False, pytest.approx(5000 * 1e-6))


@pytest.mark.parametrize(
    ("size", "slower", "worthwhile"),
    [
        (4096, 0.96, False),
        (4096, 0.94, True),
        (131072, 0.94, False),  # something else took the time that DMA seemed to take
        (131072, 0.79, True),
    ],
)
def test_the_kernel_has_to_be_worth_its_sms(size: int, slower: float, worthwhile: bool) -> None:
    costs = measure_costs(
        [size],
        Path(lambda _: 100, 3, lambda size, count, batches: batches * count * 1e-6),
        Path(lambda _: 100, 3, lambda size, count, batches: slower * batches * count * 1e-6),
    )
    assert costs.by_kernel.tolist() == [worthwhile]
    seconds = pytest.approx(1e-3 * (slower if worthwhile else 1))
    assert choose(costs, many(size, 1000)) == (worthwhile, seconds)


def test_a_time_below_resolution_is_not_zero() -> None:
    """With zero seconds, a copy would end at once, and no path would be cheaper than the other."""
    costs = measure_costs([4096], *[Path(lambda _: 10, 3, lambda *_: 1e-3)] * 2)
    assert costs.dma[0] > 0
    assert costs.kernel[0] > 0
    assert costs.choose(many(4096, 5)).seconds > 0


# Choosing


def test_path_of_many_descriptors_of_a_size() -> None:
    """Sizes between and beyond the measured ones get a path too."""
    costs = Machine().measure()
    assert costs.by_kernel.tolist() == [True, True, False]
    for size in (1024, 4096, 16384, 20000, 40000, 65536, 1 << 20):
        assert costs.choose(many(size, 100_000)).by_kernel is costs.is_by_kernel(size)
    assert costs.is_by_kernel(1024)
    assert not costs.is_by_kernel(1 << 20)


def test_a_few_descriptors_go_by_dma_and_many_small_ones_by_kernel() -> None:
    """The turning point is where both cost the same. Regions start the kernel together."""
    costs = Machine().measure()
    assert choose(costs, many(4096, 0)) == (False, 0.0)
    assert choose(costs, many(4096, 5)) == (False, pytest.approx(5e-6))
    by_kernel = pytest.approx(5000 * costs.kernel[0] + costs.kernel_start)
    assert choose(costs, many(4096, 5000)) == (True, by_kernel)
    assert choose(costs, many(4096, 5), 1000) == (True, by_kernel)
    by_dma = pytest.approx(costs.choose(many(1 << 20, 5000)).seconds)
    assert choose(costs, many(1 << 20, 5), 1000) == (False, by_dma)
    turn = costs.kernel_start / (costs.dma[0] - costs.kernel[0])
    assert costs.choose(many(4096, int(turn))).by_kernel is False
    assert costs.choose(many(4096, int(turn) + 1)).by_kernel is True


def test_in_a_mixed_batch_each_size_goes_its_way() -> None:
    """Sizes that all go one way share one bool. It spares the copy a split by size."""
    costs = Machine().measure()
    sizes = np.concatenate((many(65536, 300), many(4096, 5000)))
    for order in (sizes, sizes[::-1], np.random.default_rng(1).permutation(sizes)):
        assert np.array_equal(costs.choose(order).by_kernel, order == 4096)
    small = np.concatenate((many(4096, 3000), many(16384, 3000)))
    large = np.concatenate((many(65536, 3000), many(1 << 20, 3000)))
    assert costs.choose(small).by_kernel is True
    assert costs.choose(large).by_kernel is False


COSTS = st.builds(
    lambda dma, kernel, start: CopyCosts(
        np.array(SIZES, np.float64), np.array(dma), np.array(kernel), start
    ),
    st.tuples(*[st.floats(1e-7, 1e-3)] * 3),
    st.tuples(*[st.floats(1e-7, 1e-3) | st.just(math.inf)] * 3),
    st.floats(0.0, 1e-3),
)
"""Possible measurements."""


@given(COSTS, st.lists(st.integers(1, 1 << 21), min_size=1, max_size=50))
def test_the_cheaper_way_is_taken(costs: CopyCosts, sizes: list[int]) -> None:
    """More descriptors never take less time. The cost never exceeds that of DMA for all."""
    wanted = np.array(sizes, np.int64)
    choices = [costs.choose(wanted[:count]) for count in range(1, len(sizes) + 1)]
    assert all(
        later.seconds >= earlier.seconds * (1 - 1e-9) for earlier, later in pairwise(choices)
    )
    by_dma = CopyCosts(costs.sizes, costs.dma, np.full(3, math.inf)).choose(wanted)
    assert by_dma.by_kernel is False
    assert choices[-1].seconds <= by_dma.seconds * (1 + 1e-9)
    if choices[-1].by_kernel is not False:
        assert np.any(choices[-1].by_kernel)
        assert choices[-1].seconds < by_dma.seconds


def test_costs_of_any_size() -> None:
    costs = Machine().measure(kernel=False)
    pace = (costs.dma[1] / SIZES[1] + costs.dma[2] / SIZES[2]) / 2
    expected = {
        1: costs.dma[0],  # below the smallest size: a descriptor's own cost
        **dict(zip(SIZES, costs.dma, strict=True)),
        32768: 32768 * pace,  # seconds per byte change with the log of the size
        16 * 65536: 16 * costs.dma[-1],  # above the largest size the bytes decide
    }
    for size, seconds in expected.items():
        assert costs.choose(many(size, 1)).seconds == pytest.approx(seconds)
