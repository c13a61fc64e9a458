"""CopyLane: copies start in order, and every transfer ends exactly once, after any failure."""

import sys
import threading
from types import FrameType
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simple_offload.backends.base import Direction
from simple_offload.worker import copy_lane
from simple_offload.worker.copy_lane import CopyLane, CopyThreadDied, LaneBroken
from tests.conftest import within_patience
from tests.worker.scripted import (
    Bench,
    EndsWhenWaitedFor,
    Outcomes,
    ScriptedBackend,
    ScriptedError,
    ScriptedPending,
    join,
)

pytestmark = pytest.mark.usefixtures("no_thread_left")

LOAD = Direction.LOAD


def kinds(outcomes: Outcomes) -> list[tuple[int, type[BaseException] | None]]:
    """The errors' types, which are those of the lane."""
    return [(number, type(error) if error is not None else None) for number, error in outcomes]


# Submission


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
    bench.backend.quick = {1, 2, 4, 5}
    pendings = {number: ScriptedPending() for number in (1, 2, 3)}
    bench.backend.pendings |= pendings
    error = bench.backend.errors[5] = ScriptedError()
    mark = object()
    bench.submit(1, barrier=mark)
    assert bench.backend.log == [("copy", LOAD, 1, mark, threading.current_thread().name)]
    bench.submit(2, 3)  # 2 is submitted behind another; 3 is not quick
    assert bench.flush() == []
    for pending in pendings.values():
        pending.ended.set()
    assert bench.flush() == [(1, None), (2, None), (3, None)]
    bench.submit(4)
    assert bench.poll() == [(4, None)]
    bench.submit(5)
    assert bench.poll() == [(5, error)]
    assert bench.backend.copied(LOAD) == [1, 2, 3, 4, 5]
    assert bench.backend.copied_quickly == [1, 4, 5]


def test_a_signal_during_a_quick_copy(bench: Bench) -> None:
    """vLLM's SIGTERM handler raises on the engine's thread. Closing does not wait for a copy that
    the handler has stopped."""
    bench.backend.quick = {1}
    bench.backend.errors[1] = SystemExit()
    with pytest.raises(SystemExit):
        bench.submit(1)
    within_patience(bench.lane.close)
    assert bench.poll() == []


def test_a_signal_at_any_line_of_the_lane(no_thread_left: None) -> None:
    """Closing ends all the same, whatever news of the copy thread is lost."""
    num_lines, has_ended = 0, False
    while not has_ended:
        bench, left, tracer = Bench(), num_lines, sys.gettrace()

        def trace(frame: FrameType, event: str, _: object) -> Any:
            nonlocal left
            if frame.f_code.co_filename == copy_lane.__file__:
                left -= event == "line"
                if left < 0:
                    raise SystemExit
            return trace

        sys.settrace(trace)
        try:
            bench.submit(1)
            bench.flush()
            has_ended = True
        except SystemExit:
            num_lines += 1
        finally:
            sys.settrace(tracer)
        within_patience(bench.lane.close)
    assert num_lines > 20


# Layer groups


@pytest.fixture
def by_layer(bench: Bench) -> ScriptedPending:
    """Load 1, of whose four groups the device has accepted one. The gate of the second is closed:
    the first is nearly done."""
    pending = bench.backend.pendings[1] = ScriptedPending(remaining=4.0, remaining_first=1.0)
    bench.backend.group_gates[1, 2] = threading.Event()
    bench.submit(1, by_layer=True)
    while not bench.lane.nearly_done(1.0, lambda load: 3.0):
        bench.poll()
    return pending


@pytest.mark.proves("I3")
def test_compute_begins_before_the_last_group_is_accepted(
    bench: Bench, by_layer: ScriptedPending
) -> None:
    """The others are expected to take as long. Each group is waited for once it is accepted."""
    assert bench.lane.nearly_done(0.9, lambda load: 3.1) == []
    assert bench.lane.nearly_done(1.0, lambda load: 2.9) == []
    bench.lane.hold_compute({1}, 1)
    assert by_layer.log == [("hold", 1)]
    by_layer.ended.set()
    assert bench.poll() == []  # the groups that the device has are done
    threading.Timer(0.01, bench.backend.group_gates[1, 2].set).start()
    bench.lane.hold_compute({1}, 3)
    bench.lane.hold_compute({1}, 4)
    assert by_layer.log == [("hold", 1), ("hold", 3), ("hold", 4)]
    assert bench.flush() == [(1, None)]


