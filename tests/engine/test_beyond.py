"""Live engines with vLLM's defaults: what users do beyond requests."""

import random
from typing import Any

from tests.engine.harness import run_child
from tests.engine.runs import BLOCK_SIZE, Runs
from tests.engine.spec import EngineSpec

TIER: dict[str, Any] = {"num_cpu_blocks": 400}


def prompt(num_tokens: int, seed: int) -> tuple[int, ...]:
    """Tokens of one seed."""
    rng = random.Random(seed)
    return tuple(rng.randrange(5, 500) for _ in range(num_tokens))


def specs(runs: Runs, **arguments: Any) -> tuple[EngineSpec, EngineSpec]:
    """An engine without and one with the connector."""
    plain, tier = (
        runs.spec("llama", connector=connector, rounds=(), **arguments)
        for connector in (None, TIER)
    )
    return plain, tier


def play(runs: Runs, name: str, function: str, *arguments: object) -> Any:
    return run_child(runs.directory / name, f"tests.engine.beyond:{function}", *arguments)


def test_new_weights_do_not_meet_old_kv(runs: Runs) -> None:
    """Resets succeed right behind an answer."""
    plain, tier = specs(runs)
    keeping = tier._replace(connector=TIER | {"keep_on_device_reset": True})
    others = [prompt(300, seed) for seed in range(2, 12)]
    expected, found, kept = play(
        runs, "weights", "play_new_weights", (plain, tier, keeping), prompt(200, 1), others
    )
    assert expected[0].tokens != expected[1].tokens, "the weights are the same"
    assert [answer.tokens for answer in found[:2]] == [answer.tokens for answer in expected[:2]]
    assert found[2] == 0
    assert kept[1].tokens != expected[1].tokens, "a control: old KV gives other answers"
    assert kept[2] > 0


def test_a_session_and_a_parked_request_both_answer(runs: Runs) -> None:
    """Together they need more blocks than there are."""
    plain, tier = specs(runs, num_gpu_blocks_override=41, max_model_len=1024)
    tier = tier._replace(connector=TIER | {"keep_on_device_reset": True})
    cached = prompt(25 * BLOCK_SIZE + 5, 1)
    inputs = [prompt(10 * BLOCK_SIZE + 3, 2), prompt(10 * BLOCK_SIZE - 3, 3)]
    expected, found = play(runs, "session", "play_a_session", (plain, tier), cached, inputs, 400)
    assert found == expected
