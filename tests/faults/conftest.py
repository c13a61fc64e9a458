"""Engines that tests share: each job runs once a session, when first used."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from examples.random_model import Architecture
from tests.engine.harness import log_tail, run_child
from tests.engine.runs import Runs
from tests.engine.spec import Answer, EngineSpec
from tests.faults.async_scenario import ALL_LATE, AsyncResult
from tests.faults.live import ScenarioResult, with_faults
from tests.faults.plan import Fault
from tests.faults.scenarios import ONE_RANK, Job, JobResult

HOST_BLOCKS = 300
"""Host blocks: more than all phases together store."""


class FaultRuns:
    """Jobs of this session, kept under ``directory``."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._runs = Runs(directory)
        self._engines: dict[Architecture, dict[str, ScenarioResult]] = {}

    def engine(self, architecture: Architecture, scenario: str) -> ScenarioResult:
        """The result of a scenario on an engine with one rank: "recompute" or "fail"."""
        return self._job(architecture)[scenario]

    def expected(self, architecture: Architecture = "gemma3") -> dict[str, Answer]:
        """Answers to the requests of all scenarios, from an engine without a connector."""
        return self._job(architecture)["plain"].phases["all"].answers

    def one_rank(self) -> tuple[ScenarioResult, str]:
        """ONE_RANK on two tensor parallel ranks, and the log of all processes."""
        spec = self._spec(
            "gemma3",
            "recompute",
            *ONE_RANK,
            tensor_parallel_size=2,
            distributed_executor_backend="mp",
        )
        directory = self._directory / "one-rank"
        result = _run_scenarios(directory, {"one_rank": ("one_rank", spec)})["one_rank"]
        return result, (directory / "engine.log").read_text(errors="replace")

    def asynchronous(self) -> AsyncResult:
        """Pauses, sleep, resets and a shutdown of an AsyncLLM."""
        directory = self._directory / "async"
        directory.mkdir()
        spec_path, result_path = directory / "spec.json", directory / "result.json"
        spec_path.write_text(self._spec("gemma3", "recompute", *ALL_LATE).model_dump_json())
        run_child(
            directory,
            "tests.faults.async_scenario",
            spec_path,
            result_path,
            VLLM_ENABLE_V1_MULTIPROCESSING="1",
        )
        return AsyncResult.model_validate_json(result_path.read_text())

    def log_tail(self, architecture: Architecture) -> str:
        """The end of the log of an architecture's engines."""
        return log_tail(self._directory / architecture / "engine.log")

    def _job(self, architecture: Architecture) -> dict[str, ScenarioResult]:
        if architecture not in self._engines:
            plain = self._runs.spec(architecture, connector=None, rounds=())
            engines = {"plain": ("plain", plain)} | {
                scenario: (scenario, self._spec(architecture, scenario))
                for scenario in ("recompute", "fail")
            }
            directory = self._directory / architecture
            self._engines[architecture] = _run_scenarios(directory, engines)
        return self._engines[architecture]

    def _spec(
        self, architecture: Architecture, policy: str, *faults: Fault, **arguments: object
    ) -> EngineSpec:
        return self._runs.spec(
            architecture,
            connector=with_faults(HOST_BLOCKS, faults),
            rounds=(),
            transfer_arguments={
                "kv_connector_module_path": "tests.faults.connector",
                "kv_load_failure_policy": policy,
            },
            **arguments,
        )


def _run_scenarios(
    directory: Path, engines: Mapping[str, tuple[str, EngineSpec]]
) -> dict[str, ScenarioResult]:
    """Run (scenario, engine) pairs one after another in one child process. Raises EngineJobFailed.

    ``directory`` keeps the job, the results and the engines' log.
    """
    directory.mkdir(parents=True, exist_ok=True)
    job_path, result_path = directory / "job.json", directory / "result.json"
    job_path.write_text(Job(engines=dict(engines)).model_dump_json())
    run_child(directory, "tests.faults.scenarios", job_path, result_path)
    return JobResult.model_validate_json(result_path.read_text()).results


@pytest.fixture(scope="session")
def fault_runs(tmp_path_factory: pytest.TempPathFactory) -> FaultRuns:
    """The jobs of this session."""
    return FaultRuns(tmp_path_factory.mktemp("faults"))
