"""Configurations at the edge of sense, or beyond it."""

import pytest

from tests.engine.compare import assert_nothing_left, assert_same_answers
from tests.engine.harness import log_tail
from tests.engine.runs import BLOCK_SIZE, HOST_BLOCKS, Runs
from tests.engine.spec import EngineResult, Round
from tests.engine.workloads import full_workload

ROUNDS = full_workload()[:4]
FIRST = ROUNDS[0].asks[0]
FIRST_TWICE = (Round(asks=(FIRST,), together=False, reset="device"),) * 2
CONNECTOR = {"num_cpu_blocks": HOST_BLOCKS}


@pytest.fixture(scope="module")
def engines(runs: Runs) -> dict[str, EngineResult]:
    """Engines that start, in one child process."""
    return runs.run(
        "bad-input",
        {
            # The prompts are 4 to 11 blocks long, and one of these is vLLM's null block.
            "small tier": runs.spec(
                connector={"num_cpu_blocks": 4}, rounds=(*ROUNDS, *FIRST_TWICE)
            ),
            "no room": runs.spec(connector={"num_cpu_blocks": 2}, rounds=ROUNDS),
            # A window of 64 tokens reaches into 3 blocks of each of 2 groups.
            "less than a window": runs.spec(
                "gemma3", connector={"num_cpu_blocks": 3}, rounds=ROUNDS
            ),
            "producer": runs.spec(
                connector=CONNECTOR,
                rounds=ROUNDS,
                transfer_arguments={"kv_role": "kv_producer"},
            ),
            "consumer": runs.spec(
                connector=CONNECTOR,
                rounds=ROUNDS,
                transfer_arguments={"kv_role": "kv_consumer"},
            ),
            "no prefix caching": runs.spec(
                connector=CONNECTOR, rounds=ROUNDS, enable_prefix_caching=False
            ),
        },
    )


@pytest.fixture(scope="module")
def failed_starts(runs: Runs) -> dict[str, EngineResult]:
    """Engines whose start has to fail, in one child process."""
    return runs.run(
        "failed-starts",
        {
            "wrong key": runs.spec(connector={"cpu_byte_to_use": "1GiB"}),
            "wrong size": runs.spec(connector={"cpu_bytes_to_use": "lots"}),
            "too large": runs.spec(connector={"cpu_bytes_to_use": "900TiB"}),
            "too small": runs.spec(connector={"cpu_bytes_to_use": 1000}),
            "unknown backend": runs.spec(connector={"backend": "tpu"} | CONNECTOR),
            "other platform": runs.spec(connector={"backend": "cuda"} | CONNECTOR),
        },
    )


def test_host_tier_smaller_than_a_prefix(runs: Runs, engines: dict[str, EngineResult]) -> None:
    small, roomy = engines["small tier"], engines["producer"]
    plain = runs.plain("llama").rounds
    again = {FIRST.id: plain[0][FIRST.id]}
    assert_same_answers([*plain[:4], again, again], small)
    hits = small.metrics["external_prefix_cache_hits"]
    # At least the beginning of a prompt that comes twice in succession.
    assert 3 * BLOCK_SIZE <= hits < roomy.metrics["external_prefix_cache_hits"]
    assert_nothing_left(small)


def test_host_tier_of_a_single_block(runs: Runs, engines: dict[str, EngineResult]) -> None:
    assert_same_answers(runs.plain("llama").rounds[:4], engines["no room"])
    assert_nothing_left(engines["no room"])


def test_host_tier_smaller_than_a_window(runs: Runs, engines: dict[str, EngineResult]) -> None:
    result = engines["less than a window"]
    assert_same_answers(runs.plain("gemma3").rounds[:4], result)
    assert_nothing_left(result)


@pytest.mark.parametrize("role", ["producer", "consumer"])
def test_any_role_stores_and_loads(runs: Runs, engines: dict[str, EngineResult], role: str) -> None:
    assert_same_answers(runs.plain("llama").rounds[:4], engines[role])
    assert engines[role].metrics["external_prefix_cache_hits"] > 0
    assert_nothing_left(engines[role])


def test_without_prefix_caching_the_connector_steps_aside(
    runs: Runs, engines: dict[str, EngineResult]
) -> None:
    result = engines["no prefix caching"]
    assert_same_answers(runs.plain("llama").rounds[:4], result)
    assert result.metrics["external_prefix_cache_hits"] == 0
    assert result.host_pool is None
    (warning,) = result.warnings
    assert "prefix caching is off" in warning.lower()
    assert_nothing_left(result)


@pytest.mark.parametrize(
    ("engine", "says"),
    [
        ("wrong key", ["cpu_byte_to_use", "did you mean 'cpu_bytes_to_use'"]),
        ("wrong size", ["cpu_bytes_to_use='lots'", '"64GiB"']),
        ("too large", ["cpu_bytes_to_use=", "921600.00 GiB", "GiB in all"]),
        ("too small", ["cpu_bytes_to_use=1000", "2 blocks"]),
        ("unknown backend", ["backend='tpu'", "'cuda'", "'npu'", "'host'"]),
        ("other platform", ["backend='cuda'", "'cpu'", "'host'"]),
    ],
)
def test_start_fails_and_says_why(
    failed_starts: dict[str, EngineResult], engine: str, says: list[str]
) -> None:
    result = failed_starts[engine]
    assert not result.started
    assert result.error is not None
    for words in says:
        assert words in result.error, f"{words!r} is not in the error\n{log_tail(result.log)}"
