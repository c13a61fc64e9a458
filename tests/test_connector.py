"""SimpleCPUOffloadConnector: vLLM makes it in both roles, and every hook reaches its side."""

import inspect
import logging
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast
from unittest.mock import Mock

import pytest
import torch
from vllm import envs
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
    supports_hma,
)
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheSpec, MambaSpec
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.outputs import KVConnectorOutput

from simple_offload.config import ConfigError
from simple_offload.connector import SimpleCPUOffloadConnector
from simple_offload.metadata import RankCapacity, StepMetadata, WorkerReport
from simple_offload.scheduler import supported
from simple_offload.shared_memory import SharedMemory
from simple_offload.transfer import Transfer
from simple_offload.vllm_compat import vllm_version
from tests.conftest import MakeVllmConfig, within_patience
from tests.worker.kv_memory import KVMemory, full, group, make_kv_memory, mixed_group
from tests.worker.scripted import EndsWhenWaitedFor, ScriptedBackend

if TYPE_CHECKING:
    from vllm.config import VllmConfig

pytestmark = pytest.mark.usefixtures("no_thread_left", "machine")

SCHEDULER, WORKER = KVConnectorRole.SCHEDULER, KVConnectorRole.WORKER
SPEC = full(block_size=16)
EXTRA_CONFIG = {"num_cpu_blocks": 8}

Connect = Callable[..., SimpleCPUOffloadConnector]


@pytest.fixture
def memory() -> KVMemory:
    return make_kv_memory([group(SPEC, "a", "b")], 6, KVCacheLayout.LBHNC)


@pytest.fixture
def connect(
    no_thread_left: None, make_vllm_config: MakeVllmConfig, memory: KVMemory
) -> Iterator[Connect]:
    """A function that makes a connector in a role, as vLLM does. Its other arguments are those of
    ``make_vllm_config``. The connector is shut down after the test."""
    connectors: list[SimpleCPUOffloadConnector] = []

    def connect(
        role: KVConnectorRole, extra_config: dict[str, Any] = EXTRA_CONFIG, **more: Any
    ) -> SimpleCPUOffloadConnector:
        made = KVConnectorFactory.create_connector(
            make_vllm_config(extra_config, **more), role, memory.config
        )
        assert isinstance(made, SimpleCPUOffloadConnector)
        connectors.append(made)
        return made

    yield connect
    for connector in connectors:
        within_patience(connector.shutdown)


# Refused executors


def refuse(config: "VllmConfig", memory: KVMemory) -> str:
    """The message that refuses the start of both sides, before vLLM measures memory."""
    messages = set()
    for role in (SCHEDULER, WORKER):
        with pytest.raises(ConfigError) as caught:
            KVConnectorFactory.create_connector(config, role, memory.config)
        messages.add(str(caught.value))
    with pytest.raises(ConfigError) as caught:
        SimpleCPUOffloadConnector.get_required_kvcache_layout(config)
    (message,) = messages | {str(caught.value)}
    return message


def test_an_executor_that_returns_one_rank_only(
    make_vllm_config: MakeVllmConfig, memory: KVMemory
) -> None:
    """Otherwise the engine would wait for the other ranks' reports without end, and keep no
    block."""
    config = make_vllm_config(EXTRA_CONFIG, num_ranks=2)
    config.parallel_config.distributed_executor_backend = "external_launcher"
    message = refuse(config, memory)
    for part in ("distributed_executor_backend='external_launcher'", "2 ranks", "'mp'", "'ray'"):
        assert part in message
    config.parallel_config.world_size = 1
    SimpleCPUOffloadConnector.get_required_kvcache_layout(config)


