"""The connector beside vLLM's NixlConnector, on a server for prompts and on one for answers. On
GPUs, each server has its own."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from vllm.platforms import current_platform

from examples.serve_bench.tokens import WordVocabulary
from examples.serving import free_port
from simple_offload import metrics
from tests.docs.pages import COMMANDS
from tests.engine.compare import SMALL_MODEL, compare
from tests.engine.device_models import save_device_model
from tests.engine.spec import Answer
from tests.engine.targets import HALF
from tests.engine.workloads import follow_ups, shared_prefix_asks
from tests.serve.conftest import PLAIN, VOCAB_SIZE, configured
from tests.serve.server import Completion, Server, completion

pytest.importorskip("nixl", reason="needs NIXL: see CONTRIBUTING.md")

IS_ON_GPU = current_platform.is_cuda()
pytestmark = [
    pytest.mark.gpu if IS_ON_GPU else pytest.mark.slow,
    pytest.mark.skipif(IS_ON_GPU and torch.cuda.device_count() < 2, reason="needs two GPUs"),
    pytest.mark.timeout(600),
]

ASKS = shared_prefix_asks("pd", seed=8, tails=2)
TURNS = follow_ups(ASKS, "turn", seed=9)
WITH_ONE_TOKEN: dict[str, Any] = {
    "max_tokens": 1,
    "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False},
}
"""Of a request whose answer another server generates. The first server's token is thrown away."""
NUM_TOKENS, LONG = 12, 200
"""Of an answer, and of one that is cut off."""
LEASE_SECONDS = 8 if IS_ON_GPU else 50
"""How long a server keeps blocks that nobody fetches. On CPUs that other tests keep busy too, a
fetch has taken 46 seconds."""
FETCHED = "vllm:nixl_bytes_transferred_count"
LOADED = metrics.LOADED
EXPIRED = "vllm:nixl_num_kv_expired_reqs_total"

ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}
ON_GPU = (
    *("--dtype", "float16", "--gpu-memory-utilization", "0.1"),
    *("--kv-cache-memory-bytes", str(1 << 30)),
)


def documented(role: str, *, ours_first: bool) -> dict[str, Any]:
    """vLLM's configuration of a server, as docs/disaggregation.md shows it, with a small tier and a
    short lease."""
    words = next(each.words for each in COMMANDS if f'"{ROLES[role]}"' in each.text)
    shown = words[words.index("--kv-transfer-config") + 1]
    config: dict[str, Any] = json.loads(shown.replace("64GiB", "64MiB"))
    nixl, ours = connectors = config["kv_connector_extra_config"]["connectors"]
    assert ours["kv_connector_module_path"] == "simple_offload"
    nixl["kv_connector_extra_config"] = {"kv_lease_duration": LEASE_SECONDS}
    if ours_first:
        connectors.reverse()
    return config


@dataclass
class Disaggregated:
    """Both servers, and the router before them: a request goes to one and then to the other, with
    what the first one answers in ``kv_transfer_params``."""

    prefill: Server
    decode: Server

    def complete(self, prompt: Sequence[int], max_tokens: int) -> Completion:
        """The answer to a prompt, by both servers."""
        return completion(self.decode.answer(prompt, max_tokens, **self.fill(prompt)))

    def fill(self, prompt: Sequence[int]) -> dict[str, Any]:
        """Compute the prompt. Returns what the request to the other server needs. The blocks wait
        there for that request, until their lease ends."""
        answer = self.prefill.answer(prompt, **WITH_ONE_TOKEN)
        return {"kv_transfer_params": answer["kv_transfer_params"]}


