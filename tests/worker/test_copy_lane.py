"""CopyLane: copies start in order, and every transfer ends exactly once, after any failure.

test_worker_steps.py shows that the two directions do not wait for each other.
"""

import sys
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simple_offload.backends.base import Direction
from simple_offload.worker.copy_lane import CopyLane, CopyThreadDied, LaneBroken
from tests.conftest import within_patience
from tests.worker.scripted import (
    Bench,
    EndsWhenWaitedFor,
    Mark,
    Outcomes,
    ScriptedBackend,
    ScriptedError,
    ScriptedPending,
    join,
)

pytestmark = pytest.mark.usefixtures("no_thread_left")

LOAD = Direction.LOAD


def nearly_done(bench: Bench, seconds: float) -> list[int]:
    return [transfer.id for transfer in bench.lane.nearly_done(seconds)]


# Submission


@pytest.mark.parametrize("direction", Direction)
def test_one_thread_starts_all_copies_in_order(direction: Direction) -> None:
    bench = Bench(direction)
    marks: list[Mark | None] = [Mark(), None, Mark()]
    for number, mark in enumerate(marks):
        bench.submit(number, barrier=mark)
    bench.submit(*range(3, 50))
    assert bench.flush() == [(number, None) for number in range(50)]
    name = f"simple-offload-{direction.value}"
    marks += [None] * 47
    copies = [("copy", direction, number, mark, name) for number, mark in enumerate(marks)]
    # The thread calls enter_thread once, before its first copy.
    assert bench.backend.log == [("enter", direction, name), *copies]
    bench.lane.close()


@pytest.mark.parametrize(("before", "meanwhile"), [(5e-3, 1e-3), (5e-4, 5e-4)])
def test_threads_take_turns_more_often_while_a_lane_is_open(
    before: float, meanwhile: float
) -> None:
    default = sys.getswitchinterval()
    try:
        sys.setswitchinterval(before)
        lanes = [CopyLane(ScriptedBackend(), LOAD) for _ in range(2)]
        for lane in lanes:  # in the order in which they were opened
            assert sys.getswitchinterval() == pytest.approx(meanwhile)
            within_patience(lane.close)
            within_patience(lane.close)  # no effect
        assert sys.getswitchinterval() == pytest.approx(before)
    finally:
        sys.setswitchinterval(default)


def test_the_caller_starts_a_quick_copy_itself(bench: Bench) -> None:
    """While no other copy is in flight: an idle device must not wait for a thread to wake."""
    bench.backend.quick = {1, 2, 4}
    pendings = {number: ScriptedPending() for number in (1, 2, 3)}
    bench.backend.pendings |= pendings
    mark = Mark()
    bench.submit(1, barrier=mark)
    caller = threading.current_thread().name
    assert bench.backend.log == [("copy", LOAD, 1, mark, caller)]
    bench.submit(2, 3)  # 2 is submitted behind another; 3 is not quick
    assert bench.flush() == []
    for pending in pendings.values():
        pending.ended.set()
    assert bench.flush() == [(1, None), (2, None), (3, None)]
    bench.submit(4)
    assert bench.poll() == [(4, None)]
    assert bench.copied() == [1, 2, 3, 4]
    assert bench.backend.copied_quickly == [1, 4]


def test_a_quick_copy_that_fails(bench: Bench) -> None:
    bench.backend.quick = {1}
    error = bench.backend.errors[1] = ScriptedError()
    bench.submit(1)
    assert bench.poll() == [(1, error)]


def test_a_signal_during_a_quick_copy(bench: Bench) -> None:
    """vLLM's SIGTERM handler raises on the engine's thread. Closing does not wait for a copy that
    the handler has stopped."""
    bench.backend.quick = {1}
    bench.backend.errors[1] = SystemExit()
    with pytest.raises(SystemExit):
        bench.submit(1)
    within_patience(bench.lane.close)
    assert bench.poll() == []


def test_a_quick_copy_can_be_announced_and_waited_for(bench: Bench) -> None:
    bench.backend.quick = {1}
    pending = bench.backend.pendings[1] = ScriptedPending(remaining=0.01)
    bench.submit(1)
    assert nearly_done(bench, 0.01) == [1]
    bench.lane.hold_compute({1})
    assert pending.num_holds == 1


# Polling


def test_poll_waits_neither_for_the_thread_nor_for_the_device(bench: Bench) -> None:
    pending = bench.backend.pendings[1] = ScriptedPending()
    gate = bench.backend.gates[2] = threading.Event()
    bench.submit(1, 2)
    bench.wait_started(2)
    assert bench.poll() == []
    pending.ended.set()
    assert bench.poll() == [(1, None)]
    assert bench.poll() == []
    gate.set()
    assert bench.flush() == [(2, None)]
    assert bench.poll() == []
    assert pending.num_waits == 0


