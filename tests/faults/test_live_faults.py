"""vLLM's engine while copies fail, are late, or lose their threads: the answers do not change, no
block stays referenced, and the log names the failures."""

import re

import pytest

from examples.random_model import Architecture
from tests.engine.compare import differences
from tests.engine.spec import Answer
from tests.faults.conftest import FaultRuns
from tests.faults.live import Phase, ScenarioResult
from tests.faults.scenarios import OLD, new_asks

NEW_IN = {
    "copies fail": 1,
    "copies are late": 2,
    "device reset while storing": 3,
    "both reset while storing": 4,
    "running requests reset while copying": 5,
    "running requests reset": 6,
    "pause while copying": 7,
    "aborted while copying": 8,
    "a thread dies": 9,
    "switched off": 10,
}
"""Number of the new requests in a phase of "recompute"."""

QUIET = ("no fault", "copies are late", "after the aborts", "switched off")
RESETS = (
    "device reset while storing",
    "both reset while storing",
    "both reset while loading",
    "running requests reset while copying",
    "running requests reset",
    "pause while copying",
)

architectures = pytest.mark.parametrize(
    "architecture", ["gemma3", pytest.param("llama", marks=pytest.mark.slow)]
)


def ids(*numbers: int) -> set[str]:
    """Ids of new requests."""
    return {ask.id for number in numbers for ask in new_asks(number)}


def assert_right(phase: Phase, expected: dict[str, Answer]) -> None:
    found = differences([{ask_id: expected[ask_id] for ask_id in phase.answers}], [phase.answers])
    assert not found, "\n".join(found)


def assert_at_rest(result: ScenarioResult) -> None:
    """Every phase ended with all blocks free and consistent state; no thread is left."""
    assert result.error is None, result.error
    for name, phase in result.phases.items():
        assert not any(phase.held.values()), f"{name}: blocks held: {phase.held}"
        assert phase.integrity_problem is None, f"{name}: {phase.integrity_problem}"
    assert result.surviving_threads == []


def num_lines(phase: Phase, pattern: str) -> int:
    return sum(re.search(pattern, line) is not None for line in phase.log)


def played(fault_runs: FaultRuns, architecture: Architecture, scenario: str) -> ScenarioResult:
    """The result of a scenario that has ended."""
    result = fault_runs.engine(architecture, scenario)
    assert result.error is None, f"{result.error}\n{fault_runs.log_tail(architecture)}"
    return result


@pytest.fixture
def recompute(fault_runs: FaultRuns, architecture: Architecture) -> ScenarioResult:
    return played(fault_runs, architecture, "recompute")


@pytest.fixture
def fail(fault_runs: FaultRuns, architecture: Architecture) -> ScenarioResult:
    return played(fault_runs, architecture, "fail")


@pytest.mark.proves("I5")
@architectures
def test_every_request_gets_its_answer(
    fault_runs: FaultRuns, architecture: Architecture, recompute: ScenarioResult
) -> None:
    expected = fault_runs.expected(architecture)
    for name, phase in recompute.phases.items():
        assert phase.errors == []
        assert_right(phase, expected)
        asked = ids(NEW_IN[name]) if name in NEW_IN else set()
        if name not in {"device reset while storing", "both reset while storing"}:
            asked |= {ask.id for ask in OLD}
        if name == "aborted while copying":
            assert phase.answers.keys() < asked
        else:
            assert phase.answers.keys() == asked, name


@pytest.mark.proves("I7")
@architectures
def test_nothing_is_held_at_rest(recompute: ScenarioResult, fail: ScenarioResult) -> None:
    assert_at_rest(recompute)
    assert_at_rest(fail)


@architectures
def test_both_kinds_of_copies_have_failed(recompute: ScenarioResult) -> None:
    injected = recompute.phases["copies fail"].injected
    assert injected["load fail"] >= 3
    assert injected["store fail"] >= 3
    late = recompute.phases["copies are late"].injected
    assert late["load delay"] >= 3
    assert late["store delay"] >= 3


@architectures
def test_the_log_names_every_failed_copy(recompute: ScenarioResult) -> None:
    for name in ("copies fail", "aborted while copying"):
        phase = recompute.phases[name]
        for kind in ("load", "store"):
            count = phase.injected[f"{kind} fail"]
            assert count > 0
            assert num_lines(phase, rf"^{kind} \d+ of \d+ blocks failed .*InjectedError") == count
            assert num_lines(phase, rf"^{kind.title()} \d+ failed on a rank: ") == count
        assert not any("\n" in line for line in phase.log)


