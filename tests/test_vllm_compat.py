"""vllm_compat: the version of vLLM, and the code that depends on it."""

import importlib.util
from abc import ABC
from typing import Any

import pytest
import vllm
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.simple_cpu_offload_connector import (
    SimpleCPUOffloadConnector as BuiltinConnector,
)
from vllm.v1.core.kv_cache_coordinator import HybridKVCacheCoordinator, KVCacheCoordinator

from simple_offload import connector, vllm_compat
from tests.simulation.shape import Shape
from tests.simulation.vllm_config import make_vllm_config

SUPPORTED = ["0.30.0", "0.31.0", "0.32.7", "0.32.1.dev3+g1234567", "0.33.0rc1", "0.33.2+cpu"]
NEAREST = {
    "0.29.9": "0.30",
    "0.9.2": "0.30",
    "0.3": "0.30",
    "0.34.0": "0.33",
    "0.34.0rc1": "0.33",
    "1.32.0": "0.33",
    "dev": "0.33",
    "": "0.33",
}
"""By unsupported version, the supported one to install."""


@pytest.mark.parametrize("version", SUPPORTED)
def test_supported_versions(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(vllm, "__version__", version)
    vllm_compat.require_supported_vllm()
    assert vllm_compat.vllm_version() == (0, int(version.split(".")[1]))


@pytest.mark.parametrize(("version", "nearest"), NEAREST.items())
def test_unsupported_versions(monkeypatch: pytest.MonkeyPatch, version: str, nearest: str) -> None:
    monkeypatch.setattr(vllm, "__version__", version)
    with pytest.raises(RuntimeError) as caught:
        vllm_compat.require_supported_vllm()
    message = str(caught.value)
    assert "works with vLLM 0.30 to 0.33" in message
    assert f"this is vLLM {version}" in message
    assert f"Install vLLM {nearest}, the nearest supported version" in message


def test_the_connector_does_not_import_on_another_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "__version__", "0.34.0")
    assert connector.__file__ is not None
    # Imported under another name, so that the module in use elsewhere does not change.
    spec = importlib.util.spec_from_file_location("connector_on_034", connector.__file__)
    assert spec is not None
    assert spec.loader is not None
    with pytest.raises(RuntimeError, match=r"0\.34\.0"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


# Members that some supported versions lack: where they are there, the substitutes do the same


def make_coordinator(**shape: Any) -> KVCacheCoordinator:
    """A host coordinator for the groups of a simulated model."""
    model = Shape(**shape)
    config = make_vllm_config(model)
    sizes = model.scheduler_block_size, model.hash_size
    return vllm_compat.make_host_coordinator(model.kv_cache_config(), config, *sizes)


MODELS: list[dict[str, Any]] = [
    {"windows": (0,)},
    {"windows": (0, 8)},
    {"windows": (0, 8), "scales": (1, 2)},
    {"windows": (0, 8), "draft": True},
    {"windows": (0,), "draft": True, "num_states": 1},
    {"windows": (0, 8), "draft": True, "chained": True, "num_drafted": 3},
]


@pytest.mark.parametrize("model", MODELS, ids=str)
def test_without_group_block_sizes(model: dict[str, Any]) -> None:
    coordinator = make_coordinator(**model)
    expected = vllm_compat.group_block_sizes(coordinator)
    del coordinator.group_block_sizes
    assert vllm_compat.group_block_sizes(coordinator) == expected


@pytest.mark.skipif(vllm_compat.vllm_version() < (0, 32), reason="this vLLM has no such method")
@pytest.mark.parametrize("model", MODELS, ids=str)
def test_without_num_cacheable_tokens(
    monkeypatch: pytest.MonkeyPatch, model: dict[str, Any]
) -> None:
    coordinator = make_coordinator(**model)
    places = [(n, group) for n in range(50) for group in range(len(coordinator.group_block_sizes))]
    cacheable = [vllm_compat.num_cacheable_tokens(coordinator, *place) for place in places]
    for each in (HybridKVCacheCoordinator, KVCacheCoordinator):
        monkeypatch.delattr(each, "get_num_cacheable_tokens")
    assert [vllm_compat.num_cacheable_tokens(coordinator, *each) for each in places] == cacheable


@pytest.mark.skipif(vllm_compat.vllm_version() < (0, 31), reason="this vLLM has no such property")
@pytest.mark.parametrize("model", MODELS, ids=str)
def test_without_num_prefill_lookahead_tokens(
    monkeypatch: pytest.MonkeyPatch, model: dict[str, Any]
) -> None:
    config = make_vllm_config(Shape(**model))
    expected = config.num_prefill_lookahead_tokens
    monkeypatch.delattr(VllmConfig, "num_prefill_lookahead_tokens")
    assert vllm_compat.num_prefill_lookahead_tokens(config) == expected


def test_the_builtin_name_is_claimed_from_033_on(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ours(ABC):  # noqa: B024 - a class of no kind
        pass

    monkeypatch.setattr(vllm, "__version__", "0.32.9")
    vllm_compat.claim_builtin_name(Ours)
    assert not issubclass(Ours, BuiltinConnector)
    monkeypatch.setattr(vllm, "__version__", "0.33.0")
    vllm_compat.claim_builtin_name(Ours)
    assert issubclass(Ours, BuiltinConnector)
