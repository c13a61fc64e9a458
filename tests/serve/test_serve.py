"""``vllm serve`` with the connector: HTTP answers, clients that disconnect, the shutdown."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import psutil
import pytest

from examples.serving import is_free
from tests.engine.compare import LOGPROB_TOLERANCE
from tests.engine.harness import log_tail, processes_left
from tests.engine.spec import Ask
from tests.engine.workloads import shared_prefix_asks
from tests.serve.server import Completion, Server, read_stream

ASKS = shared_prefix_asks("serve", seed=6, tails=3)
HITS = "vllm:external_prefix_cache_hits_total"
LONG = 150
"""Number of tokens of an answer that takes some tenths of a second, on any processor."""


def answers(server: Server, asks: Sequence[Ask], *, at_once: int) -> list[Completion]:
    with ThreadPoolExecutor(at_once) as clients:
        return list(clients.map(lambda ask: server.complete(ask.prompt, ask.max_tokens), asks))


def assert_same(expected: list[Completion], actual: list[Completion]) -> None:
    assert [answer.tokens for answer in actual] == [answer.tokens for answer in expected]
    for ours, theirs in zip(expected, actual, strict=True):
        assert theirs.logprobs == pytest.approx(ours.logprobs, abs=LOGPROB_TOLERANCE)


def assert_stops(server: Server) -> None:
    """Stop the server with SIGTERM: it ends with status 0 and leaves nothing behind."""
    family, segments = server.family(), server.shared_memory()
    assert len(family) > 2, "the engine runs in processes of its own"
    assert segments, "which talk through shared memory"
    server.terminate()
    assert server.wait_for_end() == 0, log_tail(server.log)
    _, alive = psutil.wait_procs(family, timeout=10)
    assert not alive, f"{alive} outlived the server\n{log_tail(server.log)}"
    assert not processes_left(server.process.pid, within=0)
    assert not [path for path in segments if path.exists()]
    assert is_free(server.port)


def test_answers_come_back_from_the_host(server: Server) -> None:
    first = answers(server, ASKS, at_once=1)
    for at_once in (1, len(ASKS)):
        server.reset_prefix_cache(external=False)
        hits = server.metric(HITS)
        assert_same(first, answers(server, ASKS, at_once=at_once))
        assert server.metric(HITS) > hits


def test_stop_strings(server: Server) -> None:
    """The frontend finds the stop strings, and then aborts the request in the engine."""
    whole = [server.complete(ask.prompt, ask.max_tokens).tokens for ask in ASKS]
    server.wait_for(server.is_idle, 30, "the first answers' requests to end")
    for _ in range(2):
        server.reset_prefix_cache(external=False)
        hits = server.metric(HITS)
        for ask, tokens in zip(ASKS, whole, strict=True):
            stop = " ".join(f"w{token}" for token in tokens[8:11])
            answer = server.complete(ask.prompt, ask.max_tokens, stop).tokens
            assert answer == tokens[: len(answer)]
            assert len(answer) < len(tokens)
        assert server.metric(HITS) > hits
    server.wait_for(server.is_idle, 30, "the stopped requests to end")


def test_clients_that_disconnect(server: Server) -> None:
    expected = answers(server, ASKS, at_once=1)
    generated = server.metric("vllm:generation_tokens_total")
    for left in range(3):
        with ExitStack() as streams:
            for number, ask in enumerate(ASKS):
                lines = streams.enter_context(server.open_stream(ask.prompt, LONG))
                if number < left:
                    next(lines)
        for ask in ASKS:
            server.ask_and_hang_up(ask.prompt, LONG)
    server.wait_for(server.is_idle, 30, "the abandoned requests to end")
    generated = server.metric("vllm:generation_tokens_total") - generated
    assert generated < 0.5 * 3 * 2 * len(ASKS) * LONG, "abandoned requests are aborted"
    server.reset_prefix_cache(external=False)
    assert_same(expected, answers(server, ASKS, at_once=len(ASKS)))
    assert server.is_idle()


def sources(reply: Any) -> dict[str, int]:
    """Where the reply says that the prompt's tokens came from."""
    found: dict[str, int] = reply["kv_transfer_params"]["simple_offload"]["prompt_tokens"]
    return found


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_wishes(server: Server, path: str) -> None:
    """A report of where the prompt came from, and prompts that are not kept. What is wrong does no
    harm, and is told once."""
    first = 0 if "chat" in path else 50
    kept, private = (
        [(start + 7 * place * place) % 200 + 300 for place in range(100)]
        for start in (first, first + 1)
    )
    for prompt, wishes in ((kept, {"protect": "5m"}), (private, {"store": False})):
        params = {"simple_offload": {**wishes, "report": True}}
        reports = []
        for _ in range(2):
            reports.append(sources(server.answer(prompt, 1, path, kv_transfer_params=params)))
            server.wait_for(server.is_idle, 30, "the request to end")
        server.answer(prompt[:70], 1, path, session_id="s")  # of which two blocks are stored, then
        reports.append(sources(server.answer(prompt, 1, path, kv_transfer_params=params)))
        server.reset_prefix_cache(external=False)
        reports.append(sources(server.answer(prompt, 1, path, kv_transfer_params=params)))
        found = [(each["device"], each["host"]) for each in reports]
        on_host = 64 if prompt is private else 96
        assert found == [(0, 0), (96, 0), (96, 0), (0, on_host)]
        assert all(sum(each.values()) == len(prompt) for each in reports)
    wrongs: list[Any] = [{"protct": "5m"}, {"store": "no"}, {"protect": [{}]}, "store", 1e9, None]
    for wrong in wrongs:
        reply = server.answer(kept, 1, path, kv_transfer_params={"simple_offload": wrong})
        assert reply["kv_transfer_params"] is None
    released = {"simple_offload": {"release": True}}
    server.answer(kept, 1, path, kv_transfer_params=released, session_id="s")
    assert server.log.read_text().count("has an unknown key") == 1


@pytest.mark.proves("I6")
def test_sigterm_leaves_nothing_behind(server: Server) -> None:
    """The last test of the server. Within the grace period the server finishes a running request,
    which uses the connector."""
    ask = ASKS[0]
    whole = server.complete(ask.prompt, LONG).tokens
    server.reset_prefix_cache(external=False)
    with ThreadPoolExecutor(1) as client, server.open_stream(ask.prompt, LONG) as lines:
        first = next(lines)
        rest = client.submit(lambda: read_stream(lines))
        assert_stops(server)
        assert [*read_stream([first]), *rest.result(timeout=30)] == whole
