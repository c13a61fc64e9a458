"""The duration of a copy, its wait, and the worker's stats."""

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
from vllm.v1.kv_cache_layout import KVCacheLayout

from simple_offload import metrics
from simple_offload.backends.base import Direction, Measurement
from simple_offload.config import OffloadConfig
from simple_offload.metadata import StepMetadata, Transfer
from simple_offload.ranks import Ranks
from simple_offload.worker import copy_lane
from simple_offload.worker.copy_lane import (
    Completion,
    CopyStats,
    CopyThreadDied,
    LaneBroken,
)
from simple_offload.worker.worker import OffloadWorker
from tests.conftest import within_patience
from tests.simulation.ledger import Ledger
from tests.worker.kv_memory import KVMemory, full, group, make_kv_memory
from tests.worker.scripted import Bench, ScriptedError, ScriptedPending

pytestmark = pytest.mark.usefixtures("no_thread_left", "machine")

LOAD, STORE = Direction.LOAD, Direction.STORE
BLOCK_BYTES = full().page_size_bytes


class Clock:
    """A clock that stands still unless the test moves it."""

    def __init__(self) -> None:
        self.now = 10.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(copy_lane, "time", SimpleNamespace(monotonic=clock.monotonic))
    return clock


@dataclass(eq=False)
class MeasuredPending(ScriptedPending):
    """A copy that the device has timed."""

    result: Measurement | Exception = field(default_factory=lambda: Measurement(1.5, {"dma": 100}))

    def measure(self) -> Measurement:
        assert self.ended.is_set(), "measured before the copy has ended"
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


def copy(bench: Bench, clock: Clock, pending: ScriptedPending | None) -> Completion:
    """A copy submitted at 10, begun at 13, and seen to have ended at 15."""
    gate = bench.backend.gates[2] = threading.Event()
    bench.submit(1)
    bench.wait_started(1)
    bench.submit(2)
    clock.now = 13
    bench.backend.gates[1].set()
    bench.wait_started(2)
    if pending is not None:
        bench.backend.pendings[2] = pending
    else:
        clock.now = 15
    gate.set()
    bench.lane.flush()
    clock.now = 15
    if pending is not None:
        pending.ended.set()
    return bench.lane.poll()[-1]


@pytest.fixture
def gated(bench: Bench) -> Bench:
    """A bench whose thread is busy with transfer 1 until the test opens its gate."""
    bench.backend.gates[1] = threading.Event()
    return bench


def test_a_copy_without_a_timer_ends_when_poll_sees_it(gated: Bench, clock: Clock) -> None:
    assert copy(gated, clock, ScriptedPending()).stats == CopyStats(2.0, 3.0, None)


def test_a_copy_in_the_thread_ends_with_it(gated: Bench, clock: Clock) -> None:
    assert copy(gated, clock, None).stats == CopyStats(2.0, 3.0, None)


def test_a_copy_that_the_device_times(gated: Bench, clock: Clock) -> None:
    stats = copy(gated, clock, MeasuredPending()).stats
    assert stats == CopyStats(1.5, 3.5, {"dma": 100})


def test_a_path_without_a_time(gated: Bench, clock: Clock) -> None:
    pending = MeasuredPending(result=Measurement(None, {"batch": 100}))
    assert copy(gated, clock, pending).stats == CopyStats(2.0, 3.0, {"batch": 100})


def test_a_copy_that_cannot_be_measured_has_not_failed(gated: Bench, clock: Clock) -> None:
    completion = copy(gated, clock, MeasuredPending(result=ScriptedError("no such event")))
    assert completion.error is None
    assert completion.stats == CopyStats(2.0, 3.0, None)


def test_a_failed_copy_has_no_measurement(bench: Bench) -> None:
    bench.backend.errors[1] = ScriptedError()
    bench.submit(1)
    bench.lane.flush()
    (completion,) = bench.lane.poll()
    assert completion.stats is None


