"""Models and engines that tests share: each is made once a session, when first used."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from examples.random_model import Architecture, save_random_model
from tests.engine.harness import DEADLINE_SECONDS, EngineJobFailed, run_child
from tests.engine.spec import EngineResult, EngineSpec, Job, JobResult, Round
from tests.engine.workloads import COLD, full_workload

BLOCK_SIZE = 32

DEVICE_BLOCKS: Mapping[Architecture, int] = {"llama": 24, "qwen3": 24, "gemma3": 52}
"""Device blocks: enough for one and a half of the longest requests. Gemma's layers share a pool in
three groups."""

HOST_BLOCKS = 800
"""Host blocks: more than all rounds together store."""

NUM_AGAIN = 4
"""Number of COLD's requests that shorter rounds repeat. The last one shares its beginning with the
first."""


def small_steps(architecture: Architecture = "gemma3") -> dict[str, Any]:
    """EngineArgs of a device with more free blocks than lazy stores look ahead, but too few for the
    workload."""
    return {
        "max_num_seqs": 1,
        "num_gpu_blocks_override": 4 * DEVICE_BLOCKS[architecture],
    }


class Engines(NamedTuple):
    """Engines of one child process."""

    plain: EngineResult
    """The full workload without the connector."""
    tier: EngineResult
    """The full workload, then ``_isolated_rounds``, with a host tier that holds everything."""
    control: EngineResult
    """Two rounds of NUM_AGAIN requests; the second one loads a corrupted host block."""
    lazy: EngineResult
    """The full workload with lazy stores."""
    refused: EngineResult
    """An engine whose connector has a misspelt key."""


class Runs:
    """Engines of this session. Everything is kept under ``directory``."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._models: dict[Architecture, Path] = {}
        self._results: dict[str, dict[str, EngineResult] | EngineJobFailed] = {}

    def model(self, architecture: Architecture) -> Path:
        """A small random model."""
        if architecture not in self._models:
            directory = self.directory / f"model-{architecture}"
            self._models[architecture] = save_random_model(directory, architecture)
        return self._models[architecture]

    def spec(
        self,
        architecture: Architecture = "gemma3",
        *,
        connector: dict[str, Any] | None,
        rounds: tuple[Round, ...] | None = None,
        transfer_arguments: dict[str, Any] | None = None,
        **arguments: Any,
    ) -> EngineSpec:
        """An engine with a small device pool; ``arguments`` are for EngineArgs. Without ``rounds``:
        the full workload."""
        usual = {
            "skip_tokenizer_init": True,
            "dtype": "float32",
            "enforce_eager": True,
            "block_size": BLOCK_SIZE,
            "max_model_len": 512,
            "max_num_seqs": 6,
            # As long as any prompt. With longer prompts and sliding windows, vLLM reserves too few
            # blocks for requests that load, which then may wait for each other's blocks.
            "max_num_batched_tokens": 512,
            "num_gpu_blocks_override": DEVICE_BLOCKS[architecture],
            "disable_log_stats": False,
        }
        return EngineSpec(
            model=self.model(architecture),
            arguments=usual | arguments,
            connector=connector,
            transfer_arguments=transfer_arguments or {},
            rounds=full_workload() if rounds is None else rounds,
        )

    def plain(self, architecture: Architecture = "gemma3") -> EngineResult:
        """The full workload without the connector."""
        return self.engines(architecture).plain

    def engines(self, architecture: Architecture) -> Engines:
        """The engines that most tests of an architecture look at."""
        host = {"num_cpu_blocks": HOST_BLOCKS}
        full = full_workload()
        isolated, control = _isolated_rounds(full[COLD]), _control_rounds(full[COLD])
        specs = {
            "plain": self.spec(architecture, connector=None),
            "tier": self.spec(architecture, connector=host, rounds=(*full, *isolated)),
            "control": self.spec(architecture, connector=host, rounds=control),
            "lazy": self.spec(
                architecture, connector=host | {"lazy_offload": True}, **small_steps(architecture)
            ),
            "refused": self.spec(architecture, connector={"cpu_byte_to_use": "1GiB"}),
        }
        return Engines(**self.run(f"engines-{architecture}", specs))

    def run(
        self,
        name: str,
        specs: Mapping[str, EngineSpec],
        *,
        deadline: float = DEADLINE_SECONDS,
    ) -> dict[str, EngineResult]:
        """Run engines in one child process, by name, within ``deadline`` seconds in all; once per
        ``name``. Raises EngineJobFailed, again if the job has failed before."""
        if name not in self._results:
            try:
                results = run_engines(self.directory / name, *specs.values(), deadline=deadline)
            except EngineJobFailed as failure:
                self._results[name] = failure
            else:
                self._results[name] = dict(zip(specs, results, strict=True))
        found = self._results[name]
        if isinstance(found, EngineJobFailed):
            raise found
        return found


def run_engines(
    directory: Path, *specs: EngineSpec, deadline: float = DEADLINE_SECONDS
) -> list[EngineResult]:
    """Run the engines one after another in one child process. Raises EngineJobFailed.

    ``directory`` keeps the job, the results and the engines' log.
    """
    directory.mkdir(parents=True, exist_ok=True)
    job_path, result_path = directory / "job.json", directory / "result.json"
    job_path.write_text(Job(engines=specs).model_dump_json())
    environment = {}
    if not all(spec.arguments["enforce_eager"] for spec in specs):
        environment["TORCHDYNAMO_DISABLE"] = "0"
    log = run_child(
        directory,
        "tests.engine.child",
        job_path,
        result_path,
        deadline=deadline,
        **environment,
    )
    results = JobResult.model_validate_json(result_path.read_text()).results
    return [result.model_copy(update={"log": log}) for result in results]


SALTED, SALTED_AGAIN, OTHER_SALT, EMPTIED = range(-4, 0)
"""Numbers of the isolated rounds, from the end."""


def _isolated_rounds(cold: Round) -> tuple[Round, ...]:
    """A few requests with a salt, the same again, with another salt, and after a reset of both
    tiers."""

    def again(salt: str | None, reset: Any) -> Round:
        asks = (ask.model_copy(update={"cache_salt": salt}) for ask in cold.asks[:NUM_AGAIN])
        return Round(asks=tuple(asks), together=False, reset=reset)

    return again("a", "none"), again("a", "device"), again("b", "device"), again(None, "both")


def _control_rounds(cold: Round) -> tuple[Round, ...]:
    """A few requests twice; the second time from host memory with one wrong block."""
    few = cold.model_copy(update={"asks": cold.asks[:NUM_AGAIN]})
    return few, few.model_copy(update={"reset": "device", "corrupt_a_block": True})