def test_a_group_that_the_device_refuses(bench: Bench, by_layer: ScriptedPending) -> None:
    """No compute may read the load. It fails when the groups before have ended: its blocks are
    given to others then."""
    error = bench.backend.group_errors[1, 2] = ScriptedError()
    threading.Timer(0.01, bench.backend.group_gates[1, 2].set).start()
    with pytest.raises(RuntimeError, match="failed after it was announced") as caught:
        bench.lane.hold_compute({1}, 4)
    assert caught.value.__cause__ is error
    assert bench.lane.nearly_done(1.0, lambda load: 3.0) == []
    assert bench.poll() == []
    by_layer.ended.set()
    assert bench.poll() == [(1, error)]


# Death of the thread


def test_a_thread_that_cannot_enter_tries_again_unless_it_dies(bench: Bench) -> None:
    bench.backend.enter_errors = [SystemExit(), ScriptedError()]
    bench.submit(1, 2, 3)
    assert kinds(bench.flush()) == [(1, ScriptedError), (2, SystemExit), (3, CopyThreadDied)]
    assert bench.lane.is_broken
    assert bench.backend.copied(LOAD) == []


@pytest.mark.proves("I5")
@pytest.mark.parametrize("death", [SystemExit(), KeyboardInterrupt(), GeneratorExit()], ids=repr)
def test_copies_that_a_dying_thread_leaves_fail(
    bench: Bench, death: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    bench.backend.errors[2] = death
    gate = bench.backend.gates[2] = threading.Event()
    bench.submit(1, 2, 3, 4)
    gate.set()  # all four are submitted when it dies
    join(bench.thread)
    found = bench.poll()
    assert found[:2] == [(1, None), (2, death)]
    assert kinds(found[2:]) == [(3, CopyThreadDied), (4, CopyThreadDied)]
    assert bench.lane.is_broken
    bench.submit(5, 6)  # every later one fails too
    assert kinds(bench.poll()) == [(5, LaneBroken), (6, LaneBroken)]
    entered = ("enter", LOAD, bench.thread.name)  # once, before the first copy
    assert [entry for entry in bench.backend.log if entry[0] == "enter"] == [entered]
    assert bench.backend.copied(LOAD) == [1, 2]
    assert caplog.text.count("The load thread has died: no more copies") == 1


# Draining


def test_draining_waits_for_thread_and_device(bench: Bench) -> None:
    late, bad = EndsWhenWaitedFor(remaining=0.0), EndsWhenWaitedFor(error=ScriptedError())
    bench.backend.pendings |= {1: late, 2: bad}
    bench.submit(1, 2)
    bench.lane.drain()
    assert late.log == bad.log == [("wait",)]
    assert (
        bench.lane.nearly_done(1.0, lambda load: 0.0) == []
    )  # nothing is left to announce or to wait for
    bench.lane.hold_compute({1}, 4)
    assert late.log == [("wait",)]
    assert bench.poll() == [(1, None), (2, bad.error)]
    bench.backend.errors[3] = SystemExit()
    bench.submit(3, 4)
    bench.lane.drain()  # with a dead thread
    assert kinds(bench.poll()) == [(3, SystemExit), (4, CopyThreadDied)]


# Everything together


ENDS = st.sampled_from(
    [
        *("at once", "fails at once", "quick", "later", "fails later", "dies"),
        *("later, by layer", "fails later, by layer", "second layer group fails"),
    ]
)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), ENDS),
        st.tuples(st.just("end one"), st.integers(0, 9)),
        st.tuples(st.sampled_from(["poll", "flush"]), st.none()),
    ),
    max_size=30,
)


def write_script(backend: ScriptedBackend, number: int, end: str) -> BaseException | None:
    """Have a transfer end like this. Returns its error."""
    error: BaseException | None = ScriptedError(number) if "fails" in end else None
    if end == "quick":
        backend.quick.add(number)
    if end == "second layer group fails":
        backend.pendings[number] = ScriptedPending()
        backend.group_errors[number, 2] = cast(ScriptedError, error)
    elif "later" in end:
        backend.pendings[number] = ScriptedPending(error=error)
    elif end == "dies":
        error = backend.errors[number] = SystemExit(number)
    elif error is not None:
        backend.errors[number] = error
    return error


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
            error = write_script(bench.backend, number, detail)
            open_pendings += filter(None, [bench.backend.pendings.get(number)])
            expected.append((number, error))
            bench.submit(number, by_layer="layer" in detail)
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
