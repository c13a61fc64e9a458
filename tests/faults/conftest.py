"""Engines that several tests look at: each job runs once a session, when first asked for."""

from pathlib import Path

import pytest

from examples.random_model import Architecture
from tests.engine.harness import log_tail
from tests.engine.runs import Runs
from tests.engine.spec import Answer, EngineSpec
from tests.faults.async_scenario import ALL_LATE, AsyncResult
from tests.faults.children import run_scenarios, start_child
from tests.faults.live import ScenarioResult, with_faults
from tests.faults.plan import Fault
from tests.faults.scenarios import ONE_RANK

HOST_BLOCKS = 300
"""More than all phases together store."""


class FaultRuns:
    """Jobs of this session, kept under ``directory``."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._runs = Runs(directory)
        self._engines: dict[Architecture, dict[str, ScenarioResult]] = {}

    def engine(self, architecture: Architecture, scenario: str) -> ScenarioResult:
        """What an engine of this process' kind has gone through: "recompute" or "fail"."""
        return self._job(architecture)[scenario]

    def expected(self, architecture: Architecture = "llama") -> dict[str, Answer]:
        """Answers to all asks of all scenarios, from an engine without a connector."""
        return self._job(architecture)["plain"].phases["all"].answers

    def one_rank(self) -> tuple[ScenarioResult, str]:
        """ONE_RANK on two tensor parallel ranks, and the log of all processes."""
        spec = self._spec(
            "llama",
            "recompute",
            *ONE_RANK,
            tensor_parallel_size=2,
            distributed_executor_backend="mp",
        )
        directory = self._directory / "one-rank"
        result = run_scenarios(directory, {"one_rank": ("one_rank", spec)})["one_rank"]
        return result, (directory / "engine.log").read_text(errors="replace")

    def asynchronous(self) -> AsyncResult:
        """Pauses, sleep and resets of an AsyncLLM."""
        directory = self._directory / "async"
        directory.mkdir()
        spec_path, result_path = directory / "spec.json", directory / "result.json"
        spec_path.write_text(self._spec("llama", "recompute", *ALL_LATE).model_dump_json())
        module = "tests.faults.async_scenario"
        arguments = (str(spec_path), str(result_path))
        start_child(directory, module, *arguments, VLLM_ENABLE_V1_MULTIPROCESSING="1")
        return AsyncResult.model_validate_json(result_path.read_text())

    def log_tail(self, architecture: Architecture) -> str:
        """The end of what an architecture's engines have printed, for a message."""
        return log_tail(self._directory / architecture / "engine.log")

    def _job(self, architecture: Architecture) -> dict[str, ScenarioResult]:
        if architecture not in self._engines:
            plain = self._runs.spec(architecture, connector=None, rounds=())
            engines = {"plain": ("plain", plain)} | {
                scenario: (scenario, self._spec(architecture, scenario))
                for scenario in ("recompute", "fail")
            }
            directory = self._directory / architecture
            self._engines[architecture] = run_scenarios(directory, engines)
        return self._engines[architecture]

    def _spec(
        self, architecture: Architecture, policy: str, *faults: Fault, **arguments: object
    ) -> EngineSpec:
        return self._runs.spec(
            architecture,
            connector=with_faults(HOST_BLOCKS, faults),
            rounds=(),
            transfer_arguments={"kv_load_failure_policy": policy},
            **arguments,
        )


@pytest.fixture(scope="session")
def fault_runs(tmp_path_factory: pytest.TempPathFactory) -> FaultRuns:
    """The jobs of this session."""
    return FaultRuns(tmp_path_factory.mktemp("faults"))
