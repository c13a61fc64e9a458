"""The hosts of ranks, and the check of sizes against each rank's own host.

The deployments are those of public recipes that select this connector (InferenceX, 2026-08), as
vLLM's arguments make them: on several nodes each server, or each headless node, knows its own part.
"""

from dataclasses import dataclass, field
from typing import Any

import pytest
from vllm.config import ParallelConfig

from simple_offload.config import GIB, ConfigError, OffloadConfig
from simple_offload.ranks import Ranks
from tests.conftest import Machine


def parallel_config(**changes: Any) -> ParallelConfig:
    """The configuration with ``changes``. They are set afterwards where the constructor would act
    on them (search for Ray, set variables)."""
    late = {key: changes.pop(key) for key in ("distributed_executor_backend",) if key in changes}
    config = ParallelConfig(**{"distributed_executor_backend": "mp"} | changes)
    for key, value in late.items():
        setattr(config, key, value)
    return config


@dataclass(frozen=True)
class Deployment:
    extra_config: dict[str, Any]
    host_gib: int
    """Memory of a node of that kind, or less."""
    needed_gib: int
    """Memory that the ranks of a node use together, rounded up."""
    parallel: dict[str, Any] = field(default_factory=dict)
    """Arguments of ParallelConfig."""


BOTH_KEYS = {"cpu_bytes_to_use": 549755813888, "cpu_bytes_to_use_per_rank": 137438953472}
TP8, TP4 = {"tensor_parallel_size": 8}, {"tensor_parallel_size": 4}
DEPLOYMENTS = {
    "dsv4 on B200, an engine on each GPU": Deployment(
        {"cpu_bytes_to_use_per_rank": 220 * GIB},
        2900,
        1760,
        {"data_parallel_size": 8, "data_parallel_size_local": 8},
    ),
    "dsv4 on B300, a size of each rank under the server's key": Deployment(
        {"cpu_bytes_to_use": 220 * GIB},
        2900,
        1760,
        {"data_parallel_size": 8, "data_parallel_size_local": 8},
    ),
    "Kimi-K3 on MI355X": Deployment({"cpu_bytes_to_use_per_rank": 220 * GIB}, 2900, 1760, TP8),
    "MiniMax-M3 on B200": Deployment({"cpu_bytes_to_use": 1600 * GIB}, 1900, 1600, TP4),
    "Kimi-K3 on four nodes of GB200, four engines": Deployment(
        BOTH_KEYS, 890, 512, TP4 | {"data_parallel_size": 4, "data_parallel_size_local": 1}
    ),
    "... by node rank": Deployment(
        BOTH_KEYS,
        890,
        512,
        TP4 | {"data_parallel_size": 4, "data_parallel_size_local": 1, "nnodes": 4, "node_rank": 2},
    ),
    "... an engine on each GPU": Deployment(
        BOTH_KEYS, 890, 512, {"data_parallel_size": 16, "data_parallel_size_local": 4}
    ),
    "... behind a balancer of their own": Deployment(
        BOTH_KEYS,
        890,
        512,
        TP4
        | {
            "data_parallel_size": 4,
            "data_parallel_size_local": 1,
            "data_parallel_rank": 3,
            "data_parallel_external_lb": True,
        },
    ),
    "Kimi-K3 on four nodes of H200, four engines": Deployment(
        {"cpu_bytes_to_use_per_rank": 154250000000},
        1900,
        1150,
        TP8 | {"data_parallel_size": 4, "data_parallel_size_local": 1},
    ),
    "MiniMax-M3 on GB200": Deployment(BOTH_KEYS, 890, 512, TP4),
    "one engine over four nodes": Deployment(
        {"cpu_bytes_to_use_per_rank": 128 * GIB},
        890,
        512,
        {"tensor_parallel_size": 4, "pipeline_parallel_size": 4, "nnodes": 4},
    ),
    "one engine over four nodes, sized as a whole": Deployment(
        {"cpu_bytes_to_use": 2048 * GIB},
        890,
        512,
        {"tensor_parallel_size": 4, "pipeline_parallel_size": 4, "nnodes": 4},
    ),
}


@pytest.mark.parametrize("deployment", DEPLOYMENTS.values(), ids=list(DEPLOYMENTS))
def test_sizes_start_on_the_hosts_that_they_are_for(
    machine: Machine, deployment: Deployment
) -> None:
    ranks = Ranks.from_config(parallel_config(**deployment.parallel))
    machine.num_bytes = deployment.host_gib * GIB
    OffloadConfig.parse(deployment.extra_config, 1, 0)  # vLLM's first question
    OffloadConfig.parse(deployment.extra_config, ranks.num, ranks.num_here)
    machine.num_bytes = deployment.needed_gib * GIB
    OffloadConfig.parse(deployment.extra_config, ranks.num, ranks.num_here)
    machine.num_bytes = (deployment.needed_gib - 2) * GIB
    with pytest.raises(ConfigError, match=f"{deployment.needed_gib - 1}|{deployment.needed_gib}"):
        OffloadConfig.parse(deployment.extra_config, ranks.num, ranks.num_here)


@pytest.mark.parametrize("number", [0, 3])
def test_an_engine_of_a_dense_model_counts_those_before_it(number: int) -> None:
    """vLLM's configuration of each engine describes that engine alone, except for its number on
    this machine. An engine therefore counts those before it. The last one counts all, and the
    server does not start without it."""
    parallel = parallel_config(
        **TP4, data_parallel_size=4, data_parallel_size_local=4, data_parallel_rank_local=number
    )
    parallel.data_parallel_rank_local = number  # as EngineCoreProc.run_engine_core does
    parallel.reconfigure_for_independent_dp_rank()
    assert parallel.data_parallel_size_local == 1
    assert Ranks.from_config(parallel) == Ranks(4, 4 * (number + 1))


@pytest.mark.parametrize(("num_devices", "num_here"), [(8, 8), (16, 16), (99, 16), (0, 1)])
def test_ranks_that_ray_places_are_where_devices_are(
    monkeypatch: pytest.MonkeyPatch, num_devices: int, num_here: int
) -> None:
    monkeypatch.setattr(
        "vllm.platforms.current_platform.device_count", lambda: num_devices, raising=False
    )
    parallel = parallel_config(
        tensor_parallel_size=8, pipeline_parallel_size=2, distributed_executor_backend="ray"
    )
    assert Ranks.from_config(parallel) == Ranks(16, num_here, are_alike=False)


def test_one_rank() -> None:
    assert Ranks.from_config(ParallelConfig()) == Ranks(1, 1)


def test_a_machine_that_may_get_more_memory(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    machine.num_bytes = 31 * GIB
    with pytest.raises(ConfigError, match=r"31\.00 GiB in all"):
        OffloadConfig.parse({"cpu_bytes_to_use": "200GiB"}, 1)
    machine.write("/sys/bus/virtio/drivers/virtio_mem/virtio3/device", "")
    config = OffloadConfig.parse({"cpu_bytes_to_use": "200GiB"}, 1)
    assert config.cpu_bytes_to_use == 200 * GIB
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "has 31.00 GiB so far" in record.getMessage()
    # A cgroup's limit does not grow.
    machine.write("/proc/self/cgroup", "0::/")
    machine.write("/sys/fs/cgroup/memory.max", f"{100 * GIB}")
    with pytest.raises(ConfigError, match=r"100\.00 GiB in all"):
        OffloadConfig.parse({"cpu_bytes_to_use": "200GiB"}, 1)
