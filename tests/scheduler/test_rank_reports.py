"""TransferLedger: a transfer ends when every rank has reported it."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simple_offload.metadata import WorkerReport
from simple_offload.scheduler.rank_reports import Ended, TransferLedger


def report(*ended: int, failed: tuple[int, ...] = ()) -> WorkerReport:
    return WorkerReport(Counter(ended), Counter(failed))


def ids_of(ledger: TransferLedger) -> set[int]:
    """Transfers in flight."""
    return set(ledger._num_ranks_left)


def test_ids_only_grow() -> None:
    ledger = TransferLedger(1)
    seen = []
    for _ in range(5):
        seen.append(ledger.begin())
        ledger.on_report(report(seen[-1]))
        seen.append(ledger.begin())
    assert seen == sorted(set(seen))


@pytest.mark.proves("I1")
def test_every_rank_has_to_report() -> None:
    ledger = TransferLedger(3)
    first, second = ledger.begin(), ledger.begin()
    assert ids_of(ledger) == {first, second}
    assert ledger.on_report(report(first)) == []
    assert ledger.on_report(report(second, second)) == []
    assert ledger.on_report(report(first, second)) == [Ended(second, ok=True)]
    assert ids_of(ledger) == {first}
    assert ledger.on_report(report(first)) == [Ended(first, ok=True)]
    assert ids_of(ledger) == set()


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_one_failing_rank_is_enough(failing: int) -> None:
    ledger = TransferLedger(3)
    for expected in (False, True):  # the next transfer is not affected
        transfer = ledger.begin()
        ended: list[Ended] = []
        for rank in range(3):
            fails = (transfer,) if rank == failing and not expected else ()
            assert ended == []
            ended = ledger.on_report(report(transfer, failed=fails))
        assert ended == [Ended(transfer, ok=expected)]


@given(st.data())
def test_any_order_of_reports(data: Any) -> None:
    num_ranks = data.draw(st.integers(1, 4))
    ledger = TransferLedger(num_ranks)
    ids = [ledger.begin() for _ in range(data.draw(st.integers(1, 4)))]
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
        assert ledger.on_report(report(*batch_ids, failed=fails)) == expected
        assert ids_of(ledger) == {id for id in ids if left[id] > 0}
    assert ledger._failed == set()


def test_unknown_transfers_are_logged_and_ignored(caplog: pytest.LogCaptureFixture) -> None:
    ledger = TransferLedger(1)
    assert ledger.on_report(report(0, 7, failed=(0,))) == []
    assert [record.levelname for record in caplog.records] == ["ERROR", "ERROR"]
    assert "transfer 0" in caplog.text
    assert "transfer 7" in caplog.text
    first = ledger.begin()
    assert first == 0  # failed before its begin, which must not count
    assert ledger.on_report(report(first)) == [Ended(first, ok=True)]
    assert ledger.on_report(report(first)) == []
    assert "transfer 0" in caplog.records[-1].getMessage()
    assert len(caplog.records) == 3
