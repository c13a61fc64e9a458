"""Messages between the scheduler's process and the workers'."""

from collections import Counter

from simple_offload.metadata import RankCapacity, WorkerReport


def test_aggregated_reports_count_ranks_and_keep_open_blocks() -> None:
    first, other = RankCapacity("x", 9, 4, 64), RankCapacity("y", 9, 5, 64)
    one = WorkerReport(Counter([0, 1]), Counter([1]), capacities={"x": first})
    two = WorkerReport(Counter([1, 2]), Counter([1]), True, {"y": other})
    both = WorkerReport(
        Counter({0: 1, 1: 2, 2: 1}), Counter({1: 2}), True, {"x": first, "y": other}
    )
    assert one.aggregate(two) == two.aggregate(one) == both
    assert one == WorkerReport(Counter([0, 1]), Counter([1]), capacities={"x": first})
