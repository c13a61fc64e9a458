"""A Ray cluster on this machine, of a node for each rank, for vLLM's Ray executor to run ranks on
CPUs.

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
    """A node for each of the engine's workers, with an address of its own, if Ray runs them. All
    processes of the nodes end with the context."""
    if spec.arguments.get("distributed_executor_backend") != "ray":
        yield
        return
    import ray
    from ray.cluster_utils import Cluster

    count_cpu_workers_as_gpus()
    cluster = Cluster()
    try:
        cluster.add_node(num_cpus=2, num_gpus=1, include_dashboard=False)
        for number in range(1, spec.arguments["tensor_parallel_size"]):
            cluster.add_node(num_cpus=2, num_gpus=1, node_ip_address=f"127.0.0.{number + 1}")
        options: dict[str, Any] = {"worker_process_setup_hook": count_cpu_workers_as_gpus}
        ray.init(address=cluster.address, runtime_env=options)
        yield
    finally:
        ray.shutdown()
        cluster.shutdown()
