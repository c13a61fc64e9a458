"""Ranks: how many there are, and where."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import ParallelConfig


@dataclass(frozen=True)
class Ranks:
    """Of one engine, unless said otherwise."""

    num: int
    """They share ``cpu_bytes_to_use``."""
    num_here: int
    """On this machine, of all engines that this server has there."""
    are_alike: bool = True
    """Whether all have the same layers, and so room for as many host blocks."""

    @classmethod
    def of(cls, parallel: "ParallelConfig") -> "Ranks":
        """As vLLM 0.32 and 0.33 place them (vllm/config/parallel.py)."""
        from vllm.platforms import current_platform  # doctor works without vLLM

        num_local = parallel.local_world_size
        if parallel.distributed_executor_backend == "ray":
            # Ray chooses the nodes. What of them is here has a device here.
            num_local = min(num_local, max(1, current_platform.device_count()))
        # An engine of a dense model is told that it is the only one (vLLM's
        # reconfigure_for_independent_dp_rank), and which one of this machine: the last knows all.
        last = (parallel.data_parallel_rank_local or 0) + 1
        num_engines = max(parallel.data_parallel_size_local, last)
        return cls(
            num=parallel.world_size,
            num_here=num_local * num_engines,
            are_alike=parallel.pipeline_parallel_size == 1,
        )