@architectures
def test_the_log_is_silent_where_nothing_fails(recompute: ScenarioResult) -> None:
    for name in (*QUIET, *RESETS):
        assert recompute.phases[name].log == [], name


@architectures
def test_a_reset_while_stores_are_under_way(recompute: ScenarioResult) -> None:
    device = recompute.phases["device reset while storing"]
    assert device.facts["num_storing"] > 0
    assert device.facts["reset"] is False, "vLLM empties a cache whose blocks are being stored"
    assert device.facts["reset_at_rest"] is True
    assert device.num_cached > recompute.phases["copies are late"].num_cached
    both = recompute.phases["both reset while storing"]
    assert both.facts["num_storing"] > 0
    assert both.facts["reset"] is False
    assert both.num_cached == 0, "a store that was in flight at the reset was committed after it"


@architectures
def test_a_reset_while_loads_are_under_way(recompute: ScenarioResult) -> None:
    phase = recompute.phases["both reset while loading"]
    assert phase.facts["num_loading"] > 0
    assert phase.facts["reset"] is False


@architectures
def test_a_reset_of_running_requests(recompute: ScenarioResult) -> None:
    phase = recompute.phases["running requests reset"]
    assert phase.facts["num_running"] > 1
    assert phase.facts["reset"] is True
    assert phase.facts["num_cached"] == 0
    # vLLM preempts running requests, but does not wait for transfers.
    refused = recompute.phases["running requests reset while copying"]
    assert "Failed to reset KV cache" in refused.facts["reset"]


@architectures
def test_during_a_pause_transfers_end_and_nothing_else_runs(recompute: ScenarioResult) -> None:
    facts = recompute.phases["pause while copying"].facts
    assert facts["num_in_flight"] > 1
    assert facts["num_outputs"] == 0
    assert facts["left_in_flight"] == 0


@architectures
def test_a_thread_that_dies_switches_the_tier_off(recompute: ScenarioResult) -> None:
    died = recompute.phases["a thread dies"]
    assert died.injected["load kill"] == 1
    assert num_lines(died, "^The load thread has died: no more copies$") == 1
    assert num_lines(died, r"^load \d+ of \d+ blocks failed .*SystemExit") == 1
    assert num_lines(died, "the host tier is switched off") == 1
    assert died.facts["switched_off"] is True
    assert died.num_cached == 0
    after = recompute.phases["switched off"]
    assert after.facts["num_copies"] == {"load": 0, "store": 0}
    assert after.facts["reset"] is True, "a disabled tier prevents a reset"


@architectures
def test_under_fail_a_failed_load_ends_its_request_in_an_error(
    fault_runs: FaultRuns, architecture: Architecture, fail: ScenarioResult
) -> None:
    expected = fault_runs.expected(architecture)
    phase = fail.phases["loads fail"]
    assert phase.injected["load fail"] == 2
    assert len(set(phase.errors)) == 2
    assert phase.answers.keys() | set(phase.errors) == {ask.id for ask in OLD} | ids(1)
    assert phase.answers.keys().isdisjoint(phase.errors)
    assert_right(phase, expected)
    again = fail.phases["asked again"]
    assert again.errors == [], "blocks that could not be read have been offered again"
    assert again.answers.keys() == {ask.id for ask in OLD} | ids(2)
    assert_right(again, expected)
    assert again.log == []


@architectures
def test_shutdown_waits_for_copies_under_way(fail: ScenarioResult) -> None:
    """The copies end only when waited for. Every engine here is shut down twice."""
    assert fail.last_facts["num_loading"] > 0
    assert fail.last_facts["num_storing"] > 0
    assert fail.num_open_copies == 0
    assert fail.surviving_threads == []


@pytest.mark.slow
def test_faults_on_one_rank_only(fault_runs: FaultRuns) -> None:
    result, log = fault_runs.one_rank()
    assert_at_rest(result)
    for phase in result.phases.values():
        assert phase.errors == []
        assert len(phase.answers) >= 6
        assert_right(phase, fault_runs.expected())
    injected = re.findall(r"Worker_TP(\d).*Injected: (\w+) \d+, (\w+)", log)
    assert {rank for rank, *_ in injected} == {"1"}
    kinds = {(direction, action) for _, direction, action in injected}
    assert kinds == {("load", "fail"), ("store", "fail"), ("store", "kill")}
    assert re.findall(r"Worker_TP(\d).*The store thread has died", log) == ["1"]
    switched_off = [phase.facts.get("switched_off") for phase in result.phases.values()]
    assert switched_off[-1] is True, "the death came too late for this test"
    assert False in switched_off
    assert list(result.phases.values())[-1].num_cached == 0
