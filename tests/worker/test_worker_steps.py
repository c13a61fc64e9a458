"""OffloadWorker: its submissions and reports, step by step, on a scripted backend."""

import threading

import pytest

from simple_offload.backends.base import Direction
from simple_offload.metadata import StepMetadata, WorkerReport
from tests.conftest import PATIENCE_SECONDS
from tests.worker.conftest import MakeRank
from tests.worker.rank import BLOCK_BYTES, NUM_HOST_BLOCKS, Rank, load, store
from tests.worker.scripted import (
    EndsWhenWaitedFor,
    ScriptedError,
    ScriptedPending,
    copy_thread,
    join,
)

pytestmark = pytest.mark.usefixtures("no_thread_left", "machine")

LOAD, STORE = Direction.LOAD, Direction.STORE


# Submitting


@pytest.mark.proves("I3")
def test_loads_start_before_the_forward_and_stores_after_it(rank: Rank) -> None:
    rank.worker.bind(StepMetadata([load(0, "r")], [store(1)]))
    rank.flush()
    assert (rank.backend.copied(LOAD), rank.backend.copied(STORE)) == ([0], [])
    rank.worker.submit_loads()
    rank.flush()
    assert (rank.backend.copied(LOAD), rank.backend.copied(STORE)) == ([0], [])
    rank.worker.submit_stores()
    rank.flush()
    assert (rank.backend.copied(LOAD), rank.backend.copied(STORE)) == ([0], [1])


@pytest.mark.proves("I4")
def test_a_hook_that_is_called_again_submits_nothing(rank: Rank) -> None:
    metadata = StepMetadata([load(0, "r"), load(1, "s")], [store(2)])
    for _ in range(2):
        rank.worker.bind(metadata)
        for _ in range(2):
            rank.worker.submit_loads()
            rank.worker.submit_stores()
    rank.step(StepMetadata([load(3, "t")], [store(4)]))
    assert rank.backend.copied(LOAD) == [0, 1, 3]
    assert rank.backend.copied(STORE) == [2, 4]


def test_stores_that_a_step_has_left_start_with_the_next_one(rank: Rank) -> None:
    """vLLM's V1 runner calls no hook for them on the first stages of a pipeline that drafts."""
    left, step = StepMetadata([], [store(0)]), StepMetadata([load(1, "r")], [store(2)])
    rank.worker.bind(left)
    rank.worker.bind(left)
    rank.flush()
    assert rank.backend.copied(STORE) == []
    rank.worker.bind(step)
    rank.flush()
    assert (rank.backend.copied(LOAD), rank.backend.copied(STORE)) == ([1], [0])


@pytest.mark.proves("I3")
def test_a_barrier_is_made_when_the_hook_is_called(rank: Rank) -> None:
    rank.worker.bind(StepMetadata([load(0, "r"), load(1, "s")], [store(2)]))
    assert len(rank.backend.marks) == 1
    rank.worker.submit_loads()
    assert len(rank.backend.marks) == 1
    rank.worker.submit_stores()
    rank.flush()
    first, second = rank.backend.marks
    assert rank.backend.barriers_of(LOAD) == [first, first]
    assert rank.backend.barriers_of(STORE) == [second]


def test_a_load_into_untouched_blocks_needs_no_barrier(rank: Rank) -> None:
    free = [load(number, "r", after_compute=False) for number in (0, 1)]
    rank.worker.bind(StepMetadata(free, [store(2)]))
    assert rank.backend.marks == []
    rank.worker.submit_stores()
    rank.worker.bind(StepMetadata([load(3, "s", after_compute=False), load(4, "t")]))
    rank.flush()
    first, second = rank.backend.marks
    assert rank.backend.barriers_of(STORE) == [first]
    assert rank.backend.barriers_of(LOAD) == [None, None, None, second]


# Reporting


def test_a_loaded_request_is_named_once(rank: Rank) -> None:
    assert rank.step(StepMetadata([load(0, "r"), load(1, "s")])) == ({"r", "s"}, set())
    assert rank.worker.poll() == (set(), set())
    assert rank.step(StepMetadata([load(2, "r")])) == ({"r"}, set())


def test_a_request_is_named_when_its_bytes_are_there(rank: Rank) -> None:
    pending = rank.backend.pendings[0] = ScriptedPending()
    assert rank.step(StepMetadata([load(0, "r")])) == (set(), set())
    assert rank.worker.drain_report() is None
    assert rank.step(StepMetadata()) == (set(), set())
    pending.ended.set()
    assert rank.step(StepMetadata()) == ({"r"}, set())
    assert rank.worker.drain_report() == WorkerReport({0: 1})  # type: ignore[arg-type]


def test_a_failed_load_has_ended_too(rank: Rank) -> None:
    rank.backend.errors[1] = ScriptedError()
    polled = rank.step(StepMetadata([load(0, "r"), load(1, "s"), load(2, "t")]))
    assert polled == ({"r", "s", "t"}, {"s"})
    report = rank.worker.drain_report()
    assert report is not None
    assert (report.ended, report.failed) == ({0: 1, 1: 1, 2: 1}, {1: 1})
    assert not report.broken


