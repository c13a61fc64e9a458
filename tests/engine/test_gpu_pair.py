"""Two GPUs of one host that have the same KV, in all groups or in some: one copy in host memory."""

from collections.abc import Callable

import pytest
import torch

from tests.engine.compare import assert_nothing_left
from tests.engine.runs import Runs
from tests.engine.spec import EngineResult
from tests.engine.targets import EAGER, FOLLOW_UPS, SIZED
from tests.engine.test_gpu import ENGINE_SECONDS, assert_same, spec_of

HOST_BYTES = 512 << 20
"""As ``SIZED`` says."""
PRIVATE = SIZED | {"host_copies": "private"}

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(ENGINE_SECONDS * 4),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


def results_of(runs: Runs, target: str) -> dict[str, EngineResult]:
    """Results of the target's engines: without a connector, with it, and with private copies. No
    test reaches into the ranks' processes to corrupt a block: the last round is left out."""
    connectors = {"plain": None, "shared": SIZED, "private": PRIVATE}
    specs = {
        name: spec_of(runs, target, connector, EAGER) for name, connector in connectors.items()
    }
    specs = {
        name: spec._replace(rounds=spec.rounds[: FOLLOW_UPS + 1]) for name, spec in specs.items()
    }
    return runs.run(f"gpu-{target}", specs, deadline=ENGINE_SECONDS * len(specs))


def check_answers_and_room(target: str, results: dict[str, EngineResult]) -> None:
    """The answers are those without a connector, from host memory too. Shared memory has twice as
    many blocks as private memory of the same size."""
    for name in ("shared", "private"):
        assert_same(target, results["plain"], results[name], exact=False)
        assert results[name].metrics["external_prefix_cache_hits"] > 0
        assert_nothing_left(results[name])
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


@pytest.mark.parametrize("target", ["mla-pair", "one-kv-head-pair"])
def test_ranks_with_the_same_kv_have_one_copy(
    runs: Runs, target: str, record_property: Callable[[str, object], None]
) -> None:
    results = results_of(runs, target)
    check_answers_and_room(target, results)
    shared, private = results["shared"], results["private"]
    assert num_bytes_of_a_copy(shared, 1) == num_bytes_of_a_copy(private, 2)
    # The same bytes, with room for twice as many tokens.
    before = results["plain"].memory
    more = {
        name: {kind: result.memory[kind] - before[kind] for kind in ("Pss_Shmem", "Pss_Anon")}
        for name, result in results.items()
    }
    record_property("memory", more)
    assert more["shared"]["Pss_Shmem"] == pytest.approx(HOST_BYTES, rel=0.1)
    assert more["shared"]["Pss_Anon"] < HOST_BYTES / 4
    assert more["private"]["Pss_Anon"] > HOST_BYTES * 3 / 4


def test_ranks_with_the_same_kv_in_some_groups(
    runs: Runs, record_property: Callable[[str, object], None]
) -> None:
    target = "hybrid-pair"
    results = results_of(runs, target)
    check_answers_and_room(target, results)
    shared, private = results["shared"], results["private"]
    copied = [result.metrics["simple_offload_bytes"] for result in (shared, private)]
    stored = [result.metrics["simple_offload_stored_blocks"] for result in (shared, private)]
    record_property("bytes copied, blocks stored", [copied, stored])
    assert copied[0] < copied[1]


def test_a_restarted_pair_finds_what_the_first_one_left(runs: Runs) -> None:
    """Files have the blocks that both ranks have alike once, and the states of each."""
    target = "hybrid-pair"
    files = {"type": "fs", "root_dir": str(runs.directory / "pair"), "bytes": "8GiB"}
    connector = SIZED | {"second_tier": files | {"fetch": "always"}}
    plain, spec = (spec_of(runs, target, each, EAGER) for each in (None, connector))
    specs = {
        "plain": plain._replace(rounds=plain.rounds[: FOLLOW_UPS + 1]),
        "first": spec._replace(rounds=spec.rounds[:1]),
        "restarted": spec._replace(rounds=spec.rounds[: FOLLOW_UPS + 1]),
    }
    results = runs.run("gpu-pair-restart", specs, deadline=ENGINE_SECONDS * len(specs))
    restarted = results["restarted"]
    assert_same(target, results["plain"], restarted, exact=False)
    assert_nothing_left(restarted)
    assert restarted.metrics["simple_offload_fetched_blocks"] > 0
    num_cached = [
        sum(answer.num_cached_tokens for answer in result.rounds[0].values())
        for result in (results["first"], restarted)
    ]
    # A state is kept for some prefixes only.
    assert num_cached[1] > num_cached[0]
