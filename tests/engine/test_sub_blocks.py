"""Host blocks of several device blocks: the answers do not change."""

import pytest

from tests.engine.compare import assert_nothing_left, assert_same_answers
from tests.engine.runs import BLOCK_SIZE, HOST_BLOCKS, Runs
from tests.engine.spec import Round
from tests.engine.workloads import follow_ups, shared_prefix_asks

NUM_SUB_BLOCKS = 4
HOST_BLOCK_SIZE = NUM_SUB_BLOCKS * BLOCK_SIZE


def workload() -> tuple[Round, ...]:
    """Prompts whose common beginning ends inside a host block, and prompts that end with a host
    block. The last token of these is computed again."""
    asks = shared_prefix_asks(
        "a", seed=2, system_lengths=(230, 170), tails=2, tail_lengths=(90, 130), max_tokens=12
    )
    cut = [ask.model_copy(update={"prompt": ask.prompt[: 2 * HOST_BLOCK_SIZE]}) for ask in asks[:2]]
    asks = (*cut, *asks[2:])
    turns = follow_ups(asks, "turn", seed=3)
    return (
        Round(asks=asks, together=False),
        Round(asks=asks, together=False, reset="device"),
        Round(asks=turns, together=True),
    )


@pytest.mark.slow
def test_same_answers_with_loads_between_any_sub_blocks(runs: Runs) -> None:
    connector = {"num_cpu_blocks": HOST_BLOCKS, "cpu_block_size": HOST_BLOCK_SIZE}
    specs = {
        "plain": runs.spec("llama", connector=None, rounds=workload()),
        "sub-blocks": runs.spec("llama", connector=connector, rounds=workload()),
    }
    plain, ours = runs.run("sub-blocks", specs).values()
    assert_same_answers(plain.rounds, ours)
    assert_nothing_left(ours)
    assert ours.host_pool is not None
    assert ours.host_pool.total == HOST_BLOCKS // NUM_SUB_BLOCKS - 1
    assert ours.metrics["external_prefix_cache_hits"] > 500
    assert any(first % NUM_SUB_BLOCKS for first, _ in ours.loads), (
        "no load begins inside a host block"
    )
    assert any((last + 1) % NUM_SUB_BLOCKS for _, last in ours.loads), "no load ends inside one"
