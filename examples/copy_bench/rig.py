"""The rig on a CUDA device: its memory, and the paths to measure there."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from examples.bench.results_file import gpu_driver, machine
from examples.copy_bench.arena import Arena
from examples.copy_bench.bench import Rig
from examples.copy_bench.contenders import BackendContender, ContiguousCopy, PlainTorch
from examples.copy_bench.plan import Plan
from simple_offload.backends.cuda.backend import CopyPath, CudaBackend


@contextmanager
def cuda_rig(plan: Plan) -> Iterator[Rig]:
    """The current device, and pinned memory until the end."""
    device = torch.device("cuda", torch.cuda.current_device())
    # Its own backend pins the pools once for all sizes and paths.
    memory = CudaBackend("dma")
    try:
        arena = Arena(plan.pool_bytes, device, memory.allocate_host)
        paths: tuple[CopyPath, ...] = ("dma", "kernel", "auto")
        facts = {
            "device": torch.cuda.get_device_name(device),
            "driver": gpu_driver(),
            "cuda": str(torch.version.cuda),
            **machine(),
        }
        yield Rig(
            arena,
            ContiguousCopy(),
            [PlainTorch(), *(_backend_contender(path) for path in paths)],
            facts,
        )
    finally:
        memory.close()


def _backend_contender(path: CopyPath) -> BackendContender:
    return BackendContender(path, lambda: CudaBackend(path))
