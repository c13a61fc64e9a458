"""TransferEngine: order, independence of the directions, and every transfer's end."""

import sys
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simple_offload.backends.base import Direction
from simple_offload.worker.transfers import TransferEngine
from tests.conftest import within_patience
from tests.worker.scripted import (
    Bench,
    Mark,
    ScriptedBackend,
    ScriptedError,
    ScriptedPending,
    outcomes,
)

pytestmark = pytest.mark.usefixtures("no_thread_left")

LOAD, STORE = Direction.LOAD, Direction.STORE


def other(direction: Direction) -> Direction:
    return STORE if direction is LOAD else LOAD


# Handing over


@pytest.mark.parametrize("direction", Direction)
def test_copies_start_in_order_of_submission(bench: Bench, direction: Direction) -> None:
    bench.submit(direction, *range(50))
    assert outcomes(bench.flush(direction)) == [(number, None) for number in range(50)]
    assert bench.backend.copied(direction)[:50] == list(range(50))


def test_each_direction_has_a_thread_of_its_own(bench: Bench) -> None:
    for direction in Direction:
        bench.submit(direction, 1, 2)
        bench.flush(direction)
    threads = {}
    for direction in Direction:
        mine = [entry for entry in bench.backend.log if entry[1] is direction]
        # The thread enters once, before its first copy.
        assert [entry[0] for entry in mine] == ["enter", "copy", "copy", "copy"]
        (threads[direction],) = {entry[-1] for entry in mine}
    assert len({*threads.values(), threading.current_thread().name}) == 3


@pytest.mark.parametrize(("before", "meanwhile"), [(5e-3, 1e-3), (5e-4, 5e-4)])
def test_threads_take_turns_more_often_until_the_end(before: float, meanwhile: float) -> None:
    default = sys.getswitchinterval()
    try:
        sys.setswitchinterval(before)
        engines = [TransferEngine(ScriptedBackend()) for _ in range(2)]
        for engine in engines:  # in the order in which they came
            assert sys.getswitchinterval() == pytest.approx(meanwhile)
            within_patience(engine.close)
            within_patience(engine.close)  # changes nothing
        assert sys.getswitchinterval() == pytest.approx(before)
    finally:
        sys.setswitchinterval(default)


@pytest.mark.parametrize("direction", Direction)
def test_a_quick_copy_is_started_at_once(bench: Bench, direction: Direction) -> None:
    """By the caller, as long as nothing of its direction is under way: what the device has to
    wait for must not wait for a thread to wake up."""
    bench.backend.quick = {1, 2, 4, 5}
    for transfer_id in range(1, 5):
        bench.backend.pendings[transfer_id] = ScriptedPending()
    mark = Mark()
    bench.submit(direction, 1, barrier=mark)
    caller = threading.current_thread().name
    assert bench.backend.log == [("copy", direction, 1, mark, caller)]
    bench.submit(other(direction), 4)  # whatever the other direction does
    assert bench.backend.log[-1] == ("copy", other(direction), 4, None, caller)
    bench.submit(direction, 2, 3)  # behind another; and not quick
    assert bench.flush(direction) == []
    for transfer_id in (1, 2, 3):
        bench.backend.pendings[transfer_id].ended.set()
    assert outcomes(bench.flush(direction)) == [(1, None), (2, None), (3, None)]
    threads = {entry[2]: entry[4] for entry in bench.backend.log if entry[0] == "copy"}
    assert threads[1] == caller
    assert caller not in (threads[2], threads[3])
    bench.submit(direction, 5)
    assert bench.backend.log[-1] == ("copy", direction, 5, None, caller)
    assert bench.backend.copied_quickly == [1, 4, 5]


def test_a_quick_copy_that_fails(bench: Bench) -> None:
    bench.backend.quick = {1}
    error = bench.backend.errors[1] = ScriptedError()
    bench.submit(LOAD, 1)
    assert outcomes(bench.poll(LOAD)) == [(1, error)]


def test_a_signal_during_a_quick_copy(bench: Bench) -> None:
    """vLLM's handler of SIGTERM raises on the engine's thread, wherever that is; what comes after
    must not wait for a copy that nobody has."""
    bench.backend.quick = {2}
    bench.backend.errors[2] = SystemExit()
    bench.submit(LOAD, 1)
    assert outcomes(bench.flush(LOAD)) == [(1, None)]
    with pytest.raises(SystemExit):
        bench.submit(LOAD, 2)
    within_patience(bench.close)


