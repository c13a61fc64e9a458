"""A configuration written for vLLM's built-in SimpleCPUOffloadConnector: every key that its source
reads works here, with the same meaning and nothing but the module path added; a key that means
nothing here is refused with what to do. Runs on vLLM 0.32 and 0.33."""

import ast
import importlib
import inspect
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_layout import KVCacheLayout

from simple_offload.config import ConfigError, OffloadConfig
from simple_offload.connector import SimpleCPUOffloadConnector
from tests.conftest import MakeVllmConfig
from tests.worker.kv_memory import full, group, make_kv_memory

pytestmark = pytest.mark.usefixtures("machine")

builtin: Any = importlib.import_module(
    "vllm.distributed.kv_transfer.kv_connector.v1.simple_cpu_offload_connector"
)
MIB = 1 << 20
RANKS = 2

WORK: dict[str, list[Any]] = {
    "cpu_bytes_to_use": [64 * MIB, str(64 * MIB), 6.4e7],
    "cpu_bytes_to_use_per_rank": [48 * MIB],
    "num_cpu_blocks": [64],
    "lazy_offload": [False, True],
    "kv_offload_backend": ["cpu"],
}
"""Keys that work, with values as people write them."""
REFUSED = {
    "disk_path": "/data/kv",
    "disk_capacity_bytes": 1 << 40,
    "disk_buffer_slots": 4,
    "use_page_cache": True,
}
"""Keys of a disk tier, which is not to be had here."""


def builtin_keys() -> set[str]:
    """Those that the built-in connector's source takes out of its configuration."""
    keys = set()
    for node in ast.walk(ast.parse(inspect.getsource(builtin))):
        match node:
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id="extra_config"), attr="get"),
                args=[ast.Constant(value=str(key)), *_],
            ):
                keys.add(key)
            case ast.Subscript(
                value=ast.Name(id="extra_config"), slice=ast.Constant(value=str(key))
            ):
                keys.add(key)
    return keys


def connect(
    make_vllm_config: MakeVllmConfig,
    extra_config: dict[str, Any],
    role: KVConnectorRole,
    ours: bool,
) -> Any:
    """What vLLM's factory makes of that configuration, with the module path or without."""
    config = make_vllm_config(extra_config, num_ranks=RANKS)
    assert config.kv_transfer_config is not None
    if not ours:
        config.kv_transfer_config.kv_connector_module_path = None
    memory = make_kv_memory([group(full(block_size=16), "a")], 6, KVCacheLayout.LBHNC)
    return KVConnectorFactory.create_connector(config, role, memory.config)


def test_every_key_of_the_builtin_connector_is_known_here() -> None:
    assert {"cpu_bytes_to_use", "lazy_offload", "disk_path"} <= builtin_keys()
    assert builtin_keys() <= WORK.keys() | REFUSED.keys()


@pytest.mark.parametrize("role", KVConnectorRole)
@pytest.mark.parametrize(
    ("key", "value"), [(key, value) for key, values in WORK.items() for value in values]
)
def test_keys_work(
    make_vllm_config: MakeVllmConfig, key: str, value: Any, role: KVConnectorRole
) -> None:
    made = connect(make_vllm_config, {key: value}, role, ours=True)
    assert type(made) is SimpleCPUOffloadConnector
    assert (made.scheduler is None, made.worker is None) == (
        role is KVConnectorRole.WORKER,
        role is KVConnectorRole.SCHEDULER,
    )


@pytest.mark.parametrize(
    "extra_config",
    [
        {},
        *({"cpu_bytes_to_use": value} for value in WORK["cpu_bytes_to_use"]),
        {"cpu_bytes_to_use_per_rank": 48 * MIB},
        {"cpu_bytes_to_use": 64 * MIB, "cpu_bytes_to_use_per_rank": 48 * MIB},
    ],
)
def test_bytes_mean_the_same(
    make_vllm_config: MakeVllmConfig, extra_config: dict[str, Any]
) -> None:
    theirs = connect(make_vllm_config, extra_config, KVConnectorRole.WORKER, ours=False)
    assert type(theirs) is builtin.SimpleCPUOffloadConnector
    config = OffloadConfig.parse(extra_config, RANKS)
    assert config.bytes_per_rank(RANKS) == theirs.worker_handler.cpu_capacity_bytes


@pytest.mark.parametrize("key", REFUSED)
def test_keys_of_the_disk_tier_are_refused_with_what_to_do(
    make_vllm_config: MakeVllmConfig, key: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        connect(make_vllm_config, {key: REFUSED[key]}, KVConnectorRole.WORKER, ours=True)
    assert f"{key}={REFUSED[key]!r}: there is no disk tier here; remove the key" in str(
        refused.value
    )


def test_the_disk_backend_is_refused_with_what_to_do(make_vllm_config: MakeVllmConfig) -> None:
    disk = {"kv_offload_backend": "disk", "disk_path": "/data/kv"}
    with pytest.raises(ConfigError) as refused:
        connect(make_vllm_config, disk, KVConnectorRole.WORKER, ours=True)
    assert "kv_offload_backend='disk': must be 'cpu'" in str(refused.value)
    assert "cpu_bytes_to_use" in str(refused.value)