def test_stores_are_reported_by_number_only(rank: Rank) -> None:
    rank.backend.errors[1] = ScriptedError()
    assert rank.step(StepMetadata(stores=[store(0), store(1)])) == (set(), set())
    report = rank.worker.drain_report()
    assert report is not None
    assert (report.ended, report.failed) == ({0: 1, 1: 1}, {1: 1})


def test_a_report_is_drained_once(rank: Rank) -> None:
    assert rank.worker.drain_report() is None
    rank.step(StepMetadata(stores=[store(0)]))
    rank.step(StepMetadata(stores=[store(1)]))  # the first report was not drained
    report = rank.worker.drain_report()
    assert report is not None
    assert report.ended == {0: 1, 1: 1}
    assert rank.worker.drain_report() is None
    rank.step(StepMetadata(stores=[store(2)]))
    assert report.ended == {0: 1, 1: 1}


def test_reports_of_all_ranks_together(make_rank: MakeRank) -> None:
    """A transfer has ended when every rank has reported its end."""
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
    late = ranks[2].worker.drain_report()
    assert late is not None
    combined = combined.aggregate(late)
    assert (combined.ended, combined.failed) == ({0: 3, 1: 3}, {0: 1})


def aggregate(ranks: list[Rank]) -> WorkerReport:
    combined = WorkerReport()
    for rank in ranks:
        report = rank.worker.drain_report()
        assert report is not None
        combined = combined.aggregate(report)
    return combined


def test_a_rank_that_cannot_copy_any_more_reports_it(rank: Rank) -> None:
    rank.backend.errors[0] = SystemExit()
    assert rank.step(StepMetadata([load(0, "r")], [store(1)])) == ({"r"}, {"r"})
    report = rank.worker.drain_report()
    assert report is not None
    assert (report.ended, report.failed, report.broken) == ({0: 1, 1: 1}, {0: 1}, True)
    # The thread for stores is still alive.
    assert rank.step(StepMetadata([load(2, "s")], [store(3)])) == ({"s"}, {"s"})
    report = rank.worker.drain_report()
    assert report is not None
    assert (report.failed, report.broken) == ({2: 1}, True)


@pytest.mark.parametrize("blocked", Direction)
def test_a_blocked_thread_does_not_delay_the_other_direction(
    rank: Rank, blocked: Direction
) -> None:
    gate = rank.backend.gates[0 if blocked is LOAD else 1] = threading.Event()
    rank.worker.bind(StepMetadata([load(0, "r")], [store(1)]))
    rank.worker.submit_stores()
    other = STORE if blocked is LOAD else LOAD
    rank.worker.lanes[other].flush()
    assert rank.worker.poll() == ({"r"} if other is LOAD else set(), set())
    report = rank.worker.drain_report()
    assert report is not None
    assert report.ended == {0 if other is LOAD else 1: 1}
    gate.set()


# Open blocks


@pytest.fixture
def slow_rank(make_rank: MakeRank) -> Rank:
    """A rank with chunks of three blocks. The second chunk opens only when the test opens its
    gate."""
    rank = make_rank(register=False)
    rank.backend.chunk_bytes = 3 * BLOCK_BYTES
    rank.backend.allocation_gates[1] = threading.Event()
    rank.register()
    rank.backend.wait_allocating(1)
    return rank


def opened(report: WorkerReport) -> dict[str, int]:
    """By rank, the number of blocks that it has opened."""
    return {rank: capacity.num_open for rank, capacity in report.capacities.items()}


def num_open(rank: Rank) -> tuple[int, dict[str, int] | None]:
    """The number of open blocks in the rank's capacity, and in its report."""
    report = rank.worker.drain_report()
    return rank.worker.capacity.num_open, opened(report) if report is not None else None


def test_a_larger_number_of_open_blocks_is_reported(slow_rank: Rank) -> None:
    name = slow_rank.worker.capacity.rank
    assert num_open(slow_rank) == (3, {name: 3})
    assert num_open(slow_rank) == (3, None)
    slow_rank.backend.release()
    slow_rank.worker.host_pool.join()
    assert num_open(slow_rank) == (NUM_HOST_BLOCKS, {name: NUM_HOST_BLOCKS})
    assert num_open(slow_rank) == (NUM_HOST_BLOCKS, None)
    assert slow_rank.worker.capacity.num_host_blocks == NUM_HOST_BLOCKS