def test_rays_old_executor_with_stages(
    make_vllm_config: MakeVllmConfig, memory: KVMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It returns the last stage's output. vLLM 0.33 has neither this executor nor the variable."""
    config = make_vllm_config(EXTRA_CONFIG, num_ranks=2)
    parallel = config.parallel_config
    parallel.distributed_executor_backend, parallel.pipeline_parallel_size = "ray", 2
    SimpleCPUOffloadConnector.get_required_kvcache_layout(config)
    monkeypatch.setattr(envs, "VLLM_USE_RAY_V2_EXECUTOR_BACKEND", False, raising=False)
    message = refuse(config, memory)
    for part in ("VLLM_USE_RAY_V2_EXECUTOR_BACKEND=0", "2 stages", "allowed: 1"):
        assert part in message
    parallel.pipeline_parallel_size = 1
    SimpleCPUOffloadConnector.get_required_kvcache_layout(config)


@pytest.mark.skipif(vllm_version() < (0, 31), reason="this vLLM has no such configuration")
def test_replies_with_routed_experts(make_vllm_config: MakeVllmConfig, memory: KVMemory) -> None:
    """vLLM would have lost the experts of blocks that the device has evicted, and fail."""
    config = make_vllm_config(EXTRA_CONFIG)
    config.aux_output_config.enable_return_routed_experts = True
    message = refuse(config, memory)
    assert re.fullmatch("enable_return_routed_experts=true: .*: false", message)


# Refused on an NPU


@pytest.fixture
def npu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supported, "current_platform", SimpleNamespace(device_type="npu"))


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"enable_kvpp": True}, r"additional_config\.enable_kvpp=true: .*; allowed: false"),
        ({"enable_kvpp": "yes"}, r"additional_config\.enable_kvpp=true: .*; allowed: false"),
        (
            {"sparse_kv_offload_config": {"enabled": True, "keep_device_kv_cache": True}},
            r"additional_config\.sparse_kv_offload_config\.enabled=true: .*; allowed: false",
        ),
    ],
)
def test_options_of_vllm_ascend(
    npu: None,
    make_vllm_config: MakeVllmConfig,
    memory: KVMemory,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    complaint: str,
) -> None:
    config = make_vllm_config(EXTRA_CONFIG)
    config.additional_config = {"enable_kvpp": "false", "sparse_kv_offload_config": {}}
    SimpleCPUOffloadConnector.get_required_kvcache_layout(config)
    config.additional_config = options
    assert re.fullmatch(complaint, refuse(config, memory))
    monkeypatch.setattr(supported, "current_platform", SimpleNamespace(device_type="cuda"))
    SimpleCPUOffloadConnector.get_required_kvcache_layout(config)


@dataclass(frozen=True, kw_only=True)
class Indexer(FullAttentionSpec):
    """As far as it matters, vllm-ascend's AscendSFAIndexerCacheSpec."""

    sfa_dcp_replicated_indexer_size: int = 1


STATE = MambaSpec(
    block_size=16, shapes=((4, 4),), dtypes=(torch.float32,), mamba_cache_mode="align"
)
INDEXER = Indexer(block_size=16, num_kv_heads=2, head_size=3, dtype=torch.float32)


@pytest.mark.parametrize("role", [SCHEDULER, WORKER])
@pytest.mark.parametrize(
    ("spec", "complaint"),
    [
        (STATE, "this model has state .Mamba. layers: .*vllm-ascend.*; allowed on an NPU: models"),
        (
            replace(INDEXER, sfa_dcp_replicated_indexer_size=2),
            "decode_context_parallel_size=2 with a sparse .* indexer: .*; allowed on an NPU: 1",
        ),
    ],
)
def test_layers_on_an_npu(
    monkeypatch: pytest.MonkeyPatch,
    make_vllm_config: MakeVllmConfig,
    connect: Connect,
    memory: KVMemory,
    role: KVConnectorRole,
    spec: KVCacheSpec,
    complaint: str,
) -> None:
    """Wherever they are: in a group of their own, or beside layers that can be served."""
    connect(role)  # on another device
    monkeypatch.setattr(supported, "current_platform", SimpleNamespace(device_type="npu"))
    config = make_vllm_config(EXTRA_CONFIG)
    for groups in (
        [group(SPEC, "a"), group(spec, "b")],
        [mixed_group({"a": SPEC, "b": spec})],
        [mixed_group({"a": INDEXER, "b": spec})],
    ):
        with pytest.raises(ConfigError, match=complaint):
            KVConnectorFactory.create_connector(config, role, KVCacheConfig(6, [], groups))
    served = KVCacheConfig(6, [], [mixed_group({"a": SPEC, "b": INDEXER})])
    supported.require_supported_layers(served)


