"""A Ray cluster on this machine, for vLLM's Ray executor to run ranks on CPUs.

vLLM makes Ray place its workers on devices that Ray counts, and vLLM's CPU platform names no
device. With the name "GPU" the executor works: a Ray node may claim any number of GPUs, and vLLM's
platforms differ only in this name.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.engine.spec import EngineSpec


def count_cpu_workers_as_gpus() -> None:
    """Name the device. The driver calls it, and Ray in each process that it starts."""
    from vllm.platforms.cpu import CpuPlatform

    CpuPlatform.ray_device_key = "GPU"


@contextmanager
def cluster_for(spec: EngineSpec) -> Iterator[None]:
    """A node for the engine's workers, if Ray runs them. All its processes end with the context."""
    if spec.arguments.get("distributed_executor_backend") != "ray":
        yield
        return
    import ray

    count_cpu_workers_as_gpus()
    num_workers = spec.arguments["tensor_parallel_size"]
    options: dict[str, Any] = {"worker_process_setup_hook": count_cpu_workers_as_gpus}
    ray.init(
        num_cpus=num_workers + 1, num_gpus=num_workers, include_dashboard=False, runtime_env=options
    )
    try:
        yield
    finally:
        ray.shutdown()
