"""Scenarios of engines whose copies fail: ``python -m tests.faults.scenarios JOB RESULT`` runs some
of them one after another (see tests/faults/conftest.py)."""

import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path

from pydantic import BaseModel

from simple_offload.backends.base import Direction
from tests.engine.harness import prepare_child
from tests.engine.requests import clean_up_process
from tests.engine.spec import Ask, EngineSpec
from tests.engine.workloads import shared_prefix_asks
from tests.faults.live import LiveEngine, ScenarioResult
from tests.faults.plan import Fault

NEVER = 10**9
"""Number of polls of a transfer that ends only when it is waited for."""

OLD = shared_prefix_asks("old", seed=6, tails=3, max_tokens=12)
"""Requests of every phase: they hit on the device or the host, or are recomputed."""


def new_asks(phase: int) -> tuple[Ask, ...]:
    """Requests of one phase only: their blocks have to be stored."""
    return shared_prefix_asks(
        f"new{phase}", seed=100 + phase, system_lengths=(140, 75), tails=2, max_tokens=6
    )


def plain(engine: LiveEngine) -> None:
    """All requests of the other scenarios, once."""
    engine.play(OLD)
    for number in range(1, 11):
        engine.play(new_asks(number))
    engine.end_phase("all")


def recompute(engine: LiveEngine) -> None:
    """Failed and late copies, resets, pauses and aborts, then the death of a copy thread. Failed
    loads are recomputed."""
    engine.play(OLD)
    engine.end_phase("no fault")

    engine.reset_device()
    engine.inject(
        Fault(direction="load", action="fail", first=1, every=3),
        Fault(direction="load", action="fail", first=3, every=3, polls=3),
        Fault(direction="store", action="fail", first=2, every=3),
        Fault(direction="store", action="fail", first=3, every=3, polls=4),
    )
    engine.play((*OLD, *new_asks(1)))
    engine.end_phase("copies fail")

    engine.inject()
    engine.reset_device()
    engine.inject(
        Fault(direction="load", action="delay", every=1, polls=6),
        Fault(direction="store", action="delay", every=1, polls=9),
    )
    engine.play((*new_asks(2), *OLD))
    engine.end_phase("copies are late")

    _resets(engine)
    _pauses(engine)
    _aborts(engine)
    _thread_death(engine)


def _resets(engine: LiveEngine) -> None:
    stores_hang = Fault(direction="store", action="delay", every=1, polls=60)
    loads_hang = Fault(direction="load", action="delay", every=1, polls=60)

    engine.inject(stores_hang)
    engine.play(new_asks(3))
    num_storing, refused = engine.num_storing(), engine.reset()
    engine.drain()
    engine.end_phase(
        "device reset while storing",
        num_storing=num_storing,
        reset=refused,
        reset_at_rest=engine.reset(),
    )

    engine.inject(stores_hang)
    engine.play(new_asks(4))
    num_storing, refused = engine.num_storing(), engine.reset(both=True)
    engine.end_phase("both reset while storing", num_storing=num_storing, reset=refused)

    engine.inject()
    engine.play(OLD)
    engine.reset_device()
    engine.inject(loads_hang)
    engine.submit(OLD)
    engine.step_until(engine.num_loading)
    num_loading, refused = engine.num_loading(), engine.reset(both=True)
    engine.end_phase("both reset while loading", num_loading=num_loading, reset=refused)

    engine.inject()
    engine.play(OLD)
    engine.reset_device()
    engine.inject(stores_hang, loads_hang)
    engine.submit((*new_asks(5), *OLD))
    engine.step_until(lambda: engine.num_loading() and engine.num_storing())
    raised = engine.reset(both=True, running=True)
    engine.end_phase("running requests reset while copying", reset=raised)

    engine.inject()
    engine.submit((*new_asks(6), *OLD))
    engine.step_until(lambda: len(engine.scheduler.running) > 1)
    engine.step_until(lambda: engine.num_in_flight == 0)
    engine.end_phase(
        "running requests reset",
        num_running=len(engine.scheduler.running),
        reset=engine.reset(both=True, running=True),
        num_cached=engine.num_cached(),
    )


def _pauses(engine: LiveEngine) -> None:
    engine.inject()
    engine.play(OLD)
    engine.reset_device()
    engine.inject(
        Fault(direction="load", action="delay", every=1, polls=5),
        Fault(direction="store", action="delay", every=1, polls=5),
    )
    engine.submit((*new_asks(7), *OLD))
    engine.step_until(lambda: engine.num_loading() and engine.num_storing())
    engine.core.pause_scheduler("keep", clear_cache=False)
    num_in_flight = engine.num_in_flight
    # Only the connector's work keeps a paused engine stepping.
    num_outputs = 0
    while engine.scheduler.has_requests():
        num_outputs += engine.step()
    left_in_flight = engine.num_in_flight
    engine.core.resume_scheduler()
    engine.end_phase(
        "pause while copying",
        num_in_flight=num_in_flight,
        num_outputs=num_outputs,
        left_in_flight=left_in_flight,
    )


