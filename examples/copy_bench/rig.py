"""The rig on a CUDA device: its memory, and the paths to measure there."""

import platform
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version

import torch

from examples.copy_bench.arena import Arena
from examples.copy_bench.bench import Rig
from examples.copy_bench.contenders import BackendContender, ContiguousCopy, PlainTorch
from examples.copy_bench.plan import Plan
from simple_offload import __version__
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
        yield Rig(
            arena,
            ContiguousCopy(),
            [PlainTorch(), *(_backend_contender(path) for path in paths)],
            _describe_machine(device),
        )
    finally:
        memory.close()


def _backend_contender(path: CopyPath) -> BackendContender:
    return BackendContender(path, lambda: CudaBackend(path))


def _describe_machine(device: torch.device) -> dict[str, str]:
    return {
        "device": torch.cuda.get_device_name(device),
        "driver": _driver_version(),
        "cuda": str(torch.version.cuda),
        "torch": torch.__version__,
        "triton": _version_of("triton"),
        "simple_offload": __version__,
        "python": platform.python_version(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _driver_version() -> str:
    """As nvidia-smi says it, which torch does not."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    lines = answer.stdout.split()
    return lines[0] if lines else "unknown"


def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"
