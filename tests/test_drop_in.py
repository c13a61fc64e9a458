"""Configurations of vLLM's built-in SimpleCPUOffloadConnector work here with only the module path
added: every key that its source reads has the same meaning. Runs on vLLM 0.30 to 0.33."""

import importlib
import inspect
import json
import re
from typing import Any
from unittest.mock import Mock

import pytest
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.kv_cache_layout import KVCacheLayout

from simple_offload.config import OffloadConfig
from simple_offload.connector import SimpleCPUOffloadConnector
from simple_offload.ranks import Ranks
from tests.conftest import Machine, MakeVllmConfig
from tests.worker.kv_memory import full, group, make_kv_memory

pytestmark = pytest.mark.usefixtures("machine")

builtin: Any = importlib.import_module(
    "vllm.distributed.kv_transfer.kv_connector.v1.simple_cpu_offload_connector"
)
MIB = 1 << 20
RANKS = 2

WORK: dict[str, Any] = {
    "cpu_bytes_to_use": 64 * MIB,
    "cpu_bytes_to_use_per_rank": 48 * MIB,
    "num_cpu_blocks": 64,
    "lazy_offload": "True",
    "kv_offload_backend": "cpu",
}
"""Keys of the built-in connector that work here."""
DISK_TIER = {
    "disk_path": "/data/kv",
    "disk_capacity_bytes": 1 << 40,
    "disk_buffer_slots": 4,
    "use_page_cache": True,
}
"""Keys that the built-in connector ignores, with a warning, unless it has a disk tier."""
SIZES: dict[str, tuple[dict[str, Any], int, int]] = {
    "the default": ({}, 2, 4 * 2**30),
    "an int": ({"cpu_bytes_to_use": 64 * MIB}, 2, 32 * MIB),
    "a string": ({"cpu_bytes_to_use": str(64 * MIB)}, 2, 32 * MIB),
    "a float": ({"cpu_bytes_to_use": 6.4e7}, 2, 32_000_000),
    "half a byte": ({"cpu_bytes_to_use": 0.0625 * 2**30 + 0.5}, 2, 32 * MIB),
    # Public recipes of SemiAnalysisAI/InferenceX that select the built-in connector, August 2026.
    "dsv4_fp4_b200_vllm_mtp.sh": (
        {"cpu_bytes_to_use_per_rank": 150_000_000_000, "enable_cross_layers_blocks": "true"},
        1,
        150_000_000_000,
    ),
    "dsv4_fp4_b300_vllm_mtp.sh": (
        {"cpu_bytes_to_use": 343597383680, "enable_cross_layers_blocks": "true"},
        8,
        42_949_672_960,
    ),
    "minimaxm3_fp4_b200_mtp.sh": (
        {"cpu_bytes_to_use": 1_200_000_000_000, "lazy_offload": True},
        4,
        300_000_000_000,
    ),
    "gb200-fp4, agg-tp4": (
        {"cpu_bytes_to_use": 549755813888, "cpu_bytes_to_use_per_rank": 137438953472},
        4,
        137_438_953_472,
    ),
}
"""kv_connector_extra_config, ranks of an engine, bytes of a rank."""


HOLDER = re.compile(
    r"^\s*(\w+)(?:: [^=\n]+)? = \(?\s*[\w.]*extra_config(?: or \{\})?\s*\)?$", re.MULTILINE
)
"""An assignment of kv_connector_extra_config to another name."""


def keys_read_by(source: str) -> set[str]:
    """Keys of kv_connector_extra_config that a module of vLLM reads."""
    holders = "|".join(["extra_config", *HOLDER.findall(source)])
    reads = rf"(?:get_from_extra_config\(|(?:{holders})(?: or \{{\}}\))?(?:\.get\(|\[))"
    return set(re.findall(rf'{reads}(?:\s*#.*)?\s*"([\w.]+)"', source))


def connect(
    make_vllm_config: MakeVllmConfig,
    extra_config: dict[str, Any],
    role: KVConnectorRole,
    ours: bool,
    num_ranks: int = RANKS,
) -> Any:
    """The connector that vLLM's factory makes, ours or the built-in one."""
    config = make_vllm_config(extra_config, num_ranks=num_ranks)
    assert config.kv_transfer_config is not None
    if not ours:
        config.kv_transfer_config.kv_connector_module_path = None
    memory = make_kv_memory([group(full(block_size=16), "a")], 6, KVCacheLayout.LBHNC)
    return KVConnectorFactory.create_connector(config, role, memory.config)


def test_every_key_of_the_builtin_connector_is_known_here() -> None:
    read = keys_read_by(inspect.getsource(builtin))
    assert {"cpu_bytes_to_use", "lazy_offload", "disk_path"} <= read
    assert read <= WORK.keys() | DISK_TIER.keys()


@pytest.mark.parametrize("role", KVConnectorRole)
def test_keys_work(make_vllm_config: MakeVllmConfig, role: KVConnectorRole) -> None:
    made = connect(make_vllm_config, WORK, role, ours=True)
    assert type(made) is SimpleCPUOffloadConnector


