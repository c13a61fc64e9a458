"""Bytes that go wrong, and requests that must not share: what the equality tests rest on."""

import pytest

from tests.engine.compare import assert_nothing_left, assert_same_answers, differences
from tests.engine.runs import HOST_BLOCKS, Runs
from tests.engine.spec import Ask, EngineResult, Round
from tests.engine.workloads import full_workload

CONNECTOR = {"num_cpu_blocks": HOST_BLOCKS}


def one_by_one_twice(*, corrupt: bool) -> tuple[Round, ...]:
    """The full workload's first two rounds, the second from the host tier alone."""
    first, second, *_ = full_workload()
    again = second.model_copy(update={"reset": "device", "corrupt_a_block": corrupt})
    return first, again


def salted(asks: tuple[Ask, ...], cache_salt: str) -> tuple[Ask, ...]:
    return tuple(ask.model_copy(update={"cache_salt": cache_salt}) for ask in asks)


@pytest.fixture(scope="module")
def engines(runs: Runs) -> dict[str, EngineResult]:
    rounds = full_workload()
    failing = (rounds[0].model_copy(update={"failing_copies": 3}), *rounds[1:])
    recompute = {"kv_load_failure_policy": "recompute"}
    first, second, *_ = rounds
    other_tenants = (
        first,
        first.model_copy(update={"asks": salted(first.asks, "a"), "together": True}),
        second.model_copy(update={"asks": salted(first.asks, "a")}),
        second.model_copy(update={"asks": salted(first.asks, "b"), "reset": "device"}),
    )
    emptied = (first, second.model_copy(update={"reset": "both"}), second)
    return runs.run(
        "faults",
        {
            "intact": runs.spec(connector=CONNECTOR, rounds=one_by_one_twice(corrupt=False)),
            "corrupt": runs.spec(connector=CONNECTOR, rounds=one_by_one_twice(corrupt=True)),
            "failing": runs.spec(connector=CONNECTOR, rounds=failing, transfer_arguments=recompute),
            "salted": runs.spec(connector=CONNECTOR, rounds=other_tenants),
            "emptied": runs.spec(connector=CONNECTOR, rounds=emptied),
        },
    )


def test_one_corrupted_host_block_changes_answers(
    runs: Runs, engines: dict[str, EngineResult]
) -> None:
    """The negative control: the equality tests would notice a single wrong block."""
    expected = runs.plain("llama").rounds[:2]
    assert engines["intact"].corrupted_blocks == 0
    assert_same_answers(expected, engines["intact"])
    corrupt = engines["corrupt"]
    assert corrupt.error is None, corrupt.error
    assert corrupt.corrupted_blocks == 1
    assert not differences(expected[:1], corrupt.rounds[:1])
    changed = differences(expected[1:], corrupt.rounds[1:])
    assert any("token" in line for line in changed), changed


def test_failing_copies_are_recomputed(runs: Runs, engines: dict[str, EngineResult]) -> None:
    """Every third copy fails, loads and stores alike: no wrong answer, no hang, no leak."""
    failing = engines["failing"]
    assert failing.failed_copies > 10
    assert failing.metrics["external_prefix_cache_hits"] > 0
    assert_same_answers(runs.plain("llama").rounds, failing)
    assert_nothing_left(failing)
    assert any("fails on purpose" in message for message in failing.warnings)


@pytest.mark.proves("I8")
def test_nothing_is_shared_across_cache_salts(runs: Runs, engines: dict[str, EngineResult]) -> None:
    result = engines["salted"]
    unsalted, *_ = runs.plain("llama").rounds
    assert_same_answers([unsalted] * 4, result)
    without_salt, _, again_a, salt_b = result.rounds
    cached = [
        sum(answer.num_cached_tokens for answer in answers.values())
        for answers in (without_salt, salt_b)
    ]
    assert cached[1] == cached[0], "a salt's first round finds what another stored"
    assert all(answer.num_cached_tokens > 0 for answer in again_a.values())
    assert_nothing_left(result)


def test_a_reset_empties_the_host_tier(runs: Runs, engines: dict[str, EngineResult]) -> None:
    result = engines["emptied"]
    first = runs.plain("llama").rounds[0]
    assert_same_answers([first] * 3, result)
    computed, after_reset, again = result.rounds
    for ask_id, answer in after_reset.items():
        assert answer.num_cached_tokens == computed[ask_id].num_cached_tokens
        assert again[ask_id].num_cached_tokens > 0
    assert_nothing_left(result)