class Fleet:
    """Starts servers of one model."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._model = save_device_model(folder / "model", "llama")
        WordVocabulary(VOCAB_SIZE).save(self._model)
        self._servers: list[Server] = []

    def start(self, *arguments: str, gpu: int = 0) -> Server:
        """A server that does not answer yet."""
        folder = self._folder / str(len(self._servers))
        folder.mkdir()
        environment = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())}
        if IS_ON_GPU:
            environment["CUDA_VISIBLE_DEVICES"] = str(gpu)
        arguments = (*PLAIN, *(ON_GPU if IS_ON_GPU else ()), *arguments)
        server = Server(self._model, folder, *arguments, environment=environment)
        self._servers.append(server)
        return server

    def start_role(self, role: str, *, ours_first: bool) -> Server:
        config = documented(role, ours_first=ours_first)
        return self.start(*configured(config), gpu=list(ROLES).index(role))

    def end(self) -> None:
        for server in self._servers:
            server.kill()


Prompts = dict[str, tuple[int, ...]]
Complete = Callable[[Sequence[int], int], Completion]


def answers(complete: Complete, prompts: Prompts, *, at_once: int) -> dict[str, Answer]:
    with ThreadPoolExecutor(at_once) as clients:
        found = clients.map(lambda prompt: Answer(*complete(prompt, NUM_TOKENS)), prompts.values())
        return dict(zip(prompts, found, strict=True))


class Expected:
    """Two turns of conversations: prompts, and the answers of a server without connectors."""

    def __init__(self, complete: Complete) -> None:
        self.prompts: Prompts = {ask.id: ask.prompt for ask in ASKS}
        self.answers = answers(complete, self.prompts, at_once=1)
        turns: Prompts = {}
        for turn in TURNS:
            assert turn.follows is not None
            said = self.answers[turn.follows].tokens
            turns[turn.id] = (*self.prompts[turn.follows], *said, *turn.prompt)
        self.answers |= answers(complete, turns, at_once=1)
        self.prompts |= turns

    def compare(self, found: Mapping[str, Answer]) -> None:
        """Compare answers to these prompts."""
        expected = {name: self.answers[name] for name in found}
        wrong, num_whole = compare(expected, dict(found), HALF if IS_ON_GPU else SMALL_MODEL)
        assert not wrong, wrong
        assert num_whole >= len(found) / 2, "too few to compare"


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path_factory.mktemp("fleet"))
    yield fleet
    fleet.end()


@pytest.fixture(scope="module")
def plain(fleet: Fleet) -> Server:
    """A server without a connector."""
    return fleet.start()


@pytest.fixture(
    scope="module",
    params=[False] if IS_ON_GPU else [False, True],
    ids=lambda ours_first: "ours-first" if ours_first else "nixl-first",
)
def ours_first(request: pytest.FixtureRequest) -> bool:
    """The order in MultiConnector. The documented one is NixlConnector first."""
    return cast(bool, request.param)


@pytest.fixture(scope="module")
def pair(fleet: Fleet, plain: Server, ours_first: bool) -> Iterator[Disaggregated]:
    """All three servers start together."""
    servers = {role: fleet.start_role(role, ours_first=ours_first) for role in ROLES}
    for server in (plain, *servers.values()):
        server.wait_until_ready()
    yield Disaggregated(**servers)
    for server in servers.values():
        server.kill()


@pytest.fixture(scope="module")
def expected(plain: Server, pair: Disaggregated) -> Expected:
    return Expected(plain.complete)


def check_both(pair: Disaggregated, expected: Expected, *, at_once: int = 1) -> None:
    """Ask for all answers by both servers. Where a lease ends before a fetch, vLLM's NixlConnector
    fetches what the first server has put there meanwhile, and answers are wrong."""
    expired = pair.prefill.metric(EXPIRED)
    found = answers(pair.complete, expected.prompts, at_once=at_once)
    assert pair.prefill.metric(EXPIRED) == expired, "this machine is too busy: a lease has ended"
    expected.compare(found)


def assert_nothing_held(*servers: Server) -> None:
    """Every device block is free, and no host block is pinned."""
    for server in servers:
        server.wait_for(server.is_idle, 60, "its requests to end")
        server.reset_prefix_cache(external=False)
        server.wait_until_unpinned()


def test_the_same_tokens_as_one_server(
    pair: Disaggregated, expected: Expected, ours_first: bool
) -> None:
    """The device blocks of either server have room for two prompts. What the first one evicts, it
    finds in host memory again. Behind ours, NixlConnector fetches what the second server's host
    memory lacks: at the second time nothing."""
    for at_once in (1, 4):
        loaded, fetched = pair.prefill.metric(LOADED), pair.decode.metric(FETCHED)
        check_both(pair, expected, at_once=at_once)
        assert pair.prefill.metric(LOADED) > loaded
        is_fetched_again = pair.decode.metric(FETCHED) > fetched
        assert is_fetched_again != (ours_first and at_once > 1)
        assert_nothing_held(pair.prefill, pair.decode)


def test_the_second_server_has_a_tier_of_its_own(pair: Disaggregated, expected: Expected) -> None:
    """It keeps what it fetched, for requests that come to it alone."""
    before = pair.decode.metric(LOADED), pair.decode.metric(FETCHED)
    expected.compare(answers(pair.decode.complete, expected.prompts, at_once=1))
    after = pair.decode.metric(LOADED), pair.decode.metric(FETCHED)
    assert after[0] > before[0]
    assert after[1] == before[1]
    assert_nothing_held(pair.decode)


def test_clients_that_disconnect(pair: Disaggregated, expected: Expected) -> None:
    """While their prompt is computed; between both servers; while the second one fetches; and
    within the answer."""
    expired = pair.prefill.metric(EXPIRED)
    prompts = list(expected.prompts.values())
    for prompt in prompts:
        pair.prefill.ask_and_hang_up(prompt, **WITH_ONE_TOKEN)
    pair.fill(prompts[0])
    for prompt in prompts[:2]:
        pair.decode.ask_and_hang_up(prompt, LONG, **pair.fill(prompt))
    for prompt in prompts[2:6]:
        with pair.decode.open_stream(prompt, LONG, **pair.fill(prompt)) as lines:
            next(lines)
    assert_nothing_held(pair.prefill, pair.decode)
    assert pair.prefill.metric(EXPIRED) > expired, "nobody has fetched the first prompt"
    check_both(pair, expected, at_once=4)
    assert_nothing_held(pair.prefill, pair.decode)


def test_the_second_server_dies(
    pair: Disaggregated, expected: Expected, fleet: Fleet, ours_first: bool
) -> None:
    """While it answers, and with other prompts waiting for it. Another one takes its place."""
    first, second, third, *_ = expected.prompts.values()
    with pair.decode.open_stream(first, LONG, **pair.fill(first)) as lines:
        next(lines)
        pair.fill(second)
        pair.decode.kill()
    pair.fill(third)
    assert_nothing_held(pair.prefill)
    pair.decode = fleet.start_role("decode", ours_first=ours_first)
    pair.decode.wait_until_ready()
    check_both(pair, expected)
    assert_nothing_held(pair.prefill, pair.decode)


def test_the_first_server_dies(pair: Disaggregated, expected: Expected) -> None:
    """With prompts that the second one has not fetched: it computes them itself."""
    filled = {name: pair.fill(prompt) for name, prompt in list(expected.prompts.items())[:2]}
    pair.prefill.kill()
    for name, params in filled.items():
        answer = completion(pair.decode.answer(expected.prompts[name], NUM_TOKENS, **params))
        expected.compare({name: Answer(*answer)})
    assert_nothing_held(pair.decode)
    expected.compare(answers(pair.decode.complete, expected.prompts, at_once=1))
