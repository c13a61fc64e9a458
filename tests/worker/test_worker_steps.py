"""OffloadWorker: what it submits and reports, step by step, on a scripted backend."""

import threading
from collections.abc import Callable, Iterator

import pytest
from vllm.v1.kv_cache_layout import KVCacheLayout

from simple_offload.backends.base import Barrier, Direction
from simple_offload.config import OffloadConfig
from simple_offload.metadata import StepMetadata, Transfer, WorkerReport
from simple_offload.worker.worker import OffloadWorker
from tests.conftest import PATIENCE_SECONDS, within_patience
from tests.worker.kv_memory import full, group, make_kv_memory
from tests.worker.scripted import (
    Mark,
    ScriptedBackend,
    ScriptedError,
    ScriptedPending,
)

pytestmark = pytest.mark.usefixtures("no_thread_left", "machine")

LOAD, STORE = Direction.LOAD, Direction.STORE


class MarkingBackend(ScriptedBackend):
    """Gives each barrier that it is asked for a mark of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.marks: list[Mark] = []

    def barrier(self) -> Barrier | None:
        self.marks.append(Mark())
        return self.marks[-1]

    def barriers_of(self, direction: Direction) -> list[object]:
        return [entry[3] for entry in self.log if entry[:2] == ("copy", direction)]


class Rank:
    """A worker and its backend."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, register: bool = True) -> None:
        self.backend = MarkingBackend()
        monkeypatch.setattr("simple_offload.worker.worker.make_backend", lambda name: self.backend)
        self.memory = make_kv_memory([group(full(), "a")], 4, KVCacheLayout.LBHNC)
        config = OffloadConfig.parse({"num_cpu_blocks": 8}, num_ranks=1)
        self.worker = OffloadWorker(self.memory.config, config, num_ranks=1)
        if register:
            self.register()

    def register(self) -> None:
        self.worker.register_kv_caches(self.memory.kv_caches)

    def settle(self) -> None:
        """Wait until the threads have dealt with everything that was submitted."""
        assert self.worker._engine is not None
        self.worker._engine.settle()

    def step(self, metadata: StepMetadata) -> tuple[set[str], set[str]]:
        """One engine step, hooks in vLLM's order; what was polled."""
        self.worker.bind(metadata)
        self.worker.submit_loads()
        self.worker.submit_stores()
        self.settle()
        polled = self.worker.poll()
        self.worker.unbind()
        return polled

    def close(self) -> None:
        self.backend.release()
        within_patience(self.worker.shutdown)


MakeRank = Callable[..., Rank]


@pytest.fixture
def make_rank(no_thread_left: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeRank]:
    ranks: list[Rank] = []

    def make(register: bool = True) -> Rank:
        ranks.append(Rank(monkeypatch, register))
        return ranks[-1]

    yield make
    for rank in ranks:
        rank.close()


@pytest.fixture
def rank(make_rank: MakeRank) -> Rank:
    return make_rank()


def load(transfer_id: int, request_id: str) -> Transfer:
    return Transfer.pairing(transfer_id, [1], [2], request_id)


def store(transfer_id: int) -> Transfer:
    return Transfer.pairing(transfer_id, [1], [2])


# Submitting


def test_each_hook_submits_its_own_direction(rank: Rank) -> None:
    rank.worker.bind(StepMetadata([load(0, "r")], [store(1)]))
    rank.worker.submit_loads()
    rank.settle()
    assert (rank.backend.copied(LOAD), rank.backend.copied(STORE)) == ([0], [])
    rank.worker.submit_stores()
    rank.settle()
    assert (rank.backend.copied(LOAD), rank.backend.copied(STORE)) == ([0], [1])


def test_a_hook_that_is_called_again_submits_nothing(rank: Rank) -> None:
    metadata = StepMetadata([load(0, "r"), load(1, "s")], [store(2)])
    for _ in range(2):
        rank.worker.bind(metadata)
        for _ in range(2):
            rank.worker.submit_loads()
            rank.worker.submit_stores()
    rank.worker.unbind()
    rank.step(StepMetadata([load(3, "t")], [store(4)]))
    assert rank.backend.copied(LOAD) == [0, 1, 3]
    assert rank.backend.copied(STORE) == [2, 4]