@pytest.mark.parametrize("role", KVConnectorRole)
def test_groups_in_host_memory_are_refused(
    make_vllm_config: MakeVllmConfig, role: KVConnectorRole
) -> None:
    """On each rank before it opens memory: its regions would be others' (HiSparse)."""
    groups = [group(SPEC, "a"), replace(group(SPEC, "b"), host_resident=True)]
    with pytest.raises(ConfigError, match=r"in host memory already .*; allowed: one of both"):
        KVConnectorFactory.create_connector(
            make_vllm_config(EXTRA_CONFIG), role, KVCacheConfig(6, [], groups)
        )


def test_a_second_tier_that_is_impossible_is_refused_before_memory_is_measured(
    make_vllm_config: MakeVllmConfig,
) -> None:
    """Unless there is none, since prefix caching is off."""
    second_tier = {"type": "fs", "root_dir": "/kv", "bytes": "1TiB"}
    for prefix_caching in (False, True):
        config = make_vllm_config(
            EXTRA_CONFIG | {"second_tier": second_tier}, prefix_caching=prefix_caching
        )
        ask = partial(SimpleCPUOffloadConnector.get_required_kvcache_layout, config)
        ask()
        config.lora_config = cast(Any, object())
        if prefix_caching:
            with pytest.raises(ConfigError, match="second_tier with LoRA"):
                ask()
        else:
            ask()


# The class


def public_names(cls: type) -> set[str]:
    return {name for name in dir(cls) if not name.startswith("_")}


def parameters(attribute: Any) -> list[tuple[str, str, bool]]:
    """Name and kind of each parameter, and whether it has a default."""
    signature = inspect.signature(getattr(attribute, "__func__", attribute))
    return [
        (each.name, each.kind.name, each.default is not each.empty)
        for each in signature.parameters.values()
    ]


@pytest.mark.parametrize("interface", [KVConnectorBase_V1, SupportsHMA])
def test_every_hook_takes_what_vllm_passes(interface: type) -> None:
    for name in public_names(interface):
        wanted = inspect.getattr_static(interface, name)
        found = inspect.getattr_static(SimpleCPUOffloadConnector, name)
        assert type(found) is type(wanted), name
        if not isinstance(wanted, property):
            assert parameters(found) == parameters(wanted), name
    assert supports_hma(SimpleCPUOffloadConnector)  # hybrid models


def test_every_public_method_is_a_hook() -> None:
    """A misspelled hook would never be called."""
    hooks = {*public_names(KVConnectorBase_V1), *public_names(SupportsHMA)}
    # 0.33 asks for the first by the class's name. The others are in its interface, or in 0.32's.
    later = {"get_aligned_num_cpu_blocks", "unregister_kv_caches", "restore_kv_caches"}
    later.add("get_external_cache_hit_sources")
    assert set(public_names(SimpleCPUOffloadConnector)) - hooks <= later


# Construction


@pytest.mark.parametrize("kv_role", ["kv_both", "kv_producer", "kv_consumer"])
@pytest.mark.parametrize("role", KVConnectorRole)
def test_each_role_has_its_own_side(
    connect: Connect, role: KVConnectorRole, kv_role: str, caplog: pytest.LogCaptureFixture
) -> None:
    connector = connect(role, kv_role=kv_role)
    assert connector.role is role
    assert (connector.scheduler is not None) == (role is SCHEDULER)
    assert (connector.worker is not None) == (role is WORKER)
    assert not connector.requires_kv_delivery
    assert "refix caching is off" not in caplog.text


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("role", KVConnectorRole)
def test_a_wrong_configuration_is_refused(
    connect: Connect, role: KVConnectorRole, prefix_caching: bool
) -> None:
    with pytest.raises(ConfigError, match="did you mean 'num_cpu_blocks'"):
        connect(role, {"num_cpu_block": 8}, prefix_caching=prefix_caching)


