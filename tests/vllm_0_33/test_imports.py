"""vLLM 0.33's own modules import here, so that what fails on them is the connector's doing."""

import json
from pathlib import Path

from tests.vllm_0_33.conftest import RunScript

MODULES = (
    "vllm.distributed.kv_transfer.kv_connector.factory",
    "vllm.distributed.kv_transfer.kv_connector.v1.base",
    "vllm.distributed.kv_transfer.kv_connector.v1.simple_cpu_offload_connector",
    "vllm.v1.core.kv_cache_coordinator",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.engine.core",
    "vllm._C",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.worker.gpu_worker",
)


def test_modules_of_033_import(run_on_vllm_033: RunScript, vllm_033_path: Path) -> None:
    script = f"""
import importlib, json, vllm
from vllm.platforms import current_platform
files = [importlib.import_module(name).__file__ for name in {MODULES!r}]
print(json.dumps([vllm.__version__, current_platform.is_cpu(), files]))
"""
    version, on_cpu, files = json.loads(run_on_vllm_033(script).splitlines()[-1])
    assert version == "0.33.0"
    assert on_cpu
    assert [Path(file).is_relative_to(vllm_033_path) for file in files] == [True] * len(MODULES)
