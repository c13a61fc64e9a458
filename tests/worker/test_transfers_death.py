"""TransferEngine: a copy thread dies."""

import threading

import pytest

from simple_offload.backends.base import Direction
from simple_offload.worker import lane
from tests.conftest import PATIENCE_SECONDS
from tests.worker.scripted import (
    Bench,
    ScriptedError,
    ScriptedPending,
    copy_thread,
    join,
    outcomes,
)

pytestmark = pytest.mark.usefixtures("no_thread_left")

LOAD, STORE = Direction.LOAD, Direction.STORE
DEATHS = [SystemExit("told to"), KeyboardInterrupt(), GeneratorExit()]


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("death", DEATHS, ids=lambda death: type(death).__name__)
def test_what_a_dying_thread_leaves_behind_fails(
    bench: Bench, direction: Direction, death: BaseException
) -> None:
    bench.backend.errors[2] = death
    gate = bench.backend.gates[2] = threading.Event()
    thread = copy_thread(direction)
    bench.submit(direction, 1, 2, 3, 4)
    gate.set()  # all four have been submitted when it dies
    join(thread)
    ends = outcomes(bench.poll(direction))
    assert [number for number, _ in ends] == [1, 2, 3, 4]
    assert ends[:2] == [(1, None), (2, death)]
    for _, error in ends[2:]:
        assert isinstance(error, RuntimeError)
        assert "died" in str(error)
    assert 3 not in bench.backend.copied(direction)


def test_another_thread_takes_over_once(bench: Bench) -> None:
    bench.backend.errors |= {1: SystemExit(), 3: SystemExit()}
    bench.submit_fatal(LOAD, 1)
    bench.poll(LOAD)
    assert not bench.engine.broken
    bench.submit(LOAD, 2)
    assert outcomes(bench.flush(LOAD)) == [(2, None)]
    bench.submit_fatal(LOAD, 3)
    assert [number for number, _ in outcomes(bench.poll(LOAD))] == [3]
    assert bench.engine.broken


def break_loads(bench: Bench) -> None:
    """Let the thread that loads die for good."""
    bench.backend.errors |= {101: SystemExit(), 102: SystemExit()}
    for number in (101, 102):
        bench.submit_fatal(LOAD, number)
        assert [each.transfer.id for each in bench.poll(LOAD)] == [number]


def test_what_is_submitted_to_a_broken_direction_fails(bench: Bench) -> None:
    break_loads(bench)
    bench.submit(LOAD, 1, 2)
    ends = outcomes(bench.poll(LOAD))
    assert [number for number, _ in ends] == [1, 2]
    assert all(isinstance(error, lane.LaneBroken) for _, error in ends)
    assert bench.poll(LOAD) == []
    assert 1 not in bench.backend.copied(LOAD)


def test_the_other_direction_goes_on(bench: Bench) -> None:
    break_loads(bench)
    bench.submit(STORE, 1)
    assert outcomes(bench.flush(STORE)) == [(1, None)]
    bench.backend.errors[2] = ScriptedError()
    bench.submit(STORE, 2, 3)
    assert [number for number, _ in outcomes(bench.flush(STORE))] == [2, 3]


def test_copies_on_the_device_outlive_the_thread(bench: Bench) -> None:
    """Their bytes do arrive. Until then nothing after them is returned either."""
    pending = bench.backend.pendings[1] = ScriptedPending()
    bench.backend.errors[2] = SystemExit()
    bench.submit_fatal(STORE, 1, 2, 3)
    assert bench.poll(STORE) == []
    bench.submit(STORE, 4)
    pending.ended.set()
    ends = outcomes(bench.flush(STORE))
    assert [number for number, _ in ends] == [1, 2, 3, 4]
    assert [error is None for _, error in ends] == [True, False, False, True]


def test_a_thread_that_dies_of_entering(bench: Bench) -> None:
    death = SystemExit()
    bench.backend.enter_errors.append(death)
    bench.submit_fatal(LOAD, 1)
    assert outcomes(bench.poll(LOAD)) == [(1, death)]
    bench.submit(LOAD, 2)
    assert outcomes(bench.flush(LOAD)) == [(2, None)]


def test_a_death_is_noticed_while_the_thread_still_dies(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread has said that it is dead, and has not returned yet."""
    said, may_go_on = threading.Event(), threading.Event()
    dead = {}

    def say(life: object, value: bool) -> None:
        dead[life] = value
        if value:
            said.set()
            may_go_on.wait(PATIENCE_SECONDS)

    monkeypatch.setattr(
        lane._Life, "dead", property(lambda life: dead.get(life, False), say), raising=False
    )
    bench.backend.errors[1] = SystemExit()
    thread = copy_thread(STORE)
    bench.submit(STORE, 1)
    assert said.wait(PATIENCE_SECONDS)
    assert [number for number, _ in outcomes(bench.poll(STORE))] == [1]
    may_go_on.set()
    join(thread)  # an exception that it ended with fails the test
    bench.submit(STORE, 2)
    assert outcomes(bench.flush(STORE)) == [(2, None)]
