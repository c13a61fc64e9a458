"""Valid configurations at the limits. For refused ones see the tests of the configuration and
``test_architectures.py``."""

import pytest

from examples.random_model import Architecture
from tests.engine.compare import assert_nothing_left, assert_same_answers
from tests.engine.runs import BLOCK_SIZE, HOST_BLOCKS, Runs
from tests.engine.spec import EngineResult, Round
from tests.engine.workloads import COLD, full_workload

pytestmark = pytest.mark.slow

FIRST = full_workload()[COLD].asks[0]
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
                "llama",
                connector={"num_cpu_blocks": 4},
                rounds=(*full_workload(), *FIRST_TWICE),
            ),
            "no room": runs.spec("llama", connector={"num_cpu_blocks": 2}),
            # A window of 64 tokens reaches into 3 blocks of each of 2 groups.
            "less than a window": runs.spec("gemma3", connector={"num_cpu_blocks": 3}),
            "kv_producer": runs.spec(
                "llama", connector=CONNECTOR, transfer_arguments={"kv_role": "kv_producer"}
            ),
            "kv_consumer": runs.spec(
                "llama", connector=CONNECTOR, transfer_arguments={"kv_role": "kv_consumer"}
            ),
            "no prefix caching": runs.spec(
                "llama", connector=CONNECTOR, enable_prefix_caching=False
            ),
        },
    )


def test_host_tier_smaller_than_a_prefix(runs: Runs, engines: dict[str, EngineResult]) -> None:
    small, roomy = engines["small tier"], engines["kv_producer"]
    plain = runs.plain("llama").rounds
    again = {FIRST.id: plain[COLD][FIRST.id]}
    assert_same_answers([*plain, again, again], small)
    hits = small.metrics["external_prefix_cache_hits"]
    # At least the beginning of a prompt that comes twice in succession.
    assert 3 * BLOCK_SIZE <= hits < roomy.metrics["external_prefix_cache_hits"]
    assert_nothing_left(small)


@pytest.mark.parametrize(
    ("engine", "model"), [("no room", "llama"), ("less than a window", "gemma3")]
)
def test_host_tier_without_room_for_a_hit(
    runs: Runs, engines: dict[str, EngineResult], engine: str, model: Architecture
) -> None:
    assert_same_answers(runs.plain(model).rounds, engines[engine])
    assert_nothing_left(engines[engine])


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
def test_any_role_stores_and_loads(runs: Runs, engines: dict[str, EngineResult], role: str) -> None:
    assert_same_answers(runs.plain("llama").rounds, engines[role])
    assert engines[role].metrics["external_prefix_cache_hits"] > 0
    assert_nothing_left(engines[role])


def test_without_prefix_caching_the_connector_does_nothing(
    runs: Runs, engines: dict[str, EngineResult]
) -> None:
    result = engines["no prefix caching"]
    assert_same_answers(runs.plain("llama").rounds, result)
    assert result.metrics["external_prefix_cache_hits"] == 0
    assert result.host_pool is None
    (warning,) = result.warnings
    assert "prefix caching is off" in warning.lower()
    assert_nothing_left(result)
