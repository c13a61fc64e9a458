"""Runs scenarios in a child process, with a deadline, and leaves no process behind."""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.engine.harness import (
    GRACE_SECONDS,
    ROOT,
    EngineJobFailed,
    engine_environment,
    kill_session,
    log_tail,
    processes_left,
    wait_for,
)
from tests.engine.spec import EngineSpec
from tests.faults.live import ScenarioResult
from tests.faults.scenarios import Job, JobResult

DEADLINE_SECONDS = 280.0


def run_scenarios(
    directory: Path, engines: Mapping[str, tuple[str, EngineSpec]]
) -> dict[str, ScenarioResult]:
    """Run (scenario, engine) pairs one after another in one child process.

    ``directory`` keeps the job, the result and ``engine.log``. Raises EngineJobFailed, with the
    end of the log, when there is no result in time or when a process outlives the child.
    """
    directory.mkdir(parents=True, exist_ok=True)
    job_path, result_path = directory / "job.json", directory / "result.json"
    job_path.write_text(Job(engines=dict(engines)).model_dump_json())
    start_child(directory, "tests.faults.scenarios", str(job_path), str(result_path))
    return JobResult.model_validate_json(result_path.read_text()).results


def start_child(directory: Path, module: str, *arguments: str, **environment: str) -> None:
    """Run ``module`` to its end, whose output goes to ``engine.log``. Raises EngineJobFailed."""
    log_path = directory / "engine.log"
    with log_path.open("wb") as log:
        child = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            cwd=ROOT,
            env=engine_environment(**environment),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        status = wait_for(child, DEADLINE_SECONDS)
    finally:
        left = processes_left(child.pid, within=GRACE_SECONDS if child.returncode == 0 else 0)
        kill_session(child.pid)
        child.wait()
    if status != 0 or left:
        problem = "no end in time" if status is None else f"status {status}"
        raise EngineJobFailed(f"{problem}, processes left: {left}\n{log_tail(log_path)}")
