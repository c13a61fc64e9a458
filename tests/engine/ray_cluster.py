"""A Ray cluster on this machine, for vLLM's Ray executor to run ranks on CPUs.

vLLM lets Ray place its workers on devices that Ray counts, and its CPU platform names none. Told
that they are called "GPU", of which a Ray node may claim to have any number, the executor works:
what differs between platforms is only how Ray counts.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

IS_INSTALLED = find_spec("ray") is not None


def let_ray_count_cpu_workers() -> None:
    """Name the device. Called in the driver and, by Ray, in each process that it starts."""
    from vllm.platforms.cpu import CpuPlatform

    CpuPlatform.ray_device_key = "GPU"


@contextmanager
def local_cluster(num_workers: int) -> Iterator[None]:
    """A node with room for ``num_workers`` workers; gone, processes and all, afterwards."""
    import ray

    let_ray_count_cpu_workers()
    options: dict[str, Any] = {"worker_process_setup_hook": let_ray_count_cpu_workers}
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
