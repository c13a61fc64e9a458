"""Messages between the scheduler's process and the workers'."""

import pickle
from collections import Counter
from collections.abc import Sequence
from dataclasses import FrozenInstanceError
from functools import reduce

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simple_offload.metadata import RankCapacity, StepMetadata, Transfer, WorkerReport

REPORTS = st.builds(
    lambda ended, failed, broken, capacities: WorkerReport(
        Counter(ended),
        Counter(transfer for transfer in failed if transfer in ended),
        broken,
        capacities,
    ),
    st.lists(st.integers(0, 5), unique=True),
    st.sets(st.integers(0, 5)),
    st.booleans(),
    st.dictionaries(
        st.sampled_from("xyz"),
        st.builds(RankCapacity, st.just("x"), st.just(9), st.integers(1, 9), st.just(64)),
        max_size=1,
    ),
)
"""Valid reports of one rank: a transfer ends once, and only an ended transfer has failed."""


@pytest.mark.parametrize(("device", "host"), [([3, 1, 2], (9, 8, 7)), ([], [])])
def test_pairing(device: list[int], host: Sequence[int]) -> None:
    transfer = Transfer.pairing(7, device, host, "a")
    assert (transfer.id, transfer.request_id) == (7, "a")
    for paired, wanted in ((transfer.device_blocks, device), (transfer.host_blocks, host)):
        assert paired.tolist() == list(wanted)
        assert paired.dtype == np.int64
        assert paired.flags.writeable  # torch warns of memory that it may not write to
    with pytest.raises(FrozenInstanceError):
        transfer.id = 2  # type: ignore[misc]


@pytest.mark.parametrize(("device", "host"), [([1, 2], [1]), ([], [1]), ([1], [])])
def test_unequal_lists_do_not_pair(device: list[int], host: list[int]) -> None:
    with pytest.raises(ValueError, match=f"{len(device)} device blocks .* {len(host)} host"):
        Transfer.pairing(1, device, host)


def test_everything_crosses_a_process_boundary() -> None:
    step = StepMetadata(
        [Transfer.pairing(1, [3, 4], [5, 6], "a", after_compute=False)],
        [Transfer.pairing(2, [7], [8])],
        admitted=[0],
        computes=True,
        num_host_blocks=9,
    )
    there = pickle.loads(pickle.dumps(step))
    assert isinstance(there, StepMetadata)
    (load,), (store,) = there.loads, there.stores
    assert (there.admitted, there.computes, there.num_host_blocks) == ([0], True, 9)
    assert (load.id, load.request_id, load.after_compute) == (1, "a", False)
    assert load.device_blocks.tolist() == [3, 4]
    assert load.host_blocks.tolist() == [5, 6]
    assert (store.id, store.request_id, store.after_compute) == (2, None, True)
    assert store.host_blocks.dtype == np.int64

    capacity = RankCapacity("x", num_host_blocks=10, num_open=4, block_bytes=4096)
    assert pickle.loads(pickle.dumps(capacity)) == capacity
    report = WorkerReport(Counter({1: 1}), Counter({1: 1}), True, {"x": capacity})
    assert pickle.loads(pickle.dumps(report)) == report


@given(st.lists(REPORTS, min_size=1, max_size=4))
def test_aggregated_reports_count_ranks_and_keep_open_blocks(reports: list[WorkerReport]) -> None:
    before = pickle.dumps(reports)
    combined = reduce(WorkerReport.aggregate, reports, WorkerReport())
    for transfer in range(6):
        assert combined.ended[transfer] == sum(transfer in report.ended for report in reports)
        assert combined.failed[transfer] == sum(transfer in report.failed for report in reports)
    assert combined.broken == any(report.broken for report in reports)
    last = {rank: each for report in reports for rank, each in report.capacities.items()}
    assert combined.capacities == last
    combined.ended[99] += 1
    combined.capacities["other"] = RankCapacity("other", 1, 1, 64)
    assert pickle.loads(before) == reports
