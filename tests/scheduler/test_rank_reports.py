"""TransferLedger: a transfer ends when every rank has reported it."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simple_offload.metadata import WorkerReport
from simple_offload.scheduler.rank_reports import Ended, TransferLedger


def report(*ended: int, failed: tuple[int, ...] = ()) -> WorkerReport:
    return WorkerReport(Counter(ended), Counter(failed))


@pytest.mark.proves("I1")
@given(st.data())
def test_every_rank_has_to_report(data: st.DataObject) -> None:
    """In any order. One rank that fails is enough for a failure."""
    num_ranks = data.draw(st.integers(1, 4))
    ledger = TransferLedger(num_ranks)
    ids = [ledger.begin() for _ in range(data.draw(st.integers(1, 4)))]
    assert ids == list(range(len(ids)))
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
        assert set(ledger._num_ranks_left) == {id for id in ids if left[id] > 0}
    assert ledger.begin() == len(ids)
    assert ledger.on_report(report(*[len(ids)] * num_ranks)) == [Ended(len(ids), ok=True)]


def test_unknown_transfers_are_logged_and_ignored(caplog: pytest.LogCaptureFixture) -> None:
    ledger = TransferLedger(1)
    assert ledger.on_report(report(0, 7, failed=(0,))) == []
    assert caplog.messages == [
        f"A rank reported transfer {transfer_id}, which is not in flight" for transfer_id in (0, 7)
    ]
    first = ledger.begin()
    assert first == 0  # failed before its begin, which must not count
    assert ledger.on_report(report(first)) == [Ended(first, ok=True)]
    assert ledger.on_report(report(first)) == []
    assert len(caplog.messages) == 3
