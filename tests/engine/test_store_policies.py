"""Stores of repeated prefixes only: the answers do not change."""

import pytest

from tests.engine.compare import assert_nothing_left, assert_same_answers
from tests.engine.runs import HOST_BLOCKS, Runs, small_steps
from tests.engine.spec import Round
from tests.engine.workloads import follow_ups, shared_prefix_asks

ASKS = shared_prefix_asks("a", seed=8, max_tokens=8)
ROUNDS = (
    Round(asks=ASKS, together=False, reset="device"),
    Round(asks=ASKS[::-1], together=False, reset="device"),
    Round(asks=follow_ups(ASKS, "turn", seed=9), together=True, reset="device"),
)


@pytest.mark.slow
def test_stores_of_repeated_prefixes(runs: Runs) -> None:
    repeated = {"num_cpu_blocks": HOST_BLOCKS, "store_threshold": 2}
    connectors = {
        "plain": None,
        "eager": repeated,
        "lazy": repeated | {"lazy_offload": True},
    }
    plain, *others = runs.run(
        "repeated",
        {
            name: runs.spec(connector=connector, rounds=ROUNDS, **small_steps())
            for name, connector in connectors.items()
        },
    ).values()
    for result in others:
        assert_same_answers(plain.rounds, result)
        assert_nothing_left(result)
        assert result.metrics["external_prefix_cache_hits"] > 0
