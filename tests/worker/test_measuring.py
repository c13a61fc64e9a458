"""The duration of a copy, its wait, and the worker's stats."""

import threading
from types import SimpleNamespace

import pytest

from simple_offload import metrics
from simple_offload.backends.base import Direction, Measurement
from simple_offload.metadata import StepMetadata
from simple_offload.worker import copy_lane
from simple_offload.worker.copy_lane import CopyStats
from tests.worker.rank import Rank, drain_stats, load
from tests.worker.scripted import Bench, EndsWhenWaitedFor, ScriptedError

pytestmark = pytest.mark.usefixtures("no_thread_left", "machine")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock that stands still unless the test moves it."""
    clock = SimpleNamespace(now=10.0)
    monkeypatch.setattr(copy_lane, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


class MeasuredPending(EndsWhenWaitedFor):
    """A copy that the device has timed."""

    def __init__(self, result: Measurement | Exception) -> None:
        super().__init__()
        self.result = result

    def measure(self) -> Measurement:
        assert self.ended.is_set(), "measured before the copy has ended"
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


@pytest.mark.parametrize("drained", [False, True])
@pytest.mark.parametrize(
    ("result", "stats"),
    [
        (None, CopyStats(2.0, 3.0, {})),
        (Measurement(1.5, {"dma": 100}), CopyStats(1.5, 3.5, {"dma": 100})),
        (Measurement(None, {"batch": 100}), CopyStats(2.0, 3.0, {"batch": 100})),
        (ScriptedError("no such event"), CopyStats(2.0, 3.0, {})),
    ],
    ids=["seen by poll", "timed by the device", "a path without a time", "cannot be measured"],
)
def test_a_copy_is_measured(
    bench: Bench,
    clock: SimpleNamespace,
    result: Measurement | Exception | None,
    stats: CopyStats,
    drained: bool,
) -> None:
    """It is submitted at 10, begins at 13, and is seen to have ended at 15."""
    pending = EndsWhenWaitedFor() if result is None else MeasuredPending(result)
    for number in (1, 2):
        bench.backend.gates[number] = threading.Event()
    bench.backend.pendings[2] = pending
    bench.submit(1, 2)
    bench.backend.wait_started(1)
    clock.now = 13
    bench.backend.gates[1].set()
    bench.backend.wait_started(2)
    bench.backend.gates[2].set()
    bench.lane.flush()
    clock.now = 15
    if drained:
        bench.lane.drain()
    pending.ended.set()
    completion = bench.lane.poll()[-1]
    assert (completion.error, completion.stats) == (None, stats)


# The worker's stats


def test_paths_are_counted_apart(rank: Rank) -> None:
    pending = MeasuredPending(Measurement(0.5, {"dma": 1000, "kernel": 500}))
    rank.backend.pendings[0] = pending
    pending.ended.set()
    rank.step(StepMetadata([load(0, "r")]))
    ledger = drain_stats(rank.worker)
    assert ledger(metrics.BYTES, "load", "dma") == 1000
    assert ledger(metrics.BYTES, "load", "kernel") == 500
    assert ledger.samples(metrics.SECONDS, "load") == [0.5]
    assert ledger.samples(metrics.WAIT_SECONDS, "load") == [0.0]
    assert ledger.samples(metrics.BANDWIDTH, "load") == [3000]


@pytest.mark.parametrize(
    ("error", "reasons"),
    [
        (OSError("no"), ["copy_error"]),
        (IndexError("beyond"), ["no_such_block"]),
        (SystemExit(), ["thread_died", "thread_died", "switched_off"]),
    ],
)
def test_reasons_of_failed_copies(rank: Rank, error: BaseException, reasons: list[str]) -> None:
    """They are the first copy's, that of one left behind in the thread, and a later one's."""
    gate = rank.backend.gates[0] = threading.Event()
    rank.backend.errors[0] = error
    steps = [StepMetadata([load(number, f"r{number}")]) for number in range(len(reasons))]
    for step in steps[:2]:
        rank.submit(step)
    gate.set()
    rank.flush()
    rank.worker.poll()
    for step in steps[2:]:
        rank.step(step)
    report, ledger = rank.worker.drain_report(), drain_stats(rank.worker)
    assert report is not None
    assert report.failed == dict.fromkeys(range(len(reasons)), 1)
    assert report.broken is isinstance(error, SystemExit)  # this rank cannot copy any more
    assert set(reasons) <= set(metrics.SERIES[metrics.FAILED].labels["reason"])
    for reason in reasons:
        assert ledger(metrics.FAILED, Direction.LOAD.value, reason) == reasons.count(reason)
    assert ledger(metrics.FAILED) == len(reasons)
    assert ledger(metrics.BYTES) == 0
    assert ledger.samples(metrics.SECONDS, "load") == []
