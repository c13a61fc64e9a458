"""Two GPUs of one host. Where they have the same KV, in all groups or in some, there is one copy in
host memory."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from tests.engine.compare import assert_nothing_left
from tests.engine.runs import Runs
from tests.engine.spec import EngineResult
from tests.engine.targets import AGAIN, CORRUPTED, EAGER, SIZED
from tests.engine.test_gpu import ENGINE_SECONDS, assert_same, spec_of

HOST_BYTES = 512 << 20
"""As ``SIZED`` says."""
BOTH = {"shared": SIZED, "private": SIZED | {"host_copies": "private"}}

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(ENGINE_SECONDS * 4),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


def results_of(
    runs: Runs, target: str, connectors: Mapping[str, Mapping[str, Any]]
) -> dict[str, EngineResult]:
    """Results of the target's engines by name; "plain" has no connector. The answers are those
    without a connector, from host memory too. No test reaches into the ranks' processes to corrupt
    a block: the last round is left out."""
    specs = {}
    for name, connector in {"plain": None, **connectors}.items():
        spec = spec_of(runs, target, connector, EAGER)
        specs[name] = spec._replace(rounds=spec.rounds[:CORRUPTED])
    name = "-".join(["gpu", target, *connectors])
    results = runs.run(name, specs, deadline=ENGINE_SECONDS * len(specs))
    for name in connectors:
        assert_same(target, results["plain"], results[name], exact=False)
        assert results[name].metrics["external_prefix_cache_hits"] > 0
        assert_nothing_left(results[name])
    return results


def check_room(results: dict[str, EngineResult]) -> None:
    """Shared memory has twice as many blocks as private memory of the same size."""
    shared, private = results["shared"].num_host_blocks, results["private"].num_host_blocks
    assert shared is not None
    assert private is not None
    assert abs(shared - 2 * private) <= 2


def num_bytes_of_a_copy(result: EngineResult, num_stores: int) -> float:
    """Bytes that all ranks copied, for each copy of a block that they made: ``num_stores`` of a
    stored block, and two of a loaded one."""
    num_stored = result.metrics["simple_offload_stored_blocks"]
    num_loaded = result.metrics["simple_offload_loaded_blocks"]
    return result.metrics["simple_offload_bytes"] / (num_stores * num_stored + 2 * num_loaded)


def test_two_ranks(runs: Runs) -> None:
    result = results_of(runs, "llama-pair", {"tp2": SIZED})["tp2"]
    cached = [answer.num_cached_tokens for answer in result.rounds[AGAIN].values()]
    assert min(cached) > 0
    assert result.metrics["external_prefix_cache_hits"] > 0.5 * sum(cached)


@pytest.mark.parametrize("target", ["mla-pair", "one-kv-head-pair", "mimo-mtp-pair"])
def test_ranks_with_the_same_kv_have_one_copy(runs: Runs, target: str) -> None:
    results = results_of(runs, target, BOTH)
    check_room(results)
    shared, private = results["shared"], results["private"]
    assert num_bytes_of_a_copy(shared, 1) == num_bytes_of_a_copy(private, 2)
    # The same bytes, with room for twice as many tokens.
    before = results["plain"].memory
    more = {
        name: {kind: result.memory[kind] - before[kind] for kind in ("Pss_Shmem", "Pss_Anon")}
        for name, result in results.items()
    }
    assert more["shared"]["Pss_Shmem"] == pytest.approx(HOST_BYTES, rel=0.1)
    assert more["shared"]["Pss_Anon"] < HOST_BYTES / 4
    assert more["private"]["Pss_Anon"] > HOST_BYTES * 3 / 4


def test_ranks_with_the_same_kv_in_some_groups(runs: Runs) -> None:
    results = results_of(runs, "hybrid-pair", BOTH)
    check_room(results)
    copied = {name: results[name].metrics["simple_offload_bytes"] for name in BOTH}
    assert copied["shared"] < copied["private"]


def test_a_restarted_pair_finds_what_the_first_one_left(runs: Runs) -> None:
    """Files have the blocks that both ranks have alike once, and the states of each."""
    files = {"type": "fs", "root_dir": str(runs.directory / "pair"), "bytes": "8GiB"}
    connector = SIZED | {"second_tier": files | {"fetch": "always"}}
    results = results_of(runs, "hybrid-pair", {"first": connector, "restarted": connector})
    restarted = results["restarted"]
    assert restarted.metrics["simple_offload_fetched_blocks"] > 0
    num_cached = [
        sum(answer.num_cached_tokens for answer in result.rounds[0].values())
        for result in (results["first"], restarted)
    ]
    # A state is kept for some prefixes only.
    assert num_cached[1] > num_cached[0]