def test_a_quick_copy_that_is_nearly_done(bench: Bench) -> None:
    """It can be announced and waited for as any other."""
    bench.backend.quick = {1}
    pending = bench.backend.pendings[1] = ScriptedPending(remaining=0.01)
    bench.submit(LOAD, 1)
    bench.engine.settle()  # nothing to wait for
    assert [transfer.id for transfer in bench.engine.nearly_done(LOAD, 0.01)] == [1]
    bench.engine.hold_compute(LOAD, {1})
    assert pending.num_holds == 1
    pending.ended.set()
    assert outcomes(bench.poll(LOAD)) == [(1, None)]


def test_barriers_reach_the_backend(bench: Bench) -> None:
    marks = [Mark(), None, Mark()]
    for number, mark in enumerate(marks):
        bench.submit(STORE, number, barrier=mark)
    bench.flush(STORE)
    copies = [entry for entry in bench.backend.log if entry[0] == "copy"]
    assert [entry[3] for entry in copies[:3]] == marks


@pytest.mark.parametrize("blocked", Direction)
def test_a_blocked_thread_does_not_delay_the_other_direction(
    bench: Bench, blocked: Direction
) -> None:
    gate = bench.backend.gates[1] = threading.Event()
    bench.submit(blocked, 1, 2)
    bench.wait_started(1)
    bench.submit(other(blocked), 3, 4)
    assert outcomes(bench.flush(other(blocked))) == [(3, None), (4, None)]
    assert bench.backend.copied(blocked) == [1]
    gate.set()
    assert outcomes(bench.flush(blocked)) == [(1, None), (2, None)]


# Polling


@pytest.mark.parametrize("direction", Direction)
def test_poll_does_not_wait_for_the_thread(bench: Bench, direction: Direction) -> None:
    bench.backend.gates[1] = threading.Event()
    bench.submit(direction, 1)
    bench.wait_started(1)
    assert bench.poll(direction) == []  # with a poll that waits, the gate's patience ends


def test_poll_does_not_wait_for_the_device(bench: Bench) -> None:
    pending = bench.backend.pendings[1] = ScriptedPending()
    bench.submit(STORE, 1)
    assert bench.flush(STORE) == []
    assert bench.poll(STORE) == []
    pending.ended.set()
    assert outcomes(bench.poll(STORE)) == [(1, None)]
    assert pending.num_waits == 0


def test_a_transfer_is_returned_once(bench: Bench) -> None:
    bench.submit(LOAD, 1)
    assert outcomes(bench.flush(LOAD)) == [(1, None)]
    assert bench.poll(LOAD) == []
    assert bench.flush(LOAD) == []
    assert bench.close() == []


def test_a_poll_returns_its_own_direction_only(bench: Bench) -> None:
    bench.submit(LOAD, 1)
    bench.submit(STORE, 2)
    assert outcomes(bench.flush(LOAD)) == [(1, None)]
    assert outcomes(bench.flush(STORE)) == [(2, None)]


def test_a_transfer_that_ended_first_waits_for_those_before_it(bench: Bench) -> None:
    slow = bench.backend.pendings[1] = ScriptedPending()
    bench.submit(STORE, 1, 2)
    assert bench.flush(STORE) == []
    slow.ended.set()
    assert outcomes(bench.poll(STORE)) == [(1, None), (2, None)]


def test_polling_nothing(bench: Bench) -> None:
    assert bench.engine.poll(LOAD) == []
    assert bench.engine.poll(STORE) == []


# Failures


@pytest.mark.parametrize("direction", Direction)
def test_a_copy_that_fails(bench: Bench, direction: Direction) -> None:
    error = bench.backend.errors[2] = ScriptedError()
    bench.submit(direction, 1, 2, 3)
    assert outcomes(bench.flush(direction)) == [(1, None), (2, error), (3, None)]
    assert not bench.engine.broken


def test_a_copy_that_fails_on_the_device(bench: Bench) -> None:
    error = ScriptedError()
    pending = bench.backend.pendings[1] = ScriptedPending(error=error)
    bench.submit(STORE, 1, 2)
    assert bench.flush(STORE) == []
    pending.ended.set()
    assert outcomes(bench.poll(STORE)) == [(1, error), (2, None)]


