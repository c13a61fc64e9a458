"""Models and engines that tests share: each is made once a session, when first used."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from examples.random_model import Architecture, save_random_model
from tests.engine.harness import DEADLINE_SECONDS, EngineJobFailed, run_child
from tests.engine.spec import EngineResult, EngineSpec, Round
from tests.engine.workloads import COLD, LONG, full_workload

BLOCK_SIZE = 32

DEVICE_BLOCKS: Mapping[Architecture, int] = {"llama": 24, "qwen3": 24, "gemma3": 52}
"""Device blocks: enough for one and a half of the longest requests. Gemma's layers share a pool in
three groups."""

HOST_BLOCKS = 800
"""Host blocks: more than all rounds together store."""

NUM_AGAIN = 4
"""Number of COLD's requests that shorter rounds repeat. The last one shares its beginning with the
first."""


SMALL_STEPS: Mapping[str, Any] = {"max_num_seqs": 1}
"""EngineArgs that leave free blocks for the walk, while a request runs, but too few for the
workload: the device evicts."""


SALTED, SALTED_AGAIN, OTHER_SALT, EMPTIED = range(-4, 0)
"""Numbers of the tier's last rounds, from the end."""


class Engines(NamedTuple):
    """Engines of one child process."""

    plain: EngineResult
    """The full workload without the connector."""
    tier: EngineResult
    """With a host tier that holds everything: the full workload, then NUM_AGAIN requests with a
    salt, the same again, with another salt, and after a reset of both tiers."""
    control: EngineResult
    """A producer. Two rounds of NUM_AGAIN requests; the second one loads a corrupted host block."""
    lazy: EngineResult
    """A consumer: the full workload up to its long answers, stored at eviction."""
    refused: EngineResult
    """An engine whose connector has a misspelt key."""


class Runs:
    """Engines of this session. Everything is kept under ``directory``."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._results: dict[str, dict[str, EngineResult] | EngineJobFailed] = {}

    def model(self, architecture: Architecture, num_kv_heads: int = 2) -> Path:
        """A small random model."""
        directory = self.directory / f"model-{architecture}-{num_kv_heads}"
        if not directory.exists():
            save_random_model(directory, architecture, num_kv_heads=num_kv_heads)
        return directory

    def spec(
        self,
        architecture: Architecture = "gemma3",
        *,
        connector: dict[str, Any] | None,
        rounds: tuple[Round, ...] | None = None,
        transfer_arguments: dict[str, Any] | None = None,
        num_kv_heads: int = 2,
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
            self.model(architecture, num_kv_heads),
            usual | arguments,
            connector,
            transfer_arguments or {},
            full_workload() if rounds is None else rounds,
        )

    def engines(self, architecture: Architecture = "gemma3") -> Engines:
        """The engines that most tests of an architecture look at."""
        host = {"num_cpu_blocks": HOST_BLOCKS, "keep_on_device_reset": True}
        full = full_workload()
        few = full[COLD]._replace(asks=full[COLD].asks[:NUM_AGAIN])
        salted, other_salt = (
            few._replace(asks=tuple(ask._replace(cache_salt=salt) for ask in few.asks))
            for salt in ("a", "b")
        )
        isolated = (
            salted,
            salted._replace(reset="device"),
            other_salt._replace(reset="device"),
            few._replace(reset="both"),
        )
        control = (few, few._replace(reset="device", corrupt_a_block=True))
        specs = {
            "plain": self.spec(architecture, connector=None),
            "tier": self.spec(architecture, connector=host, rounds=(*full, *isolated)),
            "control": self.spec(
                architecture,
                connector=host,
                rounds=control,
                transfer_arguments={"kv_role": "kv_producer"},
            ),
            "lazy": self.spec(
                architecture,
                connector=host | {"lazy_offload": True},
                rounds=full[:LONG],
                transfer_arguments={"kv_role": "kv_consumer"},
                **SMALL_STEPS,
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
            are_eager = all(spec.arguments["enforce_eager"] for spec in specs.values())
            directory = self.directory / name
            try:
                results: list[EngineResult] = run_child(
                    directory,
                    "tests.engine.child:run_engines",
                    list(specs.values()),
                    deadline=deadline,
                    environment={} if are_eager else {"TORCHDYNAMO_DISABLE": "0"},
                )
                for result in results:
                    result.log = directory / "engine.log"
                self._results[name] = dict(zip(specs, results, strict=True))
            except EngineJobFailed as failure:
                self._results[name] = failure
        found = self._results[name]
        if isinstance(found, EngineJobFailed):
            raise found
        return found