def test_nothing_is_submitted_between_steps(rank: Rank) -> None:
    rank.worker.bind(StepMetadata([load(0, "r")], [store(1)]))
    rank.worker.unbind()
    rank.worker.submit_loads()
    rank.worker.submit_stores()
    rank.settle()
    assert rank.backend.copied(LOAD) == rank.backend.copied(STORE) == []


def test_a_barrier_is_taken_when_the_hook_is_called(rank: Rank) -> None:
    rank.worker.bind(StepMetadata([load(0, "r"), load(1, "s")], [store(2)]))
    rank.worker.submit_loads()
    assert len(rank.backend.marks) == 1
    rank.worker.submit_stores()
    rank.settle()
    first, second = rank.backend.marks
    assert rank.backend.barriers_of(LOAD) == [first, first]
    assert rank.backend.barriers_of(STORE) == [second]


def test_without_transfers_there_is_no_barrier(rank: Rank) -> None:
    rank.step(StepMetadata())
    assert rank.backend.marks == []


# Reporting


def test_a_loaded_request_is_named_once(rank: Rank) -> None:
    assert rank.step(StepMetadata([load(0, "r"), load(1, "s")])) == ({"r", "s"}, set())
    assert rank.worker.poll() == (set(), set())
    assert rank.step(StepMetadata([load(2, "r")])) == ({"r"}, set())


def test_a_request_is_named_when_its_bytes_are_there(rank: Rank) -> None:
    pending = rank.backend.pendings[0] = ScriptedPending()
    assert rank.step(StepMetadata([load(0, "r")])) == (set(), set())
    assert rank.worker.take_report() is None
    assert rank.step(StepMetadata()) == (set(), set())
    pending.ended.set()
    assert rank.step(StepMetadata()) == ({"r"}, set())
    assert rank.worker.take_report() == WorkerReport({0: 1})  # type: ignore[arg-type]


def test_a_failed_load_has_ended_too(rank: Rank) -> None:
    rank.backend.errors[1] = ScriptedError()
    polled = rank.step(StepMetadata([load(0, "r"), load(1, "s"), load(2, "t")]))
    assert polled == ({"r", "s", "t"}, {"s"})
    report = rank.worker.take_report()
    assert report is not None
    assert (report.ended, report.failed) == ({0: 1, 1: 1, 2: 1}, {1: 1})
    assert not report.broken


def test_stores_are_reported_by_number_only(rank: Rank) -> None:
    rank.backend.errors[1] = ScriptedError()
    assert rank.step(StepMetadata(stores=[store(0), store(1)])) == (set(), set())
    report = rank.worker.take_report()
    assert report is not None
    assert (report.ended, report.failed) == ({0: 1, 1: 1}, {1: 1})


def test_a_report_is_taken_once(rank: Rank) -> None:
    assert rank.worker.take_report() is None
    rank.step(StepMetadata(stores=[store(0)]))
    rank.step(StepMetadata(stores=[store(1)]))  # nobody took the first
    report = rank.worker.take_report()
    assert report is not None
    assert report.ended == {0: 1, 1: 1}
    assert rank.worker.take_report() is None
    rank.step(StepMetadata(stores=[store(2)]))
    assert report.ended == {0: 1, 1: 1}


def test_reports_of_all_ranks_together(make_rank: MakeRank) -> None:
    """A transfer has ended when as many ranks as there are say so."""
    ranks = [make_rank() for _ in range(3)]
    ranks[1].backend.errors[0] = ScriptedError()
    slow = ranks[2].backend.pendings[1] = ScriptedPending()
    metadata = StepMetadata([load(0, "r")], [store(1)])
    assert [rank.step(metadata) for rank in ranks] == [
        ({"r"}, set()),
        ({"r"}, {"r"}),
        ({"r"}, set()),
    ]
    combined = aggregate(ranks)
    assert (combined.ended, combined.failed) == ({0: 3, 1: 2}, {0: 1})
    slow.ended.set()
    ranks[2].step(StepMetadata())
    late = ranks[2].worker.take_report()
    assert late is not None
    combined = combined.aggregate(late)
    assert (combined.ended, combined.failed) == ({0: 3, 1: 3}, {0: 1})