def test_a_thread_that_cannot_enter_tries_again(bench: Bench) -> None:
    error = ScriptedError()
    bench.backend.enter_errors.append(error)
    bench.submit(LOAD, 1, 2)
    assert outcomes(bench.flush(LOAD)) == [(1, error), (2, None)]
    assert bench.backend.copied(LOAD)[:1] == [2]


# Nearly done


def near(bench: Bench, direction: Direction, seconds: float) -> list[int]:
    return [transfer.id for transfer in bench.engine.nearly_done(direction, seconds)]


@pytest.mark.parametrize("direction", Direction)
def test_nearly_done_goes_by_what_is_left_of_all_copies_so_far(
    bench: Bench, direction: Direction
) -> None:
    """The device makes one after another."""
    for number, remaining in enumerate((0.25, 0.125, 0.5)):
        bench.backend.pendings[number] = ScriptedPending(remaining=remaining)
    bench.submit(direction, 0, 1, 2)
    assert bench.flush(direction) == []
    assert near(bench, direction, 0.24) == []
    assert near(bench, direction, 0.25) == near(bench, direction, 0.374) == [0]
    assert near(bench, direction, 0.375) == near(bench, direction, 0.874) == [0, 1]
    assert near(bench, direction, 0.875) == [0, 1, 2]
    assert near(bench, other(direction), 1.0) == []


def test_only_what_is_under_way_is_nearly_done(bench: Bench) -> None:
    """Not what has ended, what has failed, nor what poll has returned or not collected yet."""
    slow = bench.backend.pendings[1] = ScriptedPending(remaining=0.0)
    bench.backend.errors[3] = ScriptedError()
    bench.submit(LOAD, 1, 2, 3)
    bench.engine.settle()
    assert near(bench, LOAD, 1.0) == [1]
    slow.ended.set()
    assert len(bench.poll(LOAD)) == 3
    assert near(bench, LOAD, 1.0) == []


def test_compute_is_held_for_copies_under_way(bench: Bench) -> None:
    first, second = ScriptedPending(), ScriptedPending()
    bench.backend.pendings |= {1: first, 3: second}
    bench.submit(LOAD, 1, 2, 3)
    assert bench.flush(LOAD) == []
    bench.engine.hold_compute(LOAD, {2, 3, 77})  # 2 has ended, 77 is nobody's
    bench.engine.hold_compute(STORE, {1})
    assert (first.num_holds, second.num_holds) == (0, 1)
    assert (first.num_waits, second.num_waits) == (0, 0)


# All of it at once


ENDS = st.sampled_from(["at once", "fails at once", "later", "fails later"])
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.sampled_from(Direction), ENDS),
        st.tuples(st.just("end one"), st.sampled_from(Direction), st.integers(0, 9)),
        st.tuples(st.just("poll"), st.sampled_from(Direction), st.none()),
    ),
    max_size=30,
)


@given(STEPS)
def test_every_transfer_ends_once_in_order_and_as_it_went(
    steps: list[tuple[str, Direction, object]],
) -> None:
    bench = Bench()
    expected: dict[Direction, list[tuple[int, BaseException | None]]] = {LOAD: [], STORE: []}
    found: dict[Direction, list[tuple[int, BaseException | None]]] = {LOAD: [], STORE: []}
    open_pendings: dict[Direction, list[ScriptedPending]] = {LOAD: [], STORE: []}
    for number, (step, direction, detail) in enumerate(steps):
        if step == "submit":
            assert isinstance(detail, str)
            error = ScriptedError(number) if "fails" in detail else None
            if "later" in detail:
                bench.backend.pendings[number] = ScriptedPending(error=error)
                open_pendings[direction].append(bench.backend.pendings[number])
            elif error is not None:
                bench.backend.errors[number] = error
            expected[direction].append((number, error))
            bench.submit(direction, number)
        elif step == "end one" and open_pendings[direction]:
            assert isinstance(detail, int)
            open_pendings[direction].pop(detail % len(open_pendings[direction])).ended.set()
        elif step == "poll":
            found[direction] += outcomes(bench.poll(direction))
            assert found[direction] == expected[direction][: len(found[direction])]
    for pending in bench.backend.pendings.values():
        pending.ended.set()
    for end in outcomes(bench.close()):
        found[LOAD if end in expected[LOAD] else STORE].append(end)
    assert found == expected
