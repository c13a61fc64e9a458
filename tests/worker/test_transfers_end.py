"""TransferEngine: settling, draining and closing."""

import threading

import pytest

from simple_offload.backends.base import Direction
from tests.worker.scripted import (
    Bench,
    EndsWhenWaitedFor,
    ScriptedError,
    ScriptedPending,
    copy_thread,
    join,
    outcomes,
)

pytestmark = pytest.mark.usefixtures("no_thread_left")

LOAD, STORE = Direction.LOAD, Direction.STORE


# Settling


def test_settling_waits_for_the_threads(bench: Bench) -> None:
    gate = bench.backend.gates[1] = threading.Event()
    bench.submit(LOAD, 1)
    bench.submit(STORE, 2, 3)
    called = threading.Event()

    def open_gate() -> None:
        called.wait()
        gate.set()

    opener = threading.Thread(target=open_gate)
    opener.start()
    called.set()
    bench.engine.settle()
    assert outcomes(bench.engine.poll(LOAD)) == [(1, None)]
    assert outcomes(bench.engine.poll(STORE)) == [(2, None), (3, None)]
    opener.join()


def test_settling_does_not_wait_for_the_device(bench: Bench) -> None:
    bench.backend.pendings[1] = ScriptedPending()
    bench.submit(STORE, 1)
    bench.engine.settle()
    assert bench.backend.copied(STORE) == [1]
    assert bench.engine.poll(STORE) == []


def test_settling_with_a_dead_thread(bench: Bench) -> None:
    bench.backend.errors |= {1: SystemExit(), 3: SystemExit()}
    bench.submit(STORE, 1, 2)
    bench.engine.settle()
    assert [number for number, _ in outcomes(bench.engine.poll(STORE))] == [1, 2]
    bench.submit(STORE, 3)
    bench.engine.settle()
    assert [number for number, _ in outcomes(bench.engine.poll(STORE))] == [3]
    bench.submit(STORE, 4)
    bench.engine.settle()
    assert [number for number, _ in outcomes(bench.engine.poll(STORE))] == [4]


# Draining


def test_draining_waits_for_threads_and_device(bench: Bench) -> None:
    late, bad = EndsWhenWaitedFor(), EndsWhenWaitedFor(error=ScriptedError())
    bench.backend.pendings |= {2: late, 3: bad}
    bench.submit(LOAD, 1)
    bench.submit(STORE, 2, 3)
    bench.engine.drain()
    assert (late.num_waits, bad.num_waits) == (1, 1)
    assert outcomes(bench.poll(LOAD)) == [(1, None)]
    assert outcomes(bench.poll(STORE)) == [(2, None), (3, bad.error)]
    assert bench.poll(STORE) == []
    bench.submit(STORE, 4)
    assert outcomes(bench.flush(STORE)) == [(4, None)]


def test_draining_with_a_dead_thread(bench: Bench) -> None:
    bench.backend.errors[1] = SystemExit()
    bench.submit(STORE, 1, 2)
    bench.engine.drain()
    assert [number for number, _ in outcomes(bench.poll(STORE))] == [1, 2]


def test_what_was_drained_needs_no_waiting_for(bench: Bench) -> None:
    pending = bench.backend.pendings[1] = EndsWhenWaitedFor()
    pending.remaining = 0.0
    bench.submit(LOAD, 1)
    bench.engine.drain()
    assert bench.engine.nearly_done(LOAD, 1.0) == []
    bench.engine.hold_compute(LOAD, {1})
    assert pending.num_holds == 0
    assert outcomes(bench.poll(LOAD)) == [(1, None)]


def test_draining_nothing(bench: Bench) -> None:
    bench.engine.drain()
    bench.close()
    bench.engine.drain()


# Closing


def test_closing_returns_what_poll_had_not(bench: Bench) -> None:
    device_error = ScriptedError()
    bench.backend.errors[3] = copy_error = ScriptedError()
    late = bench.backend.pendings[4] = ScriptedPending()
    bad = bench.backend.pendings[5] = ScriptedPending(error=device_error)
    bench.submit(LOAD, 1, 2)
    bench.submit(STORE, 3, 4, 5, 6)
    late.ended.set()
    bad.ended.set()
    assert sorted(outcomes(bench.close()), key=lambda end: end[0]) == [
        (1, None),
        (2, None),
        (3, copy_error),
        (4, None),
        (5, device_error),
        (6, None),
    ]
    assert bench.poll(LOAD) == bench.poll(STORE) == []


def test_closing_waits_for_copies_that_run(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread's copy ends only when somebody waits for the thread."""
    gate = bench.backend.gates[1] = threading.Event()
    bench.submit(STORE, 1, 2)
    bench.wait_started(1)
    join_thread = threading.Thread.join

    def open_gate_and_join(thread: threading.Thread, timeout: float | None = None) -> None:
        if "store" in thread.name:
            gate.set()
        join_thread(thread, timeout)

    monkeypatch.setattr(threading.Thread, "join", open_gate_and_join)
    assert outcomes(bench.close()) == [(1, None), (2, None)]
    assert bench.backend.copied(STORE) == [1, 2]
    assert bench.backend.log[-1] == ("close",)


def test_closing_waits_for_copies_on_the_device(bench: Bench) -> None:
    """And only then gives up what they read and write."""
    log = bench.backend.log
    bench.backend.pendings[1] = EndsWhenWaitedFor(log)
    bench.submit(LOAD, 1)
    assert outcomes(bench.close()) == [(1, None)]
    assert log[-2:] == [("waited",), ("close",)]


def test_closing_twice(bench: Bench) -> None:
    bench.submit(LOAD, 1)
    assert len(bench.close()) == 1
    assert bench.close() == []
    assert bench.backend.log.count(("close",)) == 1


def test_nothing_is_taken_after_the_end(bench: Bench) -> None:
    bench.close()
    for direction in Direction:
        with pytest.raises(RuntimeError, match="closed"):
            bench.submit(direction, 1)
    assert bench.backend.copied(LOAD) == []


def test_closing_without_a_transfer(bench: Bench) -> None:
    assert bench.close() == []
    assert bench.backend.log == [("close",)]


@pytest.mark.parametrize("num_deaths", [1, 2])
def test_closing_after_a_death_that_nobody_has_seen(bench: Bench, num_deaths: int) -> None:
    bench.backend.errors = {number: SystemExit() for number in range(num_deaths)}
    for number in range(num_deaths):
        bench.engine.settle()
        bench.submit_fatal(STORE, number, number + 10)
    ends = outcomes(bench.close())
    wanted = set(range(num_deaths)) | {number + 10 for number in range(num_deaths)}
    assert {number for number, _ in ends} == wanted
    assert None not in [error for _, error in ends]
    assert bench.backend.log[-1] == ("close",)


def test_a_copy_that_never_ends_keeps_its_memory(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closing gives up on the thread, not on what the thread writes to."""
    gate = bench.backend.gates[1] = threading.Event()
    bench.submit(STORE, 1)
    bench.submit(LOAD, 2)
    bench.wait_started(1)
    thread, join_thread = copy_thread(STORE), threading.Thread.join

    def give_up_on_stores(waited_for: threading.Thread, timeout: float | None = None) -> None:
        if waited_for is not thread:
            join_thread(waited_for, timeout)

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "join", give_up_on_stores)
        ends = bench.close()
    log = list(bench.backend.log)
    gate.set()
    join(thread)
    assert (2, None) in outcomes(ends)
    assert ("close",) not in log