def test_open_blocks_are_reported_beside_ended_transfers(slow_rank: Rank) -> None:
    slow_rank.worker.drain_report()
    slow_rank.step(StepMetadata(stores=[store(0)]))
    report = slow_rank.worker.drain_report()
    assert report is not None
    assert (report.ended, opened(report)) == ({0: 1}, {})  # nothing new
    slow_rank.step(StepMetadata(stores=[store(1)]))
    slow_rank.backend.release()
    slow_rank.worker.host_pool.join()
    report = slow_rank.worker.drain_report()
    assert report is not None
    assert (report.ended, set(opened(report).values())) == ({1: 1}, {NUM_HOST_BLOCKS})


def test_blocks_that_cannot_be_opened_are_not_reported(slow_rank: Rank) -> None:
    slow_rank.backend.allocation_errors[1] = ScriptedError()
    slow_rank.backend.release()
    slow_rank.worker.host_pool.join()
    assert num_open(slow_rank)[0] == 3
    assert slow_rank.step(StepMetadata([load(0, "r")])) == ({"r"}, set())  # and the rank goes on


def test_ranks_have_names_of_their_own(make_rank: MakeRank) -> None:
    assert len({make_rank().worker.capacity.rank for _ in range(3)}) == 3


def test_shutdown_while_blocks_are_being_opened(
    slow_rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The backend frees memory only when no thread allocates more."""
    join_thread = threading.Thread.join

    def open_gate_and_join(thread: threading.Thread, timeout: float | None = None) -> None:
        if thread.name == "simple-offload-open":
            slow_rank.backend.release()
        join_thread(thread, timeout)

    monkeypatch.setattr(threading.Thread, "join", open_gate_and_join)
    slow_rank.worker.shutdown()
    assert slow_rank.backend.log.count(("chunk", 3)) == 2
    assert slow_rank.backend.log[-1] == ("close",)


# Before and after


def test_before_registration(make_rank: MakeRank) -> None:
    rank = make_rank(register=False)
    assert rank.worker.poll() == (set(), set())
    assert rank.worker.drain_report() is None
    rank.worker.bind(StepMetadata(admitted=[0]))
    rank.worker.submit_loads()
    rank.worker.submit_stores()
    with pytest.raises(AssertionError, match="before any KV cache"):
        rank.worker.bind(StepMetadata([load(0, "r")]))
    rank.worker.drain()
    rank.worker.shutdown()
    rank.worker.shutdown()


def test_draining_lets_copies_end_and_reports_them_later(rank: Rank) -> None:
    rank.worker.bind(StepMetadata([load(0, "r")], [store(1)]))
    rank.worker.submit_loads()
    rank.worker.submit_stores()
    rank.worker.drain()
    assert (rank.backend.copied(LOAD), rank.backend.copied(STORE)) == ([0], [1])
    assert rank.worker.drain_report() is None
    assert rank.step(StepMetadata()) == ({"r"}, set())
    report = rank.worker.drain_report()
    assert report is not None
    assert report.ended == {0: 1, 1: 1}


def test_shutdown_without_a_step(rank: Rank) -> None:
    rank.worker.shutdown()
    rank.worker.shutdown()
    assert rank.backend.log.count(("close",)) == 1


def test_shutdown_finishes_what_was_submitted(rank: Rank) -> None:
    """And only then frees the memory that copies read and write."""
    gate = rank.backend.gates[0] = threading.Event()
    rank.backend.pendings[1] = EndsWhenWaitedFor(rank.backend.log)
    rank.worker.bind(StepMetadata([load(0, "r"), load(1, "s")], [store(2)]))
    rank.worker.submit_loads()
    rank.worker.submit_stores()
    assert rank.backend.started[0].wait(PATIENCE_SECONDS)
    gate.set()
    rank.worker.shutdown()
    assert rank.backend.copied(LOAD) == [0, 1]
    assert rank.backend.copied(STORE) == [2]
    assert rank.backend.log[-1] == ("close",)
    assert ("waited",) in rank.backend.log
    rank.worker.shutdown()


def test_a_copy_that_never_ends_keeps_its_memory(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shutdown stops waiting for the thread, and leaves it the memory that it writes."""
    gate = rank.backend.gates[1] = threading.Event()
    rank.worker.bind(StepMetadata([load(0, "r")], [store(1)]))
    rank.worker.submit_stores()
    assert rank.backend.started[1].wait(PATIENCE_SECONDS)
    thread, join_thread = copy_thread(STORE), threading.Thread.join

    def give_up_on_stores(waited_for: threading.Thread, timeout: float | None = None) -> None:
        if waited_for is not thread:
            join_thread(waited_for, timeout)

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "join", give_up_on_stores)
        rank.worker.shutdown()
    log = list(rank.backend.log)
    gate.set()
    join(thread)
    assert rank.worker.poll() == ({"r"}, set())
    assert ("close",) not in log


def test_shutdown_in_the_middle_of_a_step(rank: Rank) -> None:
    rank.worker.bind(StepMetadata([load(0, "r")], [store(1)]))
    rank.worker.submit_loads()
    rank.worker.shutdown()
    with pytest.raises(RuntimeError, match="closed"):
        rank.worker.submit_stores()
    assert rank.backend.copied(STORE) == []