def test_a_transfer_that_ended_first_waits_for_earlier_ones(bench: Bench) -> None:
    slow = bench.backend.pendings[1] = ScriptedPending()
    bench.submit(1, 2)
    assert bench.flush() == []
    slow.ended.set()
    assert bench.poll() == [(1, None), (2, None)]


# Failures


def test_a_failed_copy_fails_one_transfer(bench: Bench) -> None:
    error, late_error = ScriptedError(), ScriptedError()
    bench.backend.errors[2] = error
    pending = bench.backend.pendings[3] = ScriptedPending(error=late_error)
    bench.submit(1, 2, 3, 4)
    assert bench.flush() == [(1, None), (2, error)]
    pending.ended.set()
    assert bench.poll() == [(3, late_error), (4, None)]
    assert not bench.lane.is_broken


def test_a_thread_that_cannot_enter_tries_again(bench: Bench) -> None:
    error = ScriptedError()
    bench.backend.enter_errors.append(error)
    bench.submit(1, 2)
    assert bench.flush() == [(1, error), (2, None)]
    assert bench.copied() == [2]


# Death of the thread


@pytest.mark.proves("I5")
@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("death", [SystemExit(), KeyboardInterrupt(), GeneratorExit()], ids=repr)
def test_copies_that_a_dying_thread_leaves_fail(
    direction: Direction, death: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(direction)
    bench.backend.errors[2] = death
    gate = bench.backend.gates[2] = threading.Event()
    bench.submit(1, 2, 3, 4)
    gate.set()  # all four are submitted when it dies
    join(bench.thread)
    (first, second, *rest) = bench.poll()
    assert (first, second) == ((1, None), (2, death))
    assert [(number, type(error)) for number, error in rest] == [
        (3, CopyThreadDied),
        (4, CopyThreadDied),
    ]
    assert bench.lane.is_broken
    bench.submit(5, 6)  # every later one fails too
    assert [(number, type(error)) for number, error in bench.poll()] == [
        (5, LaneBroken),
        (6, LaneBroken),
    ]
    assert bench.copied() == [1, 2]
    assert caplog.text.count(f"The {direction.value} thread has died: no more copies") == 1
    bench.lane.close()


def test_copies_on_the_device_outlive_the_thread(bench: Bench) -> None:
    """Their bytes do arrive. Until then, poll returns no later transfer either."""
    pending = bench.backend.pendings[1] = ScriptedPending()
    bench.backend.errors[2] = SystemExit()
    bench.submit(1, 2, 3)
    assert bench.flush() == []
    bench.submit(4)
    pending.ended.set()
    assert [(number, error is None) for number, error in bench.poll()] == [
        (1, True),
        (2, False),
        (3, False),
        (4, False),
    ]


def test_a_thread_that_dies_while_it_enters(bench: Bench) -> None:
    bench.backend.enter_errors.append(SystemExit())
    bench.submit(1)
    assert [type(error) for _, error in bench.flush()] == [SystemExit]
    assert bench.lane.is_broken


# Copies under way


def test_nearly_done_adds_up_what_is_left_of_earlier_copies(bench: Bench) -> None:
    """The device makes one copy after another."""
    for number, remaining in enumerate((0.25, 0.125, 0.5)):
        bench.backend.pendings[number] = ScriptedPending(remaining=remaining)
    bench.submit(0, 1, 2)
    assert bench.flush() == []
    assert nearly_done(bench, 0.24) == []
    assert nearly_done(bench, 0.25) == nearly_done(bench, 0.374) == [0]
    assert nearly_done(bench, 0.375) == nearly_done(bench, 0.874) == [0, 1]
    assert nearly_done(bench, 0.875) == [0, 1, 2]


def test_only_copies_in_flight_are_nearly_done(bench: Bench) -> None:
    """Copies that have ended or failed, that poll has returned, or that are not yet submitted, are
    not."""
    slow = bench.backend.pendings[1] = ScriptedPending(remaining=0.0)
    bench.backend.errors[3] = ScriptedError()
    bench.submit(1, 2, 3)
    bench.lane.flush()
    gate = bench.backend.gates[4] = threading.Event()
    bench.backend.pendings[4] = ScriptedPending(remaining=0.0)
    bench.submit(4)
    bench.wait_started(4)
    assert bench.poll() == []
    assert nearly_done(bench, 1.0) == [1]
    slow.ended.set()
    assert len(bench.poll()) == 3
    assert nearly_done(bench, 1.0) == []
    gate.set()
    assert bench.flush() == []
    assert nearly_done(bench, 1.0) == [4]


def test_compute_is_held_for_copies_under_way(bench: Bench) -> None:
    first, second = ScriptedPending(), ScriptedPending()
    bench.backend.pendings |= {1: first, 3: second}
    bench.submit(1, 2, 3)
    assert bench.flush() == []
    bench.lane.hold_compute({2, 3, 77})  # 2 has ended, 77 does not exist
    assert (first.num_holds, second.num_holds) == (0, 1)
    assert (first.num_waits, second.num_waits) == (0, 0)


# Flushing and draining


def test_flushing_does_not_wait_for_the_device(bench: Bench) -> None:
    bench.backend.pendings[1] = ScriptedPending()
    bench.submit(1)
    assert bench.flush() == []
    assert bench.copied() == [1]


def test_draining_waits_for_thread_and_device(bench: Bench) -> None:
    late, bad = EndsWhenWaitedFor(), EndsWhenWaitedFor(error=ScriptedError())
    late.remaining = 0.0
    bench.backend.pendings |= {1: late, 2: bad}
    bench.submit(1, 2)
    bench.lane.drain()
    assert (late.num_waits, bad.num_waits) == (1, 1)
    assert nearly_done(bench, 1.0) == []  # nothing is left to announce or to wait for
    bench.lane.hold_compute({1})
    assert late.num_holds == 0
    assert bench.poll() == [(1, None), (2, bad.error)]
    bench.submit(3)
    assert bench.flush() == [(3, None)]
    bench.lane.drain()  # no effect


def test_draining_with_a_dead_thread(bench: Bench) -> None:
    bench.backend.errors[1] = SystemExit()
    bench.submit(1, 2)
    bench.lane.drain()
    assert [number for number, _ in bench.poll()] == [1, 2]


# Closing


@pytest.mark.proves("I6")
def test_closing_finishes_copies_and_leaves_them_to_poll(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread's first copy ends only when the test joins the thread."""
    gate = bench.backend.gates[1] = threading.Event()
    late = bench.backend.pendings[2] = EndsWhenWaitedFor()
    bench.backend.errors[3] = error = ScriptedError()
    bench.submit(1, 2, 3)
    bench.wait_started(1)
    join_thread = threading.Thread.join

    def open_gate_and_join(thread: threading.Thread, timeout: float | None = None) -> None:
        gate.set()
        join_thread(thread, timeout)

    monkeypatch.setattr(threading.Thread, "join", open_gate_and_join)
    bench.lane.close()
    bench.lane.close()
    assert (late.num_waits, bench.lane.is_stuck) == (1, False)
    assert bench.poll() == [(1, None), (2, None), (3, error)]
    with pytest.raises(RuntimeError, match="closed"):
        bench.submit(4)
    assert bench.copied() == [1, 2, 3]
    assert bench.poll() == []


@pytest.mark.proves("I6")
def test_closing_after_a_death_that_poll_has_not_seen(bench: Bench) -> None:
    bench.backend.errors[1] = SystemExit()
    bench.submit(1, 2)
    join(bench.thread)
    bench.lane.close()
    assert [(number, error is None) for number, error in bench.poll()] == [(1, False), (2, False)]


# Everything together


ENDS = st.sampled_from(["at once", "fails at once", "later", "fails later", "dies"])
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), ENDS),
        st.tuples(st.just("end one"), st.integers(0, 9)),
        st.tuples(st.sampled_from(["poll", "flush"]), st.none()),
    ),
    max_size=30,
)


