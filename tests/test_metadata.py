"""Messages between the scheduler's process and the workers'."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest

from simple_offload.metadata import RankCapacity, Transfer, WorkerReport


@pytest.mark.parametrize(("device", "host"), [([3, 1, 2], (9, 8, 7)), ([], [])])
def test_pairing(device: list[int], host: Sequence[int]) -> None:
    transfer = Transfer.pairing(7, device, host, "a")
    assert (transfer.id, transfer.request_id) == (7, "a")
    for paired, wanted in ((transfer.device_blocks, device), (transfer.host_blocks, host)):
        assert paired.tolist() == list(wanted)
        assert paired.dtype == np.int64
        assert paired.flags.writeable  # torch warns of memory that it may not write to


@pytest.mark.parametrize(("device", "host"), [([1, 2], [1]), ([], [1]), ([1], [])])
def test_unequal_lists_do_not_pair(device: list[int], host: list[int]) -> None:
    with pytest.raises(ValueError, match=f"{len(device)} device blocks .* {len(host)} host"):
        Transfer.pairing(1, device, host)


def test_aggregated_reports_count_ranks_and_keep_open_blocks() -> None:
    first, other = RankCapacity("x", 9, 4, 64), RankCapacity("y", 9, 5, 64)
    one = WorkerReport(Counter([0, 1]), Counter([1]), capacities={"x": first})
    two = WorkerReport(Counter([1, 2]), Counter([1]), True, {"y": other})
    both = WorkerReport(
        Counter({0: 1, 1: 2, 2: 1}), Counter({1: 2}), True, {"x": first, "y": other}
    )
    assert one.aggregate(two) == two.aggregate(one) == both
    assert one == WorkerReport(Counter([0, 1]), Counter([1]), capacities={"x": first})
