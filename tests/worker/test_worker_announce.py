"""OffloadWorker announces a load once, before its end, and makes compute wait for the rest.

test_copy_lane.py shows which copies are nearly done.
"""

import math
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.kv_cache_interface import KVCacheConfig

from simple_offload.backends.base import Direction
from simple_offload.metadata import StepMetadata
from tests.worker.conftest import MakeRank
from tests.worker.rank import LoggedPending, Rank, load, store
from tests.worker.scripted import ScriptedError

pytestmark = pytest.mark.usefixtures("no_thread_left", "machine")

LOAD, STORE = Direction.LOAD, Direction.STORE
NOTHING: tuple[set[str], set[str]] = (set(), set())


def ended(rank: Rank) -> dict[int, int]:
    """The transfers that the rank reports as ended."""
    report = rank.worker.drain_report()
    return dict(report.ended) if report is not None else {}


# When


@pytest.mark.parametrize(
    ("extra_config", "remaining", "announced"),
    [
        ({}, 0.0, True),
        ({}, 0.02, True),
        ({}, 0.02001, False),
        ({}, math.inf, False),  # compute cannot wait for it
        ({"sync_load_ms": 30}, 0.03, True),
        ({"sync_load_ms": 29}, 0.03, False),
        ({"sync_load_ms": 0}, 0.0, False),
    ],
)
def test_a_load_is_announced_when_little_is_left(
    make_rank: MakeRank, extra_config: dict[str, Any], remaining: float, announced: bool
) -> None:
    rank = make_rank(**extra_config)
    pending = rank.pend(0, remaining)
    assert rank.step(StepMetadata([load(0, "r")])) == ({"r"} if announced else set(), set())
    pending.ended.set()
    assert rank.step(StepMetadata()) == (set() if announced else {"r"}, set())