@pytest.mark.parametrize(("extra_config", "num_ranks", "num_bytes"), SIZES.values(), ids=SIZES)
def test_sizes_mean_the_same(
    make_vllm_config: MakeVllmConfig,
    machine: Machine,
    extra_config: dict[str, Any],
    num_ranks: int,
    num_bytes: int,
) -> None:
    machine.num_bytes = 3 * 10**12
    ours, theirs = (
        connect(make_vllm_config, extra_config, KVConnectorRole.WORKER, mine, num_ranks)
        for mine in (True, False)
    )
    assert type(ours) is SimpleCPUOffloadConnector
    assert type(theirs) is builtin.SimpleCPUOffloadConnector
    assert theirs.worker_handler.cpu_capacity_bytes == num_bytes
    assert (
        OffloadConfig.parse(extra_config, Ranks(num_ranks, num_ranks)).bytes_per_rank(num_ranks)
        == num_bytes
    )


def engine_config(model: str, *arguments: str) -> VllmConfig:
    """The configuration that ``vllm serve`` makes of its arguments."""
    parser: Any = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())  # type: ignore[no-untyped-call]
    given = ["--model", model, "--skip-tokenizer-init", "--dtype", "float32", *arguments]
    engine_args: AsyncEngineArgs = AsyncEngineArgs.from_cli_args(parser.parse_args(given))
    return engine_args.create_engine_config()


def class_of(config: VllmConfig) -> type:
    assert config.kv_transfer_config is not None
    return KVConnectorFactory.get_connector_class(config.kv_transfer_config)


OURS = '{"kv_connector_module_path": "simple_offload"}'
NAMED = {"kv_connector": "SimpleCPUOffloadConnector", "kv_role": "kv_both"}


@pytest.mark.parametrize(
    "given", [{}, NAMED, {"kv_connector_extra_config": {"cpu_bytes_to_use": "1GiB"}}], ids=str
)
def test_vllm_s_option_for_offloading(
    make_vllm_config: MakeVllmConfig, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any]
) -> None:
    """--kv-offloading-size in GiB is the size, and the module path is all that it needs."""
    monkeypatch.setenv("VLLM_USE_SIMPLE_KV_OFFLOAD", "1")
    ours = json.dumps(json.loads(OURS) | given)
    model = make_vllm_config().model_config.model
    config = engine_config(model, "--kv-offloading-size", "0.3", "--kv-transfer-config", ours)
    assert class_of(config) is SimpleCPUOffloadConnector
    assert config.kv_transfer_config is not None
    assert config.kv_transfer_config.kv_role == "kv_both"
    extra_config = config.kv_transfer_config.kv_connector_extra_config
    assert OffloadConfig.parse(extra_config, Ranks(RANKS, RANKS)).cpu_bytes_to_use == 322_122_547


def test_vllm_s_option_without_its_variable(
    make_vllm_config: MakeVllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_USE_SIMPLE_KV_OFFLOAD", "0")
    model = make_vllm_config().model_config.model
    option = ("--kv-offloading-size", "0.3", "--kv-transfer-config", OURS)
    with pytest.raises(AttributeError) as stopped:
        engine_config(model, *option)
    assert "OffloadingConnector not found in simple_offload" in str(stopped.value)
    assert "VLLM_USE_SIMPLE_KV_OFFLOAD=1" in str(stopped.value.__cause__)


def test_vllm_s_option_replaces_a_multi_connector(
    make_vllm_config: MakeVllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """docs/operations.md warns of it: vLLM overwrites kv_connector, whatever it was."""
    monkeypatch.setenv("VLLM_USE_SIMPLE_KV_OFFLOAD", "1")
    several = {"kv_connector": "MultiConnector", "kv_role": "kv_both"}
    model = make_vllm_config().model_config.model
    option = ("--kv-offloading-size", "0.3", "--kv-transfer-config", json.dumps(several))
    assert class_of(engine_config(model, *option)) is builtin.SimpleCPUOffloadConnector


@pytest.mark.parametrize("role", KVConnectorRole)
def test_keys_of_other_connectors_are_named_once(
    make_vllm_config: MakeVllmConfig, role: KVConnectorRole, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the scheduler's connector logs them, not every rank."""
    warned = Mock()
    monkeypatch.setattr("simple_offload.connector.logger.warning", warned)
    extra_config = {
        "enable_cross_layers_blocks": "true",
        "kv_lease_duration": 60,
        "lmcache.chunk_size": 256,
        "num_cpu_blocks": 64,
        **DISK_TIER,
    }
    connect(make_vllm_config, extra_config, role, ours=True)
    lines = [call.args[0] % call.args[1:] for call in warned.call_args_list]
    if role is KVConnectorRole.WORKER:
        assert lines == []
        return
    (line,) = lines
    assert line.startswith("Ignored in kv_connector_extra_config: ")
    for key in extra_config.keys() - {"num_cpu_blocks"}:
        assert key in line
    assert "num_cpu_blocks" not in line
