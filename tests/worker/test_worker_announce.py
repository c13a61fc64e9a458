"""OffloadWorker announces a load once, before its end, and makes compute wait for the rest."""

import math
from typing import Any

import pytest

from simple_offload.metadata import StepMetadata
from tests.worker.conftest import MakeRank
from tests.worker.rank import NOTHING, Rank, load
from tests.worker.scripted import ScriptedError

pytestmark = pytest.mark.usefixtures("no_thread_left", "machine")


def admit(rank: Rank, number: int, after: float) -> None:
    """Schedule the request of an announced load, and then end the load."""
    rank.now += after
    rank.step(StepMetadata(admitted=[number]))
    rank.backend.pendings[number].ended.set()
    rank.step()


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
    assert rank.step() == (set() if announced else {"r"}, set())


def test_what_is_left_of_earlier_loads_is_added(rank: Rank) -> None:
    """The device makes one copy after another. Copies that have ended or failed, or that are not
    yet submitted, do not count."""
    for number, remaining in enumerate((0.011, 0.009, 0.001)):
        rank.pend(number, remaining)
    rank.backend.errors[3] = ScriptedError()
    loads = [load(number, f"r{number}") for number in range(4)]
    assert rank.step(StepMetadata(loads)) == ({"r0", "r1"}, set())
    rank.backend.pendings[0].ended.set()
    assert rank.step() == ({"r2"}, set())
    rank.backend.release()
    assert rank.step() == ({"r3"}, {"r3"})


def check_lead(rank: Rank, number: int, seconds: float, *, computes: bool = False) -> None:
    """A step's load is announced when no more than ``seconds`` are left of it."""
    pending = rank.pend(number, seconds + 1e-4)
    step = StepMetadata([load(number, f"r{number}")], num_tokens=int(computes))
    assert rank.step(step) == NOTHING
    pending.remaining = seconds - 1e-4
    assert rank.worker.poll() == ({f"r{number}"}, set())


@pytest.mark.parametrize(
    ("num_steps", "length", "computes", "lead"),
    [
        (40, 0.003, True, 0.003),  # an announcement would make other requests wait as well
        (40, 0.003, False, 0.02),
        (1, 5.0, True, 0.005),  # a pause counts as 20 ms, and each step has a weight of a quarter
    ],
    ids=["beside compute", "without compute", "after a pause"],
)
def test_beside_compute_a_load_may_last_one_more_step(
    rank: Rank, num_steps: int, length: float, computes: bool, lead: float
) -> None:
    for _ in range(num_steps):
        rank.step(StepMetadata(num_tokens=1))
        rank.now += length
    check_lead(rank, 0, lead, computes=computes)


def test_a_load_that_ends_too_soon_shows_that_vllm_is_slower(rank: Rank) -> None:
    for number, after in enumerate((0.010, 0.001)):  # the second one has no effect
        pending = rank.announce(number)
        rank.now += after
        pending.ended.set()
        rank.step()
    check_lead(rank, 2, 0.025)


@pytest.mark.parametrize(
    ("lags", "lead"),
    [
        ([0.012, 0.008], 0.027),  # the mean of 6 and 8: 7
        ([5.0], 0.040),  # a request was kept waiting: counted as 40 ms, at half weight
    ],
)
def test_vllm_s_scheduling_time_is_added(rank: Rank, lags: list[float], lead: float) -> None:
    for number, after in enumerate(lags):
        rank.announce(number)
        admit(rank, number, after)
    check_lead(rank, len(lags), lead)


# Failures


@pytest.mark.parametrize("drained", [False, True])
def test_a_load_that_fails_after_its_announcement_ends_the_worker(
    rank: Rank, drained: bool
) -> None:
    """Compute has read the blocks, and cannot undo that."""
    pending = rank.announce(0)
    pending.error = ScriptedError()
    pending.ended.set()
    if drained:
        rank.worker.drain()
    with pytest.raises(RuntimeError, match="failed after it was announced") as caught:
        rank.step()
    assert caught.value.__cause__ is pending.error
