"""The Dockerfile, the values for Helm and llm-d's overlay: as far as they run without a cluster."""

import re
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from simple_offload.config import GIB, OffloadConfig
from simple_offload.connector import SimpleCPUOffloadConnector
from simple_offload.ranks import Ranks
from simple_offload.vllm_compat import NEWEST, OLDEST
from tests.conftest import Machine, MakeVllmConfig
from tests.test_drop_in import engine_config
from tests.test_packaging import EXTRAS, build_wheel
from tools.set_up import ROOT

DEPLOY = ROOT / "examples" / "deploy"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
VALUES: dict[str, Any] = yaml.safe_load((DEPLOY / "production-stack.yaml").read_text())
PATCH: dict[str, Any] = yaml.safe_load((DEPLOY / "llm-d" / "patch-vllm.yaml").read_text())

CHART_FLAGS = {"maxModelLen": "--max-model-len", "tensorParallelSize": "--tensor-parallel-size"}
"""Keys of vLLM's settings in the values of vllm-project/production-stack, at a6c01db."""
GUIDE_LIMIT = 400 * GIB
"""Memory limit of the container that the overlay patches: llm-d/llm-d,
guides/tiered-prefix-cache/modelserver/gpu/vllm/base/patch-vllm.yaml, at 17760b7."""


def engine_arguments(model_spec: dict[str, Any]) -> list[str]:
    """The arguments of `vllm serve`, as helm/templates/deployment-vllm-multi.yaml writes them."""
    config = dict(model_spec["vllmConfig"])
    extra_args = config.pop("extraArgs")
    prefix_caching = "enable" if config.pop("enablePrefixCaching", False) else "no-enable"
    own = [word for key, value in config.items() for word in (CHART_FLAGS[key], str(value))]
    return [f"--{prefix_caching}-prefix-caching", *own, *extra_args]


def tier_bytes(config: VllmConfig, limit: int, machine: Machine) -> int | None:
    """The size of the host tier in a container with that limit, of ``limit`` bytes."""
    assert config.kv_transfer_config is not None
    assert KVConnectorFactory.get_connector_class(config.kv_transfer_config) is (
        SimpleCPUOffloadConnector
    )
    machine.num_bytes = 2 * limit
    machine.write("/proc/self/cgroup", "0::/pod\n")
    machine.write("/sys/fs/cgroup/pod/memory.max", str(limit))
    num_ranks = config.parallel_config.world_size
    extra_config = config.kv_transfer_config.kv_connector_extra_config
    return OffloadConfig.parse(extra_config, Ranks(num_ranks, num_ranks)).cpu_bytes_to_use


# The image


def test_the_image_has_a_supported_vllm() -> None:
    texts = (DOCKERFILE, *(file.read_text() for file in DEPLOY.glob("**/*.yaml")))
    tagged = r"(?:VLLM_VERSION=|vllm-simple-offload:|tag: \"?)(\d+\.\d+\.\d+)"
    versions = re.findall(tagged, "".join(texts))
    assert len(versions) == 4, "in the command, by default, in the chart and in the overlay"
    (version,) = set(versions)
    assert OLDEST <= tuple(map(int, version.split(".")[:2])) <= NEWEST
    assert "FROM vllm/vllm-openai:v${VLLM_VERSION}\n" in DOCKERFILE
    (on_cuda,) = (Requirement(text) for text in EXTRAS["cuda"] if text.startswith("vllm"))
    assert on_cuda.specifier.contains(version)
    assert '"/src[cuda]"' in DOCKERFILE


def test_what_the_image_copies_makes_the_whole_wheel(tmp_path: Path) -> None:
    source = tmp_path / "src"
    for line in re.findall(r"^COPY (.*)$", DOCKERFILE, re.MULTILINE):
        *names, target = line.split()
        assert target.startswith("/src/")
        for name in names:
            whole = target if target.endswith("/") else str(Path(target).parent)
            place = source / Path(whole).relative_to("/src") / name
            place.parent.mkdir(parents=True, exist_ok=True)
            place.symlink_to(ROOT / name)
    with zipfile.ZipFile(build_wheel(source, tmp_path)) as archive:
        assert "simple_offload/connector.py" in archive.namelist()


# The chart


@pytest.fixture
def model_spec() -> dict[str, Any]:
    (spec,) = VALUES["servingEngineSpec"]["modelSpec"]
    return dict(spec)


def test_vllm_serves_with_the_connector(
    model_spec: dict[str, Any], make_vllm_config: MakeVllmConfig, machine: Machine
) -> None:
    """The parser takes every argument, and the tier fits beside what vLLM needs."""
    model = make_vllm_config().model_config.model
    config = engine_config(model, *engine_arguments(model_spec), "--max-model-len", "512")
    assert config.cache_config.enable_prefix_caching
    limit = int(model_spec["limitMemory"].removesuffix("Gi")) * GIB
    assert tier_bytes(config, limit, machine) == 72 * GIB


# llm-d's overlay


def test_vllm_serves_with_the_overlays_arguments(
    make_vllm_config: MakeVllmConfig, machine: Machine
) -> None:
    (container,) = PATCH["spec"]["template"]["spec"]["containers"]
    model, *arguments = container["args"]
    assert model == "Qwen/Qwen3-32B"
    small = make_vllm_config().model_config.model
    config = engine_config(small, *arguments, "--max-model-len", "512")
    assert config.parallel_config.tensor_parallel_size == 2
    assert tier_bytes(config, GUIDE_LIMIT, machine) == 100 * GIB
