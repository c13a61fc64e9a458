"""InFlight: a transfer ends when every rank has reported it."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simple_offload.metadata import WorkerReport
from simple_offload.scheduler.rank_reports import Ended, InFlight


def report(*ended: int, failed: tuple[int, ...] = ()) -> WorkerReport:
    return WorkerReport(Counter(ended), Counter(failed))


def test_ids_only_grow() -> None:
    in_flight = InFlight(1)
    seen = []
    for _ in range(5):
        seen.append(in_flight.begin())
        in_flight.end(report(seen[-1]))
        seen.append(in_flight.begin())
    assert seen == sorted(set(seen))


@pytest.mark.proves("I1")
def test_every_rank_has_to_report() -> None:
    in_flight = InFlight(3)
    first, second = in_flight.begin(), in_flight.begin()
    assert (len(in_flight), set(in_flight.ids)) == (2, {first, second})
    assert in_flight.end(report(first)) == []
    assert in_flight.end(report(second, second)) == []
    assert in_flight.end(report(first, second)) == [Ended(second, ok=True)]
    assert (len(in_flight), set(in_flight.ids)) == (1, {first})
    assert in_flight.end(report(first)) == [Ended(first, ok=True)]
    assert (len(in_flight), set(in_flight.ids)) == (0, set())


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_one_failing_rank_is_enough(failing: int) -> None:
    in_flight = InFlight(3)
    for expected in (False, True):  # the next transfer has nothing to do with it
        transfer = in_flight.begin()
        ended: list[Ended] = []
        for rank in range(3):
            fails = (transfer,) if rank == failing and not expected else ()
            assert ended == []
            ended = in_flight.end(report(transfer, failed=fails))
        assert ended == [Ended(transfer, ok=expected)]


@given(st.data())
def test_any_order_of_reports(data: Any) -> None:
    num_ranks = data.draw(st.integers(1, 4))
    in_flight = InFlight(num_ranks)
    ids = [in_flight.begin() for _ in range(data.draw(st.integers(1, 4)))]
    events = data.draw(st.permutations([(id, rank) for id in ids for rank in range(num_ranks)]))
    failing = data.draw(st.sets(st.sampled_from(events)))
    left = Counter(dict.fromkeys(ids, num_ranks))
    failed: set[int] = set()
    while events:
        count = data.draw(st.integers(1, len(events)))
        batch, events = events[:count], events[count:]
        fails = tuple(event[0] for event in batch if event in failing)
        failed.update(fails)
        batch_ids = tuple(event[0] for event in batch)
        left.subtract(batch_ids)
        over = sorted(id for id in set(batch_ids) if left[id] == 0)
        expected = [Ended(id, ok=id not in failed) for id in over]
        assert in_flight.end(report(*batch_ids, failed=fails)) == expected
        assert in_flight.ids == {id for id in ids if left[id] > 0}
    assert in_flight._failed == set()


def test_unknown_transfers_are_logged_and_forgotten(caplog: pytest.LogCaptureFixture) -> None:
    in_flight = InFlight(1)
    assert in_flight.end(report(0, 7, failed=(0,))) == []
    assert [record.levelname for record in caplog.records] == ["ERROR", "ERROR"]
    assert "transfer 0" in caplog.text
    assert "transfer 7" in caplog.text
    first = in_flight.begin()
    assert first == 0  # failed before it began, which must not count
    assert in_flight.end(report(first)) == [Ended(first, ok=True)]
    assert in_flight.end(report(first)) == []
    assert "transfer 0" in caplog.records[-1].getMessage()
    assert len(caplog.records) == 3