@pytest.mark.proves("I3")
def test_with_states_nothing_is_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM moves a request's state before the step's hooks run."""
    monkeypatch.setattr(KVCacheConfig, "has_mamba_layers", True)
    rank = Rank(monkeypatch)
    rank.register()
    try:
        pending = rank.pend(0, 0.0)
        assert rank.step(StepMetadata([load(0, "r")])) == NOTHING
        pending.ended.set()
        assert rank.step(StepMetadata()) == ({"r"}, set())
    finally:
        rank.close()


def test_beside_compute_a_load_may_last_one_more_step(rank: Rank) -> None:
    """An announcement would make other requests wait as well."""
    pending = rank.pend(0, 0.0031)
    for loads in [], [], [], [], [], [], [], [], [], [load(0, "r")]:
        rank.now += 0.003
        assert rank.step(StepMetadata(loads, computes=True)) == NOTHING
    rank.now += 0.003
    pending.remaining = 0.0025
    assert rank.step(StepMetadata(computes=True)) == ({"r"}, set())


def test_without_compute_the_length_of_steps_does_not_matter(rank: Rank) -> None:
    rank.pend(0, 0.019)
    rank.step(StepMetadata(computes=True))
    rank.now += 0.003
    assert rank.step(StepMetadata([load(0, "r")])) == ({"r"}, set())


def test_vllm_s_scheduling_time_is_added(rank: Rank) -> None:
    announce(rank, 0)
    admit(rank, 0, after=0.012)
    announce(rank, 1)
    admit(rank, 1, after=0.008)  # the mean of 6 and 8: 7
    pending = rank.pend(2, 0.0271)
    assert rank.step(StepMetadata([load(2, "r2")])) == NOTHING
    pending.remaining = 0.0269
    assert rank.step(StepMetadata()) == ({"r2"}, set())


def test_a_load_that_ends_too_soon_shows_that_vllm_is_slower(rank: Rank) -> None:
    for number, after in enumerate((0.010, 0.001)):  # the second one has no effect
        pending = announce(rank, number)
        rank.now += after
        pending.ended.set()
        rank.step(StepMetadata())
    pending = rank.pend(2, 0.0251)
    assert rank.step(StepMetadata([load(2, "r2")])) == NOTHING
    pending.remaining = 0.0249
    assert rank.step(StepMetadata()) == ({"r2"}, set())


def test_a_request_that_is_kept_waiting_counts_for_little(rank: Rank) -> None:
    announce(rank, 0)
    admit(rank, 0, after=5.0)  # counted as 40 ms, at half weight
    pending = rank.pend(1, 0.0401)
    assert rank.step(StepMetadata([load(1, "r1")])) == NOTHING
    pending.remaining = 0.0399
    assert rank.step(StepMetadata()) == ({"r1"}, set())


def test_a_pause_does_not_count_as_a_long_step(rank: Rank) -> None:
    """It counts as a step of 20 ms, and each step has a weight of a quarter."""
    pending = rank.pend(0, 0.0051)
    rank.step(StepMetadata(computes=True))
    rank.now += 5.0
    assert rank.step(StepMetadata([load(0, "r")], computes=True)) == NOTHING
    pending.remaining = 0.0049
    assert rank.worker.poll() == ({"r"}, set())


def announce(rank: Rank, number: int) -> LoggedPending:
    """Announce a load that has not ended."""
    pending = rank.pend(number, 0.0)
    assert rank.step(StepMetadata([load(number, f"r{number}")]))[0] == {f"r{number}"}
    return pending


def admit(rank: Rank, number: int, after: float) -> None:
    """Schedule the request of an announced load, and then end the load."""
    rank.now += after
    rank.step(StepMetadata(admitted=[number]))
    rank.backend.pendings[number].ended.set()
    rank.step(StepMetadata())


# Which transfers


def test_stores_are_not_announced(rank: Rank) -> None:
    pending = rank.pend(0, 0.0)
    assert rank.step(StepMetadata(stores=[store(0)])) == NOTHING
    assert ended(rank) == {}
    pending.ended.set()
    rank.step(StepMetadata())
    assert ended(rank) == {0: 1}


# Once


def test_an_announced_load_is_reported_at_its_end_and_not_named_again(rank: Rank) -> None:
    pending = rank.pend(0, 0.0)
    assert rank.step(StepMetadata([load(0, "r")])) == ({"r"}, set())
    assert ended(rank) == {}
    assert rank.step(StepMetadata(admitted=[0])) == NOTHING
    assert ended(rank) == {}
    pending.ended.set()
    assert rank.step(StepMetadata()) == NOTHING
    assert ended(rank) == {0: 1}
    assert rank.step(StepMetadata()) == NOTHING
    assert not rank.worker._announcements._under_way


def test_an_announced_load_that_is_drained_is_not_named_again(rank: Rank) -> None:
    pending = rank.pend(0, 0.0)
    assert rank.step(StepMetadata([load(0, "r")])) == ({"r"}, set())
    pending.ended.set()
    rank.worker.drain()
    assert rank.step(StepMetadata(admitted=[0])) == NOTHING
    assert ended(rank) == {0: 1}
    assert pending.num_holds == 0  # nothing was left to wait for


@given(st.data())
def test_each_request_is_named_once_whenever_its_load_ends(data: st.DataObject) -> None:
    num_loads = 4
    with pytest.MonkeyPatch.context() as patched:
        rank = Rank(patched)
        rank.register()
        try:
            named: Counter[str] = Counter()
            reported: Counter[int] = Counter()
            pendings = [rank.pend(number, 1.0) for number in range(num_loads)]
            steps = data.draw(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=12))
            loads = [load(number, f"r{number}") for number in range(num_loads)]
            everything_ends = [(number, True) for number in range(num_loads)]
            for number, ends in [*steps, *everything_ends]:
                pendings[number].remaining = 0.0
                if ends:
                    pendings[number].ended.set()
                loaded, failed = rank.step(StepMetadata(loads))
                named.update(loaded)
                reported.update(ended(rank))
                assert failed == set()
                # In order of submission: poll returns an end after all earlier ones.
                over = [pending.ended.is_set() for pending in pendings]
                seen = over.index(False) if False in over else num_loads
                assert reported == dict.fromkeys(range(seen), 1)
            assert named == {f"r{number}": 1 for number in range(num_loads)}
        finally:
            rank.close()


# Waiting


def test_compute_waits_before_anything_else_of_the_step(rank: Rank) -> None:
    """So that work behind this step's barriers also runs after the admitted load."""
    rank.pend(0, 0.0)
    rank.step(StepMetadata([load(0, "r")]))
    del rank.backend.log[:]
    rank.step(StepMetadata([load(1, "s")], [store(2)], admitted=[0]))
    kinds = [entry[:2] if entry[0] == "hold" else entry[0] for entry in rank.backend.log]
    assert kinds[:2] == [("hold", 0), "barrier"]
    assert sorted(str(kind) for kind in kinds[2:] if kind != "enter") == [
        "barrier",
        "copy",
        "copy",
    ]


# Failures


@pytest.mark.parametrize("drained", [False, True])
def test_a_load_that_fails_after_its_announcement_ends_the_worker(
    rank: Rank, drained: bool
) -> None:
    """Compute has read the blocks, and cannot undo that."""
    pending = rank.pend(0, 0.0)
    assert rank.step(StepMetadata([load(0, "r")])) == ({"r"}, set())
    pending.error = ScriptedError()
    pending.ended.set()
    if drained:
        rank.worker.drain()
    with pytest.raises(RuntimeError, match="failed after it was announced") as caught:
        rank.step(StepMetadata())
    assert caught.value.__cause__ is pending.error


def test_a_load_that_fails_before_its_announcement_fails_one_request(rank: Rank) -> None:
    pending = rank.pend(0, 1.0)
    rank.pend(1, 0.0)
    assert rank.step(StepMetadata([load(0, "r"), load(1, "s")])) == NOTHING
    pending.error = ScriptedError()
    pending.ended.set()
    assert rank.step(StepMetadata()) == ({"r", "s"}, {"r"})
