"""vLLM's server engine (AsyncLLM): pauses, sleep, resets and a shutdown with copies in flight."""

import pytest

from tests.engine.compare import differences
from tests.faults.async_scenario import ASKED, AsyncResult
from tests.faults.conftest import FaultRuns
from tests.faults.scenarios import new_asks

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def result(fault_runs: FaultRuns) -> AsyncResult:
    """The child process ended by itself and left no process: the shutdown works."""
    return fault_runs.asynchronous()


def test_every_request_ends(fault_runs: FaultRuns, result: AsyncResult) -> None:
    expected = fault_runs.expected()
    for number, (name, phase) in enumerate(result.phases.items(), start=1):
        asked = {ask.id for ask in (*ASKED, *new_asks(number))}
        assert phase.reasons.keys() == asked
        found = differences([{id: expected[id] for id in phase.answers}], [phase.answers])
        assert not found, f"{name}: {found}"
        ends = set(phase.reasons.values())
        assert ends <= ({"length", "abort"} if name.endswith("aborted") else {"length"}), name


def test_no_device_block_is_held(result: AsyncResult) -> None:
    assert all(phase.free for phase in result.phases.values())


@pytest.mark.parametrize("requests", ["kept", "awaited", "aborted"])
def test_nothing_is_computed_during_a_pause(result: AsyncResult, requests: str) -> None:
    facts = result.phases[f"paused, requests {requests}"].facts
    assert facts["paused"] is True
    assert facts["tokens_while_paused"] == 0


def test_requests_are_aborted_by_a_pause(result: AsyncResult) -> None:
    reasons = result.phases["paused, requests aborted"].reasons
    assert "abort" in reasons.values()


@pytest.mark.parametrize("requests", ["awaited", "aborted"])
def test_a_request_that_came_during_a_pause_is_answered(
    fault_runs: FaultRuns, result: AsyncResult, requests: str
) -> None:
    facts = result.phases[f"paused, requests {requests}"].facts
    assert facts["late_answer"]["tokens"] == fault_runs.expected()[ASKED[0].id].tokens


def test_sleep_and_wake(result: AsyncResult) -> None:
    facts = result.phases["asleep"].facts
    assert facts == {"asleep": True, "still_asleep": False}


def test_a_pause_that_clears_and_keeps_requests(result: AsyncResult) -> None:
    """The call may be refused. The engine pauses in any case, then continues with right answers
    (see above)."""
    facts = result.phases["paused, requests kept, caches cleared"].facts
    assert facts["paused"] is True
    assert facts["refused"] == "" or "Failed to reset KV cache" in facts["refused"]


def test_resets_are_refused_while_blocks_are_held(result: AsyncResult) -> None:
    """The engine continues with right answers (see above)."""
    assert result.phases["both reset"].facts["reset"] is False
    assert "Failed to reset KV cache" in result.phases["running requests reset"].facts["reset"]
