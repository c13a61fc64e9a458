"""A Ray cluster on this machine, for vLLM's Ray executor to run ranks on CPUs.

vLLM makes Ray place its workers on devices that Ray counts, and vLLM's CPU platform names no
device. With the name "GPU" the executor works: a Ray node may claim any number of GPUs, and vLLM's
platforms differ only in this name.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

IS_INSTALLED = find_spec("ray") is not None


def count_cpu_workers_as_gpus() -> None:
    """Name the device. The driver calls it, and Ray in each process that it starts."""
    from vllm.platforms.cpu import CpuPlatform

    CpuPlatform.ray_device_key = "GPU"


@contextmanager
def local_cluster(num_workers: int) -> Iterator[None]:
    """A node with room for ``num_workers`` workers; all its processes end with the context."""
    import ray

    count_cpu_workers_as_gpus()
    options: dict[str, Any] = {"worker_process_setup_hook": count_cpu_workers_as_gpus}
    ray.init(
        num_cpus=num_workers + 1,
        num_gpus=num_workers,
        include_dashboard=False,
        runtime_env=options,
    )
    try:
        yield
    finally:
        ray.shutdown()
