"""The hosts of ranks, and the check of sizes against each rank's own host.

The deployments are those of public recipes that select this connector (InferenceX, 2026-08), as
vLLM's arguments make them: on several nodes each server, or each headless node, knows its own part.
"""

from typing import Any

import pytest
from vllm.config import ParallelConfig

from simple_offload.config import GIB, ConfigError, OffloadConfig
from simple_offload.ranks import Ranks
from tests.conftest import Machine


def parallel_config(**changes: Any) -> ParallelConfig:
    return ParallelConfig(distributed_executor_backend="mp", **changes)


PER_RANK = {"cpu_bytes_to_use_per_rank": 220 * GIB}
BOTH_KEYS = {"cpu_bytes_to_use": 512 * GIB, "cpu_bytes_to_use_per_rank": 128 * GIB}
TP8, TP4 = {"tensor_parallel_size": 8}, {"tensor_parallel_size": 4}
ENGINE_ON_EACH_GPU = {"data_parallel_size": 8, "data_parallel_size_local": 8}
ENGINE_ON_EACH_NODE = {**TP4, "data_parallel_size": 4, "data_parallel_size_local": 1}
FOUR_NODES = {**TP4, "pipeline_parallel_size": 4, "nnodes": 4}


DEPLOYMENTS: dict[str, tuple[dict[str, Any], int, dict[str, Any]]] = {
    "dsv4 on B200": (PER_RANK, 1760, ENGINE_ON_EACH_GPU),
    "dsv4 on B300": ({"cpu_bytes_to_use": 220 * GIB}, 1760, ENGINE_ON_EACH_GPU),
    "Kimi-K3 on MI355X": (PER_RANK, 1760, TP8),
    "MiniMax-M3 on B200, sized whole": ({"cpu_bytes_to_use": 1600 * GIB}, 1600, TP4),
    "Kimi-K3 on nodes of GB200": (BOTH_KEYS, 512, ENGINE_ON_EACH_NODE),
    "... by node rank": (BOTH_KEYS, 512, ENGINE_ON_EACH_NODE | {"nnodes": 4, "node_rank": 2}),
    "... an engine on each GPU": (
        BOTH_KEYS,
        512,
        {"data_parallel_size": 16, "data_parallel_size_local": 4},
    ),
    "... behind a balancer of their own": (
        BOTH_KEYS,
        512,
        ENGINE_ON_EACH_NODE | {"data_parallel_rank": 3, "data_parallel_external_lb": True},
    ),
    "one engine on four": ({"cpu_bytes_to_use_per_rank": 128 * GIB}, 512, FOUR_NODES),
    "... sized as a whole": ({"cpu_bytes_to_use": 2048 * GIB}, 512, FOUR_NODES),
}


@pytest.mark.parametrize(
    ("extra_config", "needed_gib", "parallel"), DEPLOYMENTS.values(), ids=DEPLOYMENTS
)
def test_sizes_start_on_the_hosts_that_they_are_for(
    machine: Machine,
    extra_config: dict[str, Any],
    needed_gib: int,
    parallel: dict[str, Any],
) -> None:
    """The ranks of a node use ``needed_gib`` together."""
    ranks = Ranks.from_config(parallel_config(**parallel))
    machine.num_bytes = needed_gib * GIB
    OffloadConfig.parse(extra_config, Ranks(1, 0))  # vLLM's first question
    OffloadConfig.parse(extra_config, ranks)
    machine.num_bytes = (needed_gib - 1) * GIB
    with pytest.raises(ConfigError, match=f"{needed_gib}.00 GiB of host memory"):
        OffloadConfig.parse(extra_config, ranks)


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
    """Every process of the engine takes them to be unlike: some may be on another node."""
    monkeypatch.setattr(
        "vllm.platforms.current_platform.device_count", lambda: num_devices, raising=False
    )
    parallel = parallel_config(tensor_parallel_size=16)
    parallel.distributed_executor_backend = "ray"  # the constructor would look for Ray
    num_local = None if num_here == 16 else num_here
    are_alike = False
    assert Ranks.from_config(parallel) == Ranks(16, num_here, are_alike, num_local)


@pytest.mark.parametrize(("nnodes", "gib"), [(1, 5), (2, 10), (4, 20)])
def test_a_share_is_of_each_node(machine: Machine, nnodes: int, gib: int) -> None:
    """The nodes may have different memory, so ranks have to agree on their blocks."""
    ranks = Ranks.from_config(parallel_config(tensor_parallel_size=16, nnodes=nnodes))
    extra_config = {"cpu_bytes_to_use": "80%"}
    config = OffloadConfig.parse(extra_config, ranks)
    assert config.bytes_per_rank(ranks.num) == gib * GIB
    assert ranks.are_alike == (nnodes == 1)


def test_one_rank() -> None:
    assert Ranks.from_config(ParallelConfig()) == Ranks(1, 1)
