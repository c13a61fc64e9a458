"""OffloadWorker: its submissions and reports, step by step, on a scripted backend."""

import threading
import time

import pytest
import torch

from simple_offload.backends.base import Direction
from simple_offload.metadata import StepMetadata, WorkerReport
from tests.conftest import within_patience
from tests.worker.conftest import MakeRank
from tests.worker.rank import BLOCK_BYTES, NOTHING, Rank, load, store
from tests.worker.scripted import (
    EndsWhenWaitedFor,
    ScriptedError,
    copy_thread,
    join,
)

pytestmark = pytest.mark.usefixtures("no_thread_left", "machine")

LOAD, STORE = Direction.LOAD, Direction.STORE


# Submitting


@pytest.mark.proves("I4")
def test_a_hook_that_is_called_again_submits_nothing(rank: Rank) -> None:
    metadata = StepMetadata([load(0, "r"), load(1, "s")], [store(2)])
    for _ in range(2):
        rank.submit(metadata)
        rank.submit(metadata)
    rank.step(StepMetadata([load(3, "t")], [store(4)]))
    assert rank.backend.copied(LOAD) == [0, 1, 3]
    assert rank.backend.copied(STORE) == [2, 4]


def test_stores_that_a_step_has_left_start_with_the_next_one(rank: Rank) -> None:
    """vLLM's V1 runner calls no hook for them on the first stages of a pipeline that drafts, and
    vLLM 0.30 in steps without tokens."""
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
    """A load into untouched blocks needs none."""
    free = load(0, "r", after_compute=False)
    rank.worker.bind(StepMetadata([free]))
    assert rank.backend.marks == []
    free = load(1, "s", after_compute=False)
    rank.worker.bind(StepMetadata([free, load(2, "t"), load(3, "u")], [store(4)]))
    assert len(rank.backend.marks) == 1
    rank.worker.submit_loads()
    assert len(rank.backend.marks) == 1
    rank.worker.submit_stores()
    rank.flush()
    first, second = rank.backend.marks
    assert rank.backend.barriers_of(LOAD) == [None, None, first, first]  # before the forward
    assert rank.backend.barriers_of(STORE) == [second]


# Reporting


def test_the_number_of_a_step_is_reported_with_it(rank: Rank) -> None:
    rank.worker.bind(StepMetadata(step=7))
    report = rank.worker.drain_report()
    assert report is not None
    assert (report.step, report.ended) == (7, {})
    # A rank that has nothing else to tell, and one that tells no step.
    assert report.aggregate(WorkerReport()).step == WorkerReport().aggregate(report).step == 7
    rank.worker.bind(StepMetadata())
    assert rank.worker.drain_report() is None


def test_ends_and_failures_are_reported_once(rank: Rank, caplog: pytest.LogCaptureFixture) -> None:
    rank.backend.errors = {1: ScriptedError(), 4: ScriptedError()}
    loads = [load(0, "r"), load(1, "s"), load(2, "t")]
    assert rank.step(StepMetadata(loads, [store(3), store(4)])) == ({"r", "s", "t"}, {"s"})
    assert rank.step(StepMetadata(stores=[store(5)])) == NOTHING  # before a report was drained
    report = rank.worker.drain_report()
    assert report is not None
    ended = dict.fromkeys(range(6), 1)
    assert (report.ended, report.failed, report.broken) == (ended, {1: 1, 4: 1}, False)
    for failed in ("load 1 of 1 blocks failed", "store 4 of 1 blocks failed"):
        assert caplog.text.count(f"{failed} on this rank: ScriptedError()") == 1
    assert rank.worker.drain_report() is None
    rank.step(StepMetadata(stores=[store(6)]))
    assert report.ended == ended


@pytest.mark.parametrize("blocked", Direction)
def test_a_blocked_thread_does_not_delay_the_other_direction(
    rank: Rank, blocked: Direction
) -> None:
    loads = blocked is STORE  # what goes on
    gate = rank.backend.gates[1 if loads else 0] = threading.Event()
    rank.submit(StepMetadata([load(0, "r")], [store(1)]))
    rank.worker.lanes[LOAD if loads else STORE].flush()
    assert rank.worker.poll() == ({"r"} if loads else set(), set())
    assert rank.report() == ({0 if loads else 1: 1}, {})
    gate.set()


