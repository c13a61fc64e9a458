"""Tests that need vLLM 0.33: test_versions.py runs them on it."""

import importlib
from types import SimpleNamespace
from typing import Any, cast

import pytest
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker import gpu_worker
from vllm.v1.worker.cpu_worker import CPUWorker

import simple_offload
from tests.conftest import MakeVllmConfig
from tests.worker.kv_memory import full, group, make_kv_memory

builtin: Any = importlib.import_module(
    "vllm.distributed.kv_transfer.kv_connector.v1.simple_cpu_offload_connector"
)
ours: Any = simple_offload.SimpleCPUOffloadConnector
EXTRA_CONFIG = {"num_cpu_blocks": 8}


@pytest.fixture
def connector(make_vllm_config: MakeVllmConfig) -> Any:
    """The worker side, with registered KV caches."""
    memory = make_kv_memory([group(full(block_size=16), "a")], 6, KVCacheLayout.LBHNC)
    connector: Any = KVConnectorFactory.create_connector(
        make_vllm_config(EXTRA_CONFIG), KVConnectorRole.WORKER, memory.config
    )
    connector.register_kv_caches(memory.kv_caches)
    yield connector
    connector.shutdown()


def test_the_engine_takes_it_for_the_builtin_one(make_vllm_config: MakeVllmConfig) -> None:
    """The engine looks for it by name, and then asks the built-in class."""
    assert builtin.SimpleCPUOffloadConnector not in ours.__mro__
    assert issubclass(ours, builtin.SimpleCPUOffloadConnector)
    transfer_config = make_vllm_config(EXTRA_CONFIG).kv_transfer_config
    assert transfer_config is not None
    assert transfer_config.has_connector("SimpleCPUOffloadConnector")


@pytest.mark.parametrize("worker_class", [gpu_worker.Worker, CPUWorker])
def test_a_worker_finds_it_and_its_number_of_blocks(
    monkeypatch: pytest.MonkeyPatch, connector: Any, worker_class: Any
) -> None:
    monkeypatch.setattr(gpu_worker, "has_kv_transfer_group", lambda: True)
    monkeypatch.setattr(gpu_worker, "get_kv_transfer_group", lambda: connector)
    worker = object.__new__(worker_class)
    assert worker.get_simple_cpu_offload_num_cpu_blocks() == 8


def test_it_is_found_beside_others(connector: Any) -> None:
    several = cast(Any, SimpleNamespace(_connectors=[object(), connector]))
    assert builtin._find_simple_cpu_offload_connector(connector) is connector
    assert builtin._find_simple_cpu_offload_connector(several) is connector
