"""A live server says why prompts were not found: in replies, and in its metrics."""

from typing import Any

import pytest

from simple_offload import metrics
from tests.serve.server import Server

PATH = "/v1/completions"
BLOCK_SIZE = 32


def prompt(family: int, num_tokens: int = 100) -> list[int]:
    return [(family * 37 + place * place + place // 7) % 300 + 100 for place in range(num_tokens)]


def ask(
    server: Server, tokens: list[int], wishes: dict[str, Any] | None = None, **more: Any
) -> Any:
    """Returns what the reply says of the first missing token."""
    params = {"simple_offload": {**(wishes or {}), "report": True}}
    reply = server.answer(tokens, 1, PATH, kv_transfer_params=params, **more)
    server.wait_for(server.is_idle, 30, "the request to end")
    return reply["kv_transfer_params"]["simple_offload"]["first_missing"]


def fill(server: Server, first: int, num_prompts: int) -> None:
    for family in range(first, first + num_prompts):
        server.answer(prompt(family, 600), 1, PATH)


def test_reasons(server: Server) -> None:
    start = {
        reason: server.metric(metrics.MISSED_TOKENS, reason=reason)
        for reason in metrics.SERIES[metrics.MISSED_TOKENS].labels["reason"]
    }
    tokens, private, once = prompt(0), prompt(1), prompt(2)
    assert ask(server, tokens) == {"token": 0, "reason": "unseen"}
    assert ask(server, tokens) == {"token": 96, "reason": "prompt_end"}
    assert ask(server, tokens, prompt_logprobs=1) == {"token": 0, "reason": "not_asked"}
    # A client does not learn that others have sent the same.
    assert ask(server, tokens, cache_salt="other") == {"token": 0, "reason": "unseen"}
    ask(server, private, {"store": False})
    ask(server, once)
    fill(server, 10, 2)
    assert ask(server, private) == {"token": 0, "reason": "wish"}
    fill(server, 12, 1 + int(server.metric(metrics.CAPACITY)) * BLOCK_SIZE // 576)
    first = ask(server, once)
    assert (first["token"], first["reason"]) == (0, "evicted")
    assert 1 <= first["host_memory_factor"] < 2
    server.reset_prefix_cache(external=True)
    assert ask(server, once) == {"token": 0, "reason": "reset"}
    counted = {
        reason: server.metric(metrics.MISSED_TOKENS, reason=reason) - before
        for reason, before in start.items()
    }
    few = {"not_asked": 100, "other_key": 96, "wish": 96, "evicted": 96, "reset": 96}
    assert {reason: counted[reason] for reason in few} == pytest.approx(few)
    assert counted["unseen"] > 96
    computed = server.metric(metrics.PROMPT_TOKENS, source="compute")
    assert sum(server.metric(metrics.MISSED_TOKENS, reason=reason) for reason in start) == computed


def test_other_sizes_of_host_memory(server: Server) -> None:
    """More memory would have found what came again."""

    def is_predicted() -> bool:
        server.answer(prompt(3), 1, PATH)
        return server.metric(metrics.PREDICTED, host_memory="8x") > 0

    server.wait_for(is_predicted, 30, "a prediction")
    ratios = [
        server.metric(metrics.PREDICTED, host_memory=label)
        for label in metrics.SERIES[metrics.PREDICTED].labels["host_memory"]
    ]
    assert ratios == sorted(ratios)
    assert ratios[0] < ratios[-1] < 1