# Before and after


def test_memory_opens_slowly_beside_steps(
    make_rank: MakeRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Launches wait while a driver pins memory: most of the time is left to them."""
    rank = make_rank(register=False)
    backend, spans = rank.backend, list[tuple[float, float]]()
    backend.chunk_bytes, backend.pins_memory = BLOCK_BYTES, True
    allocate = backend.allocate_host

    def allocate_and_note(num_bytes: int) -> torch.Tensor:
        began = time.monotonic()
        memory = allocate(num_bytes)
        spans.append((began, time.monotonic()))
        return memory

    monkeypatch.setattr(backend, "allocate_host", allocate_and_note)
    gate = backend.allocation_gates[1] = threading.Event()
    rank.register()
    backend.wait_allocating(1)
    rank.step()
    gate.set()
    within_patience(rank.worker.host_pool.join)
    (began, ended), (next_began, _) = spans[1:3]
    assert next_began - ended > 7 * (ended - began)


def test_ranks_that_are_not_alike_open_what_all_have_room_for(make_rank: MakeRank) -> None:
    """A step tells them."""
    rank = make_rank(register=False, are_alike=False)
    rank.backend.chunk_bytes = 3 * BLOCK_BYTES
    rank.register()
    pool = rank.worker.host_pool
    rank.step()
    assert (pool.is_agreed, pool.num_open) == (False, 3)
    rank.step(StepMetadata(num_host_blocks=5))
    within_patience(pool.join)
    assert pool.num_open == 5


def test_shutdown_while_blocks_are_being_opened(
    make_rank: MakeRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Open blocks are reported once. The backend frees memory only when no thread allocates
    more."""
    rank = make_rank(register=False)
    rank.backend.chunk_bytes = 3 * BLOCK_BYTES
    rank.backend.allocation_gates[1] = threading.Event()
    rank.register()
    rank.backend.wait_allocating(1)
    report = rank.worker.drain_report()
    assert report is not None
    assert [capacity.num_open for capacity in report.capacities.values()] == [3]
    assert rank.worker.drain_report() is None
    join_thread = threading.Thread.join

    def open_gate_and_join(thread: threading.Thread, timeout: float | None = None) -> None:
        if thread.name == "simple-offload-open":
            rank.backend.release()
        join_thread(thread, timeout)

    monkeypatch.setattr(threading.Thread, "join", open_gate_and_join)
    rank.worker.shutdown()
    assert rank.backend.log.count(("chunk", 3)) == 2
    assert rank.backend.log[-1] == ("close",)


def test_before_registration(make_rank: MakeRank) -> None:
    rank = make_rank(register=False)
    assert rank.worker.poll() == NOTHING
    assert rank.worker.drain_report() is None
    rank.submit(StepMetadata(admitted=[0]))
    with pytest.raises(AssertionError, match="before any KV cache"):
        rank.worker.bind(StepMetadata([load(0, "r")]))
    rank.worker.drain()
    rank.worker.shutdown()


@pytest.mark.proves("I6")
def test_shutdown_finishes_what_was_submitted(rank: Rank) -> None:
    """And only then frees the memory that copies read and write."""
    gate = rank.backend.gates[0] = threading.Event()
    rank.backend.pendings[1] = EndsWhenWaitedFor(log=rank.backend.log)
    rank.submit(StepMetadata([load(0, "r"), load(1, "s")], [store(2)]))
    rank.backend.wait_started(0)
    gate.set()
    rank.worker.shutdown()
    rank.worker.shutdown()
    assert rank.backend.copied(LOAD) == [0, 1]
    assert rank.backend.copied(STORE) == [2]
    assert ("wait",) in rank.backend.log
    assert rank.backend.log.index(("close",)) == len(rank.backend.log) - 1
    assert rank.worker.poll() == ({"r", "s"}, set())


def test_a_copy_that_never_ends_keeps_its_memory(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shutdown stops waiting for the thread, and leaves it the memory that it writes."""
    gate = rank.backend.gates[1] = threading.Event()
    rank.submit(StepMetadata([load(0, "r")], [store(1)]))
    rank.backend.wait_started(1)
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
