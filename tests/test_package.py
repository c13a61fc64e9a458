"""The package itself."""

import subprocess
import sys

import simple_offload


def test_importing_it_needs_neither_vllm_nor_torch() -> None:
    script = """
import sys
sys.modules.update(dict.fromkeys(("vllm", "torch", "numpy", "pydantic", "psutil")))  # absent
import simple_offload
print(simple_offload.__version__)
try:
    simple_offload.SimpleCPUOffloadConnector
except ImportError as error:
    print(error.name)
"""
    printed = subprocess.check_output([sys.executable, "-c", script], text=True, timeout=120)
    version, missing = printed.split()
    assert version == simple_offload.__version__
    assert missing == "vllm" or missing.startswith("vllm.")
