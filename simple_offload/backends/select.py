"""Selects the backend of this process."""

from typing import Literal, cast

from vllm.platforms import current_platform

from simple_offload.backends.base import CopyBackend
from simple_offload.backends.host import HostBackend
from simple_offload.config import ConfigError

BackendName = Literal["auto", "cuda", "npu", "host"]


def make_backend(name: BackendName, copy_path: str = "auto") -> CopyBackend:
    """The backend called ``name``; for "auto" that of vLLM's platform. Raises ConfigError if there
    is none, if it cannot reach the platform's memory, or if it has no such ``copy_path``."""
    device = str(current_platform.device_type)
    fitting = "host" if device == "cpu" else device
    if name not in ("auto", fitting):
        raise ConfigError(
            f"backend={name!r}: vLLM runs on {device!r} here, whose KV cache this backend cannot "
            f"reach. Allowed: 'auto' or {fitting!r}"
        )
    if fitting == "host":
        if copy_path != "auto":
            raise ConfigError(
                f"copy_path={copy_path!r}: on the CPU there is one way to copy. Allowed: 'auto'"
            )
        return HostBackend()
    if fitting == "cuda" and current_platform.is_cuda():
        from simple_offload.backends.cuda.backend import COPY_PATHS, CopyPath, CudaBackend

        if copy_path not in COPY_PATHS:
            raise ConfigError(
                f"copy_path={copy_path!r}: not a way to copy on CUDA. Allowed: "
                + ", ".join(map(repr, COPY_PATHS))
            )
        return CudaBackend(cast(CopyPath, copy_path))
    if fitting == "npu":
        from simple_offload.backends.npu.backend import NpuBackend

        return NpuBackend(copy_path)
    raise ConfigError(
        f"backend={name!r}: there is no backend for vLLM's {device!r} platform yet. "
        "Supported platforms: 'cpu', 'cuda' and 'npu'"
    )
