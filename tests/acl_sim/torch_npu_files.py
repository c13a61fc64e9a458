"""The real torch_npu, unpacked beside the environment and not installed in it. Where it is
installed without CANN, even `import torch` fails."""

from tests.wheels import CACHE, UnavailableError, Wheel

VERSION = "2.13.0"
DOWNLOAD_SECONDS = 300
WHEEL = Wheel(
    "torch-npu",
    VERSION,
    CACHE / f"torch-npu-{VERSION}",
    download_mb=44,
    download_seconds=DOWNLOAD_SECONDS,
    without="--deselect tests/backends/test_npu.py",
)
fetch = WHEEL.fetch

__all__ = ["DOWNLOAD_SECONDS", "VERSION", "UnavailableError", "fetch"]
