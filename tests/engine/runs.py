"""Models and engines that several tests look at: each is made once a session, when first used."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from examples.random_model import Architecture, save_random_model
from tests.engine.harness import DEADLINE_SECONDS, EngineJobFailed, run_engines
from tests.engine.spec import EngineResult, EngineSpec, Round
from tests.engine.workloads import full_workload

BLOCK_SIZE = 32

DEVICE_BLOCKS: Mapping[Architecture, int] = {"llama": 24, "qwen3": 24, "gemma3": 48}
"""One and a half requests' worth at most. Gemma's layers share a pool in three groups."""

HOST_BLOCKS = 800
"""More than all rounds together store."""

FEW_HOST_BLOCKS: Mapping[Architecture, int] = {"llama": 60, "qwen3": 60, "gemma3": 120}
"""So few that the host tier evicts too."""


class Trio(NamedTuple):
    """The same workload on three engines."""

    plain: EngineResult
    """Without the connector."""
    roomy: EngineResult
    """With a host tier that holds everything."""
    tight: EngineResult
    """With a host tier that evicts."""


class Runs:
    """Engines of this session. Everything is kept under ``directory``."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._models: dict[Architecture, Path] = {}
        self._trios: dict[Architecture, Trio] = {}
        self._failures: dict[str, EngineJobFailed] = {}

    def model(self, architecture: Architecture) -> Path:
        """A small random model."""
        if architecture not in self._models:
            directory = self.directory / f"model-{architecture}"
            self._models[architecture] = save_random_model(directory, architecture)
        return self._models[architecture]

    def spec(
        self,
        architecture: Architecture = "llama",
        *,
        connector: dict[str, Any] | None,
        rounds: tuple[Round, ...] | None = None,
        transfer_arguments: dict[str, Any] | None = None,
        **arguments: Any,
    ) -> EngineSpec:
        """An engine whose device pool is small; ``arguments`` are for EngineArgs."""
        usual = {
            "skip_tokenizer_init": True,
            "dtype": "float32",
            "enforce_eager": True,
            "block_size": BLOCK_SIZE,
            "max_model_len": 640,
            "max_num_seqs": 6,
            "max_num_batched_tokens": 256,
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

    def plain(self, architecture: Architecture = "llama") -> EngineResult:
        """The full workload without the connector."""
        return self.trio(architecture).plain

    def trio(self, architecture: Architecture) -> Trio:
        """The full workload without and with the connector."""
        if architecture not in self._trios:
            self._trios[architecture] = self.run_trio(architecture, full_workload())
        return self._trios[architecture]

    def run_trio(self, architecture: Architecture, rounds: tuple[Round, ...]) -> Trio:
        """Three engines in one child process, for rounds that no other test needs."""
        connectors = [
            None,
            {"num_cpu_blocks": HOST_BLOCKS},
            {"num_cpu_blocks": FEW_HOST_BLOCKS[architecture]},
        ]
        specs = [
            self.spec(architecture, connector=connector, rounds=rounds) for connector in connectors
        ]
        directory = self.directory / f"trio-{len(list(self.directory.glob('trio-*')))}"
        return Trio(*run_engines(directory, *specs))

    def run(
        self,
        name: str,
        specs: Mapping[str, EngineSpec],
        *,
        deadline: float = DEADLINE_SECONDS,
    ) -> dict[str, EngineResult]:
        """Run engines in one child process, by name, within ``deadline`` seconds in all. A job
        that has failed is not run again: that would take minutes, and overwrite its log."""
        if name in self._failures:
            raise self._failures[name]
        try:
            results = run_engines(self.directory / name, *specs.values(), deadline=deadline)
        except EngineJobFailed as failure:
            self._failures[name] = failure
            raise
        return dict(zip(specs, results, strict=True))
