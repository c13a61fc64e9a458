"""vLLM 0.33's own modules import with every build of the operators. Other failures on 0.33 are then
the connector's."""

import json
from pathlib import Path

import pytest

from tests.operators import runnable_builds
from tests.vllm_0_33.conftest import RunScript

MODULES = (
    "vllm.distributed.kv_transfer.kv_connector.factory",
    "vllm.distributed.kv_transfer.kv_connector.v1.base",
    "vllm.distributed.kv_transfer.kv_connector.v1.simple_cpu_offload_connector",
    "vllm.v1.core.kv_cache_coordinator",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.engine.core",
    "vllm._custom_ops",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.worker.gpu_worker",
)


@pytest.mark.slow
@pytest.mark.parametrize("build", runnable_builds())
def test_modules_of_033_import(run_on_vllm_033: RunScript, vllm_033_path: Path, build: str) -> None:
    script = f"""
from tests import operators
operators.pretend_processor({build!r})
import importlib, json, torch, vllm
from vllm.platforms import current_platform
files = [importlib.import_module(name).__file__ for name in {MODULES!r}]
has_operators = hasattr(torch.ops._C, "rms_norm")
loaded = operators.loaded_builds()
print(json.dumps([vllm.__version__, current_platform.is_cpu(), loaded, has_operators, files]))
"""
    version, on_cpu, loaded, has_operators, files = json.loads(
        run_on_vllm_033(script).splitlines()[-1]
    )
    assert version == "0.33.0"
    assert on_cpu
    assert loaded == [build]
    assert has_operators
    assert [Path(file).is_relative_to(vllm_033_path) for file in files] == [True] * len(MODULES)