def aggregate(ranks: list[Rank]) -> WorkerReport:
    combined = WorkerReport()
    for rank in ranks:
        report = rank.worker.take_report()
        assert report is not None
        combined = combined.aggregate(report)
    return combined


def test_a_rank_that_cannot_copy_any_more_says_so(rank: Rank) -> None:
    rank.backend.errors |= {0: SystemExit(), 1: SystemExit()}
    for transfer_id in (0, 1):
        polled = rank.step(StepMetadata([load(transfer_id, "r")]))
        assert polled == ({"r"}, {"r"})
        report = rank.worker.take_report()
        assert report is not None
        assert report.failed == {transfer_id: 1}
        assert report.broken == (transfer_id == 1)
    assert rank.step(StepMetadata([load(2, "s")])) == ({"s"}, {"s"})


# Before and after


def test_before_registration(make_rank: MakeRank) -> None:
    rank = make_rank(register=False)
    assert rank.worker.poll() == (set(), set())
    assert rank.worker.take_report() is None
    rank.worker.bind(StepMetadata())
    rank.worker.submit_loads()
    rank.worker.submit_stores()
    rank.worker.bind(StepMetadata([load(0, "r")]))
    with pytest.raises(AssertionError, match="before any KV cache"):
        rank.worker.submit_loads()
    rank.worker.drain()
    rank.worker.shutdown()
    rank.worker.shutdown()


def test_draining_lets_copies_end_and_reports_them_later(rank: Rank) -> None:
    rank.worker.bind(StepMetadata([load(0, "r")], [store(1)]))
    rank.worker.submit_loads()
    rank.worker.submit_stores()
    rank.worker.drain()
    assert (rank.backend.copied(LOAD), rank.backend.copied(STORE)) == ([0], [1])
    assert rank.worker.take_report() is None
    assert rank.step(StepMetadata()) == ({"r"}, set())
    report = rank.worker.take_report()
    assert report is not None
    assert report.ended == {0: 1, 1: 1}


def test_shutdown_without_a_step(rank: Rank) -> None:
    rank.worker.shutdown()
    rank.worker.shutdown()
    assert rank.backend.log.count(("close",)) == 1
    assert rank.worker.host_pool.nbytes == 0


def test_shutdown_finishes_what_was_submitted(rank: Rank) -> None:
    gate = rank.backend.gates[0] = threading.Event()
    rank.worker.bind(StepMetadata([load(0, "r"), load(1, "s")], [store(2)]))
    rank.worker.submit_loads()
    rank.worker.submit_stores()
    assert rank.backend.started[0].wait(PATIENCE_SECONDS)
    gate.set()
    rank.worker.shutdown()
    assert rank.backend.copied(LOAD) == [0, 1]
    assert rank.backend.copied(STORE) == [2]
    assert rank.backend.log[-1] == ("close",)
    assert rank.worker.poll() == (set(), set())
    rank.worker.shutdown()


def test_shutdown_after_a_thread_has_died(rank: Rank) -> None:
    rank.backend.errors[0] = SystemExit()
    rank.worker.bind(StepMetadata(stores=[store(0), store(1)]))
    rank.worker.submit_stores()
    rank.worker.shutdown()
    assert rank.backend.log[-1] == ("close",)


def test_shutdown_in_the_middle_of_a_step(rank: Rank) -> None:
    rank.worker.bind(StepMetadata([load(0, "r")], [store(1)]))
    rank.worker.submit_loads()
    rank.worker.shutdown()
    with pytest.raises(RuntimeError, match="closed"):
        rank.worker.submit_stores()
    rank.worker.unbind()
    assert rank.backend.copied(STORE) == []
