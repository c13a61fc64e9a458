"""vllm_compat: the version of vLLM, and the code that depends on it."""

import importlib.util
from abc import ABC

import pytest
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.simple_cpu_offload_connector import (
    SimpleCPUOffloadConnector as BuiltinConnector,
)

from simple_offload import connector, vllm_compat

SUPPORTED = ["0.32.0", "0.32.7", "0.32.1.dev3+g1234567", "0.33.0", "0.33.0rc1", "0.33.2+cpu"]
UNSUPPORTED = ["0.31.9", "0.34.0", "0.34.0rc1", "0.9.2", "1.32.0", "0.3", "dev", ""]


@pytest.mark.parametrize("version", SUPPORTED)
def test_supported_versions(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(vllm, "__version__", version)
    vllm_compat.require_supported_vllm()
    assert vllm_compat.vllm_version() == (0, int(version.split(".")[1]))


@pytest.mark.parametrize("version", UNSUPPORTED)
def test_unsupported_versions(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(vllm, "__version__", version)
    with pytest.raises(RuntimeError) as caught:
        vllm_compat.require_supported_vllm()
    message = str(caught.value)
    assert ">= 0.32 and < 0.34" in message
    assert f"this is vLLM {version}" in message


def test_the_connector_does_not_import_on_another_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "__version__", "0.34.0")
    assert connector.__file__ is not None
    # Imported under another name, so that the module in use elsewhere does not change.
    spec = importlib.util.spec_from_file_location("connector_on_034", connector.__file__)
    assert spec is not None
    assert spec.loader is not None
    with pytest.raises(RuntimeError, match=r"0\.34\.0"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_the_builtin_name_is_claimed_from_033_on(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ours(ABC):  # noqa: B024 - a class of no kind
        pass

    monkeypatch.setattr(vllm, "__version__", "0.32.9")
    vllm_compat.claim_builtin_name(Ours)
    assert not issubclass(Ours, BuiltinConnector)
    monkeypatch.setattr(vllm, "__version__", "0.33.0")
    vllm_compat.claim_builtin_name(Ours)
    assert issubclass(Ours, BuiltinConnector)
