"""A live server says why prompts were not found: in replies, and in its metrics."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from simple_offload import metrics
from simple_offload.miss_reason import MissReason
from tests.serve.conftest import KEEPS_AND_REPORTS, OURS, PLAIN, configured, save_model
from tests.serve.server import FORKING, Server

PATH = "/v1/completions"
BLOCK_SIZE = 32
NAME = metrics.MISSED_TOKENS
ONE_GROUP = {"not_asked": 100, "other_key": 96, "wish": 96, "evicted": 96, "reset": 96}
WINDOWS = {
    "boundary": 192,
    "below_threshold": 96,
    "load_failed": 96,
    "not_stored": 96,
    "no_room": 608,
}
"""Computed tokens by reason that each server's prompts are made for."""
OFTEN = ("unseen", "prompt_end", "overload")


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


def missed(server: Server) -> dict[str, float]:
    """Computed tokens by reason."""
    samples = server.samples()
    return {each.labels["reason"]: each.value for each in samples if each.name == NAME}


def test_each_reason_is_provoked() -> None:
    assert {each.label for each in MissReason} == {*ONE_GROUP, *WINDOWS, *OFTEN}


def test_reasons(server: Server) -> None:
    start = missed(server)
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
    counted = {reason: count - start[reason] for reason, count in missed(server).items()}
    assert {reason: counted[reason] for reason in ONE_GROUP} == ONE_GROUP
    assert counted["unseen"] > 96
    computed = server.metric(metrics.PROMPT_TOKENS, source="compute")
    assert sum(missed(server).values()) == computed


@pytest.fixture(scope="module")
def small_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A model with windows, on a device with room for one prompt and nothing else. Behind a load
    vLLM wants room for drafts as well. Copies fail on request."""
    folder = tmp_path_factory.mktemp("small")
    extra = {"num_cpu_blocks": 61, "store_threshold": 2}
    config = OURS | {
        "kv_connector_module_path": "tests.faults.connector",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": KEEPS_AND_REPORTS | extra,
    }
    drafts = {"method": "ngram", "num_speculative_tokens": 64, "prompt_lookup_max": 2}
    arguments = (
        *PLAIN,
        *("--num-gpu-blocks-override", "31", "--max-num-batched-tokens", "65"),
        *("--speculative-config", json.dumps(drafts)),
        *("--worker-extension-cls", "tests.serve.failing.FailingCopies"),
    )
    model = save_model(folder / "model", "gemma3")
    with Server(model, folder, *arguments, *configured(config), command=FORKING) as server:
        yield server


def test_reasons_of_a_model_with_windows(small_server: Server) -> None:
    server = small_server
    tokens, lost, large = prompt(1), prompt(2), prompt(3, 635)
    ask(server, prompt(0, 400))
    assert ask(server, prompt(0, 400)[:200]) == {"token": 0, "reason": "boundary"}
    ask(server, tokens)
    fill(server, 10, 2)
    assert ask(server, tokens) == {"token": 0, "reason": "below_threshold"}
    server.reset_prefix_cache(external=False)
    server.call_workers("let_fail", "load")
    assert ask(server, tokens) == {"token": 0, "reason": "load_failed"}
    server.call_workers("let_fail", "store")
    for _ in range(2):
        ask(server, lost)
    fill(server, 12, 2)
    assert ask(server, lost) == {"token": 0, "reason": "not_stored"}
    server.call_workers("let_fail")
    for _ in range(2):
        ask(server, large)
    server.reset_prefix_cache(external=False)
    assert ask(server, large) == {"token": 0, "reason": "no_room"}
    counted = missed(server)
    assert {reason: counted[reason] for reason in WINDOWS} == WINDOWS

    def is_overloaded() -> bool:
        fill(server, 20, 4)  # in turn
        return missed(server)["overload"] > 0

    server.wait_for(is_overloaded, 60, "an overload")
    assert sum(missed(server).values()) == server.metric(metrics.PROMPT_TOKENS, source="compute")


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