@pytest.mark.proves("I5")
@given(STEPS)
def test_every_transfer_ends_once_in_order_and_as_it_went(steps: list[tuple[str, object]]) -> None:
    bench = Bench()
    expected: Outcomes = []
    found: Outcomes = []
    open_pendings: list[ScriptedPending] = []
    is_alive = True
    for number, (step, detail) in enumerate(steps):
        if step == "submit":
            assert isinstance(detail, str)
            error: BaseException | None = ScriptedError(number) if "fails" in detail else None
            if detail == "dies":
                error = SystemExit(number)
            if "later" in detail:
                bench.backend.pendings[number] = ScriptedPending(error=error)
                open_pendings.append(bench.backend.pendings[number])
            elif error is not None:
                bench.backend.errors[number] = error
            expected.append((number, error))
            bench.submit(number)
        elif step == "end one" and open_pendings:
            assert isinstance(detail, int)
            open_pendings.pop(detail % len(open_pendings)).ended.set()
        elif step == "poll":
            found += bench.poll()
        elif step == "flush":
            found += bench.flush()
    bench.backend.release()
    bench.lane.close()
    found += bench.poll()
    assert [number for number, _ in found] == [number for number, _ in expected]
    for (_, error), (_, wanted) in zip(found, expected, strict=True):
        if is_alive:
            assert error is wanted
        else:
            assert isinstance(error, CopyThreadDied | LaneBroken)
        is_alive = is_alive and not isinstance(wanted, SystemExit)
    assert bench.lane.is_broken != is_alive
