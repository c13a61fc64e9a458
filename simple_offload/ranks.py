"""Ranks: how many an engine has, and how many of them share this machine."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import ParallelConfig


@dataclass(frozen=True)
class Ranks:
    """Ranks of one engine, and of this machine."""

    num: int
    """Ranks of the engine; they share ``cpu_bytes_to_use``."""
    num_here: int
    """Ranks on this machine, of all engines of the server."""
    are_alike: bool = True
    """Whether all ranks of the engine have the same layers and the same machine, and so as many
    host blocks."""
    num_local: int | None = None
    """Ranks of the engine on this machine. None: all."""

    @classmethod
    def from_config(cls, parallel: "ParallelConfig") -> "Ranks":
        """The ranks as vLLM 0.30 to 0.33 place them (vllm/config/parallel.py)."""
        from vllm.platforms import current_platform  # doctor works without vLLM

        num_local = parallel.local_world_size
        by_ray = parallel.distributed_executor_backend == "ray"
        if by_ray:
            # Ray chooses the nodes. Each rank on this machine has a device here.
            num_local = min(num_local, max(1, current_platform.device_count()))
        # vLLM configures an engine of a dense model as if it were the only one
        # (reconfigure_for_independent_dp_rank), but leaves its number on this machine: the last
        # engine sees the full count.
        last = (parallel.data_parallel_rank_local or 0) + 1
        num_engines = max(parallel.data_parallel_size_local, last)
        return cls(
            num=parallel.world_size,
            num_here=num_local * num_engines,
            # The same answer in every process of the engine, so without num_local.
            are_alike=parallel.pipeline_parallel_size == 1
            and parallel.world_size == (1 if by_ray else parallel.local_world_size),
            num_local=None if num_local == parallel.world_size else num_local,
        )