def _aborts(engine: LiveEngine) -> None:
    engine.reset_device()
    engine.inject(
        Fault(direction="load", action="fail", first=1, every=2, polls=30),
        Fault(direction="load", action="delay", first=2, every=2, polls=30),
        Fault(direction="store", action="fail", every=1, polls=30),
    )
    engine.submit((*new_asks(8), *OLD))
    engine.step_until(lambda: engine.num_loading() and engine.num_storing())
    engine.abort_all()
    engine.end_phase("aborted while copying")
    engine.inject()
    engine.play(OLD)
    engine.end_phase("after the aborts")


def _thread_death(engine: LiveEngine) -> None:
    engine.reset_device()
    engine.inject(Fault(direction="load", action="kill", first=2))
    engine.play((*OLD, *new_asks(9)))
    assert engine.offload is not None
    engine.end_phase("a thread dies", switched_off=engine.offload.switched_off)

    engine.inject()
    engine.reset_device()
    engine.play((*OLD, *new_asks(10)))
    engine.end_phase(
        "switched off",
        num_copies={way.value: engine.backend.num_copies[way] for way in Direction},
        reset=engine.reset(both=True),
    )


def fail(engine: LiveEngine) -> None:
    """A failed load ends its request. Then a shutdown with copies that end only when waited for."""
    engine.play(OLD)
    engine.end_phase("no fault")

    engine.reset_device()
    engine.inject(
        Fault(direction="load", action="fail", first=2),
        Fault(direction="load", action="fail", first=4, polls=3),
        Fault(direction="store", action="fail", every=2),
    )
    engine.play((*OLD, *new_asks(1)))
    engine.end_phase("loads fail")

    engine.inject()
    engine.reset_device()
    engine.play((*OLD, *new_asks(2)))
    engine.end_phase("asked again")

    engine.reset_device()
    engine.inject(
        Fault(direction="load", action="delay", every=1, polls=NEVER),
        Fault(direction="store", action="delay", every=1, polls=NEVER),
    )
    engine.submit(new_asks(3)[:1])
    engine.step_until(engine.num_storing)
    engine.submit(OLD)
    engine.step_until(engine.num_loading)
    engine.set_last_facts(num_loading=engine.num_loading(), num_storing=engine.num_storing())


ONE_RANK = (
    Fault(direction="load", action="fail", first=2, every=4, times=2, rank=1),
    Fault(direction="load", action="fail", first=3, every=4, times=2, polls=3, rank=1),
    Fault(direction="load", action="delay", every=1, times=9, polls=2, rank=0),
    Fault(direction="store", action="fail", first=3, every=4, times=4, polls=2, rank=1),
    Fault(direction="store", action="delay", first=2, every=2, times=8, polls=3, rank=1),
    Fault(direction="store", action="kill", first=32, rank=1),
)
"""Rank 1 fails while rank 0 is late, and the reverse; in the end rank 1 stores no more."""


def one_rank(engine: LiveEngine) -> None:
    """The faults are those of the configuration (ONE_RANK): the ranks are other processes."""
    assert engine.offload is not None
    engine.play(OLD[:6])
    engine.end_phase("no fault on a load")
    for number in range(1, 6):
        engine.reset_device()
        engine.play((*OLD[:6], *new_asks(number)))
        engine.end_phase(f"round {number}", switched_off=engine.offload.switched_off)


SCENARIOS: dict[str, Callable[[LiveEngine], None]] = {
    scenario.__name__: scenario for scenario in (plain, recompute, fail, one_rank)
}


class Job(BaseModel):
    """Engines of one child process, one after another: scenario and specification by name."""

    engines: dict[str, tuple[str, EngineSpec]]


class JobResult(BaseModel):
    """Results by name of the engine."""

    results: dict[str, ScenarioResult]


def run(scenario: str, spec: EngineSpec) -> ScenarioResult:
    """Start the engine, play the scenario, shut it down twice."""
    result = ScenarioResult()
    threads_before = set(threading.enumerate())
    try:
        engine = LiveEngine(spec, result)
        connector = engine.connector
        try:
            SCENARIOS[scenario](engine)
        finally:
            engine.shut_down()
            if connector is not None and connector.faults is not None:
                connector.shutdown()
                result.num_open_copies = connector.faults.num_open
            engine.shut_down()
    except Exception:  # noqa: BLE001 - the test that reads the result judges it
        result.error = traceback.format_exc()
    survivors = set(threading.enumerate()) - threads_before
    result.surviving_threads = sorted(thread.name for thread in survivors)
    return result


def main(job_path: Path, result_path: Path) -> None:
    """Run a job."""
    prepare_child()
    job = Job.model_validate_json(job_path.read_text())
    results = {}
    for name, (scenario, spec) in job.engines.items():
        results[name] = run(scenario, spec)
        clean_up_process()
    result_path.write_text(JobResult(results=results).model_dump_json())


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