@pytest.mark.parametrize("role", KVConnectorRole)
def test_without_prefix_caching_nothing_happens(
    connect: Connect, role: KVConnectorRole, memory: KVMemory, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        connector = connect(role, prefix_caching=False)
    assert ("refix caching is off" in caplog.text) == (role is SCHEDULER)
    unused = cast(Any, None)
    assert connector.scheduler is None
    assert connector.worker is None
    # Scheduler side
    connector.bind_kv_cache_manager(cast(Any, SimpleNamespace(block_pool=None)))
    connector.set_xfer_handshake_metadata_pp_aware({(0, 0): RankCapacity("r", 4, 4, 1)})
    connector.on_new_request(unused)
    assert connector.get_num_new_matched_tokens(unused, 0) == (0, False)
    connector.update_state_after_alloc(unused, unused, 0)
    metadata = connector.build_connector_meta(unused)
    assert metadata == StepMetadata()
    connector.update_connector_output(KVConnectorOutput())
    assert connector.request_finished(unused, []) == (False, None)
    assert not connector.has_pending_push_work()
    assert not connector.has_pending_block_frees()
    assert connector.reset_cache() is True
    # Worker side
    connector.register_kv_caches(memory.kv_caches)
    assert connector.get_handshake_metadata() is None
    assert connector.get_aligned_num_cpu_blocks() is None
    assert run_step(connector, metadata) == (KVConnectorTransferResults(), None)
    connector.unregister_kv_caches()
    connector.restore_kv_caches()
    assert list(connector.take_events()) == []
    assert connector.get_kv_connector_stats() is None
    connector.shutdown()
    assert not memory.storage.any()


# Scheduler side: the simulator drives its hooks by vLLM's scheduler


class Foreign(KVConnectorHandshakeMetadata):
    """Metadata of another connector, in a MultiConnector."""


def test_beside_another_connector_the_handshake_is_left_to_it(
    connect: Connect, memory: KVMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's MultiConnector passes on the metadata of its first connector that has some, and
    NixlConnector does not start without its own."""
    worker = connect(WORKER)
    worker.register_kv_caches(memory.kv_caches)
    monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", worker)
    assert isinstance(worker.get_handshake_metadata(), RankCapacity)
    theirs = Foreign()
    multi = object.__new__(MultiConnector)
    multi._connectors = [worker, Mock(get_handshake_metadata=lambda: theirs)]
    monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", multi)
    assert multi.get_handshake_metadata() is theirs
    _, report = run_step(worker, StepMetadata())
    assert report is not None
    assert report.capacities, "the scheduler learns the capacity with the first step"


def test_its_shutdown_is_passed_on(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second tier finishes its writes then."""
    connector = connect(SCHEDULER)
    monkeypatch.setattr(connector.scheduler, "shutdown", shutdown := Mock())
    connector.shutdown()
    shutdown.assert_called_once_with()


def test_without_a_second_tier_no_memory_is_shared(
    connect: Connect, memory: KVMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is there a thread for it."""
    for name in ("create", "open"):
        monkeypatch.setattr(SharedMemory, name, lambda *_: pytest.fail("shared memory"))
    worker, scheduler = connect(WORKER), connect(SCHEDULER)
    worker.register_kv_caches(memory.kv_caches)
    capacity = worker.get_handshake_metadata()
    assert isinstance(capacity, RankCapacity)
    assert (capacity.row_bytes, capacity.memory, capacity.layout) == (0, None, ())
    before = threading.active_count()
    scheduler.set_xfer_handshake_metadata_pp_aware({(0, 0): capacity})
    assert threading.active_count() == before


# Worker side


def run_step(
    connector: SimpleCPUOffloadConnector, metadata: Any
) -> tuple[KVConnectorTransferResults, WorkerReport | None]:
    """The hooks of one step, in the order of vLLM's model runner."""
    connector.handle_preemptions(metadata)
    connector.bind_connector_metadata(metadata)
    assert connector.has_connector_metadata()
    connector.start_load_kv(cast(Any, None), an_argument_of_another_version=1)
    connector.wait_for_layer_load("a")
    connector.save_kv_layer("a", torch.empty(0), cast(Any, None))
    connector.wait_for_save()
    if connector.worker is not None:
        for lane in connector.worker.lanes.values():
            lane.flush()
    results = connector.get_transfer_results(set())
    assert connector.get_block_ids_with_load_errors() == set()
    report = connector.build_connector_worker_meta()
    connector.clear_connector_metadata()
    assert not connector.has_connector_metadata()
    return results, report


def test_worker_hooks(connect: Connect, memory: KVMemory) -> None:
    connector = connect(WORKER)
    connector.register_kv_caches(memory.kv_caches)
    capacity = connector.get_handshake_metadata()
    assert isinstance(capacity, RankCapacity)
    assert capacity == RankCapacity(capacity.rank, 8, 8, 2 * SPEC.page_size_bytes)
    assert connector.get_aligned_num_cpu_blocks() == 8
    first = run_step(connector, StepMetadata())
    assert first == (
        KVConnectorTransferResults(),
        WorkerReport(capacities={capacity.rank: capacity}),
    )
    memory.storage.fill_(5)
    stored = StepMetadata(stores=[Transfer.pairing(0, [1, 2], [3, 4])])
    assert run_step(connector, stored) == (
        KVConnectorTransferResults(),
        WorkerReport(Counter([0])),
    )
    memory.storage.fill_(7)
    loaded = StepMetadata(loads=[Transfer.pairing(1, [5, 1], [3, 4], "r")])
    assert run_step(connector, loaded) == (
        KVConnectorTransferResults(finished_recving={"r"}),
        WorkerReport(Counter([1])),
    )
    for view in memory.kv_caches.values():
        assert [int(block.view(torch.int8).max()) for block in view] == [7, 5, 7, 7, 7, 5]
    assert run_step(connector, StepMetadata()) == (KVConnectorTransferResults(), None)
    beyond = StepMetadata(loads=[Transfer.pairing(2, [1], [8], "s")])
    failed = KVConnectorTransferResults(finished_recving={"s"}, failed_recving={"s"})
    assert run_step(connector, beyond) == (failed, WorkerReport(Counter([2]), Counter([2])))
    connector.start_load_kv(cast(Any, None))  # between steps
    connector.wait_for_save()


def test_loads_start_with_the_metadata_and_end_before_sleep(
    connect: Connect, memory: KVMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The forward pass has its first hook only after vLLM has prepared the inputs. Between the
    calls before and after sleep, vLLM 0.33 frees the device memory."""
    backend = ScriptedBackend()
    monkeypatch.setattr("simple_offload.worker.worker.make_backend", lambda name, path: backend)
    backend.pendings[0] = EndsWhenWaitedFor()
    connector = connect(WORKER)
    connector.register_kv_caches(memory.kv_caches)
    connector.build_connector_worker_meta()
    connector.bind_connector_metadata(StepMetadata([Transfer.pairing(0, [1], [3], "r")]))
    connector.clear_connector_metadata()
    connector.unregister_kv_caches()
    assert backend.pendings[0].ended.is_set()
    connector.restore_kv_caches()
    results, report = run_step(connector, StepMetadata())
    assert results == KVConnectorTransferResults(finished_recving={"r"})
    assert report == WorkerReport(Counter([0]))


@pytest.mark.parametrize("beside_another", [False, True])
def test_stores_end_before_an_engine_in_this_process_sleeps(
    connect: Connect,
    memory: KVMemory,
    make_vllm_config: MakeVllmConfig,
    monkeypatch: pytest.MonkeyPatch,
    beside_another: bool,
) -> None:
    """It resets the caches, and frees device memory. Before 0.33, vLLM tells no rank."""
    backend = ScriptedBackend()
    monkeypatch.setattr("simple_offload.worker.worker.make_backend", lambda name, path: backend)
    backend.pendings[0] = EndsWhenWaitedFor()
    scheduler, worker = connect(SCHEDULER), connect(WORKER)
    monkeypatch.setattr(scheduler.scheduler, "reset_cache", lambda: True)
    multi = object.__new__(MultiConnector)
    multi._connectors = [Mock(), worker]
    group = multi if beside_another else worker
    monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", group)
    worker.register_kv_caches(memory.kv_caches)
    run_step(worker, StepMetadata(stores=[Transfer.pairing(0, [1], [3])]))
    assert scheduler.reset_cache()
    assert not backend.pendings[0].ended.is_set()
    model = make_vllm_config().model_config  # that of all connectors here
    monkeypatch.setattr(model, "enable_sleep_mode", True)
    assert scheduler.reset_cache()
    assert backend.pendings[0].ended.is_set()
