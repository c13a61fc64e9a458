"""ModelBytes: KV bytes of a token, as vLLM plans them for a model's config.json."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from simple_offload.child import ask
from simple_offload.config import ConfigError

_SECONDS = 300


class GroupBytes(NamedTuple):
    """A KV cache group. Its blocks are as large as those of all groups."""

    kind: str
    """"chain", "window", "chunk" or "state"."""
    num_layers: int
    block_tokens: int
    num_boundary_blocks: int
    """Blocks that a hit needs at its end; 0 for a chain, of which it needs all."""
    num_host_copies: int
    """Host blocks of the whole server for a block of the group. 0: the host tier has none."""


@dataclass(frozen=True)
class ModelBytes:
    """The plan of a model on ``num_ranks`` tensor parallel ranks, one host memory for all."""

    architecture: str
    platform: str
    """vLLM's name of the device that the plan is for."""
    num_ranks: int
    num_sharing: int
    """Ranks that share a copy in host memory, at least of some groups."""
    block_bytes: int
    """Of a block of any group, on a rank."""
    groups: tuple[GroupBytes, ...]
    """Those that can be found again."""

    @property
    def token_per_rank(self) -> float:
        """Device bytes of a token on each rank, in chained groups."""
        return sum(self.block_bytes / group.block_tokens for group in self._chains)

    @property
    def token_on_devices(self) -> float:
        """Device bytes of a token on all ranks, in chained groups."""
        return self.token_per_rank * self.num_ranks

    @property
    def token_in_host(self) -> float:
        """Host bytes of a token, in chained groups."""
        return sum(
            self.block_bytes * group.num_host_copies / group.block_tokens for group in self._chains
        )

    @property
    def boundary_per_rank(self) -> int:
        """Device bytes of the windows and states at the end of a prefix, on each rank."""
        return self.block_bytes * sum(group.num_boundary_blocks for group in self.groups)

    @property
    def boundary_in_host(self) -> int:
        """Host bytes of the windows and states at the end of a prefix."""
        return self.block_bytes * sum(
            group.num_boundary_blocks * group.num_host_copies for group in self.groups
        )

    @property
    def _chains(self) -> list[GroupBytes]:
        return [group for group in self.groups if group.kind == "chain"]


def plan_model(
    config: Path,
    tensor_parallel_size: int = 1,
    kv_cache_dtype: str = "auto",
    block_size: int | None = None,
    speculative_config: Mapping[str, Any] | None = None,
) -> ModelBytes:
    """The plan of a model's ``config`` (config.json, or the folder with it), and of its drafter,
    without weights. The options are vLLM's. vLLM plans for the platform that it is built for, its
    CPU build for CUDA, in a process of its own: an import may end it. Raises ConfigError with
    vLLM's reason."""
    given = {
        "config": str(_check(config)),
        "tensor_parallel_size": tensor_parallel_size,
        "kv_cache_dtype": kv_cache_dtype,
        "block_size": block_size,
        "speculative_config": speculative_config,
    }
    plan, end = ask("simple_offload.sizing.planning", given, _SECONDS)
    if not isinstance(plan, dict):
        raise ConfigError(f"--model={str(config)!r}: vLLM does not plan it: {plan or end}")
    return parse_plan(plan)


def parse_plan(plan: dict[str, Any]) -> ModelBytes:
    """What ``planning.describe`` has returned."""
    return ModelBytes(**plan | {"groups": tuple(GroupBytes(*group) for group in plan["groups"])})


def _check(config: Path) -> Path:
    """The file, which is a JSON object with architectures."""
    file = config / "config.json" if config.is_dir() else config
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(content, dict) and content.get("architectures"):
            return file
        problem = "no architectures"
    except OSError as error:
        problem = str(error.strerror)
    except ValueError as error:
        problem = f"not JSON: {error}"
    raise ConfigError(
        f"--model={str(config)!r}: {problem}. Allowed: a model's config.json, which has "
        '"architectures", or the folder with it'
    )