def test_a_drained_copy_is_measured_too(bench: Bench) -> None:
    bench.backend.pendings[1] = pending = MeasuredPending()
    bench.submit(1)
    pending.ended.set()
    bench.lane.drain()
    (completion,) = bench.lane.poll()
    assert completion.stats is not None
    assert completion.stats.num_bytes == {"dma": 100}


# The worker's stats


@pytest.fixture
def memory() -> KVMemory:
    return make_kv_memory([group(full(), "a")], 6, KVCacheLayout.LBHNC)


@pytest.fixture
def worker(no_thread_left: None, memory: KVMemory) -> Iterator[OffloadWorker]:
    config = OffloadConfig.parse({"num_cpu_blocks": 9}, 1)
    worker = OffloadWorker(memory.config, config, Ranks(1, 1))
    worker.register_kv_caches(memory.kv_caches)
    yield worker
    within_patience(worker.shutdown)


def run(worker: OffloadWorker, step: StepMetadata) -> Ledger:
    """The counts of a step."""
    worker.bind(step)
    worker.submit_stores()
    worker.drain()
    worker.poll()
    counted = Ledger()
    counted.add(worker.drain_stats())
    return counted


def test_bytes_are_blocks_times_their_size(worker: OffloadWorker) -> None:
    stored = run(worker, StepMetadata(stores=[Transfer.pairing(0, [1, 2, 3], [4, 5, 6])]))
    assert stored(metrics.BYTES, "store", "host") == stored(metrics.BYTES) == 3 * BLOCK_BYTES
    (seconds,) = stored.samples(metrics.SECONDS, "store")
    (bandwidth,) = stored.samples(metrics.BANDWIDTH, "store")
    assert bandwidth == pytest.approx(3 * BLOCK_BYTES / seconds)
    assert len(stored.samples(metrics.WAIT_SECONDS, "store")) == 1
    loaded = run(worker, StepMetadata([Transfer.pairing(1, [1], [4], "r")]))
    assert loaded(metrics.BYTES, "load", "host") == loaded(metrics.BYTES) == BLOCK_BYTES
    assert worker.drain_stats() is None


def test_a_failed_copy_moves_nothing(worker: OffloadWorker) -> None:
    failed = run(worker, StepMetadata([Transfer.pairing(0, [1], [9], "r")]))
    assert failed(metrics.FAILED, "load", "no_such_block") == failed(metrics.FAILED) == 1
    assert failed(metrics.BYTES) == 0
    assert failed.samples(metrics.SECONDS, "load") == []


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError("no"), "copy_error"),
        (IndexError("beyond"), "no_such_block"),
        (SystemExit(), "thread_died"),
        (CopyThreadDied("died"), "thread_died"),
        (LaneBroken("load"), "switched_off"),
    ],
)
def test_reasons(worker: OffloadWorker, error: BaseException, reason: str) -> None:
    assert reason in metrics.SERIES[metrics.FAILED].labels["reason"]
    worker._note(LOAD, Completion(Transfer.pairing(0, [1], [1], "r"), error))
    counted = Ledger()
    counted.add(worker.drain_stats())
    assert counted(metrics.FAILED, "load", reason) == counted(metrics.FAILED) == 1


def test_paths_are_counted_apart(worker: OffloadWorker) -> None:
    stats = CopyStats(0.5, 0.25, {"dma": 1000, "kernel": 500})
    worker._note(LOAD, Completion(Transfer.pairing(0, [1], [1], "r"), None, stats))
    counted = Ledger()
    counted.add(worker.drain_stats())
    assert counted(metrics.BYTES, "load", "dma") == 1000
    assert counted(metrics.BYTES, "load", "kernel") == 500
    assert counted.samples(metrics.SECONDS, "load") == [0.5]
    assert counted.samples(metrics.WAIT_SECONDS, "load") == [0.25]
    assert counted.samples(metrics.BANDWIDTH, "load") == [3000]
