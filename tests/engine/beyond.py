"""What users do beyond requests of one round: new weights, resets, streaming input, processes that
are killed. Each function runs in a child process, with engines of its own."""

import os
import signal
import threading
from collections.abc import Iterable
from itertools import count
from typing import Any

import torch
from vllm import SamplingParams
from vllm.v1.engine import EngineCoreRequest

from tests.engine.live import LiveEngine, clean_up_process, let_copies_go_on
from tests.engine.spec import Answer, Ask, EngineSpec
from tests.engine.workloads import shared_prefix_asks
from tests.simulation import integrity


def play_new_weights(
    specs: Iterable[EngineSpec], prompt: tuple[int, ...], others: list[tuple[int, ...]]
) -> list[tuple[Answer, Answer, int]]:
    """By engine, the answers before and after the weights change in place, and the caches are reset
    with vLLM's defaults, as trainers do; and the number of host blocks that the reset has left.
    Then a reset succeeds right behind the answers to ``others``."""
    return [_play_new_weights(spec, prompt, others) for spec in specs]


def _play_new_weights(
    spec: EngineSpec, prompt: tuple[int, ...], others: list[tuple[int, ...]]
) -> tuple[Answer, Answer, int]:
    engine = LiveEngine(spec)
    engine.play([Ask("before", prompt, 8)])
    engine.core.collective_rpc(_change_weights)
    while not engine.reset():  # stores are under way that the tier keeps
        engine.step()
    left = engine.offload.tier.num_used if engine.offload is not None else 0
    engine.play([Ask("after", prompt, 8)])
    if engine.offload is not None and not left:
        for number, other in enumerate(others):
            engine.play([Ask(str(number), other, 2)])
            both = number % 2 == 1  # tiers, and with running requests
            assert engine.reset(both=both, running=both)
    _end(engine)
    return engine.answers["before"], engine.answers["after"], left


def _change_weights(worker: Any) -> None:
    generator = torch.Generator().manual_seed(5)
    for name, weight in worker.get_model().named_parameters():
        if weight.dim() == 1 and "layers" in name:  # vLLM's CPU build has packed the matrices
            weight.data.mul_(torch.empty_like(weight).uniform_(0.2, 2.0, generator=generator))


def play_a_session(specs: Iterable[EngineSpec], *arguments: Any) -> list[dict[str, list[int]]]:
    """By engine, the tokens of a streaming-input session, whose first input leaves it blocks, and
    of a request whose prompt is in host memory, and that is parked before the second input comes.
    """
    return [_play_a_session(spec, *arguments) for spec in specs]


def _play_a_session(
    spec: EngineSpec, cached: tuple[int, ...], inputs: list[tuple[int, ...]], max_steps: int
) -> dict[str, list[int]]:
    engine = LiveEngine(spec)
    tokens: dict[str, list[int]] = {"session": [], "cached": []}

    def add(request_id: str, prompt: tuple[int, ...], *, resumable: bool) -> None:
        sampling = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
        request = EngineCoreRequest(
            request_id, list(prompt), None, sampling, None, 0.0, None, None, None
        )
        request.resumable = resumable
        engine.llm.engine_core.add_request(request)

    def step() -> None:
        outputs = engine.llm.engine_core.get_output().outputs
        if not outputs:
            let_copies_go_on()
        for output in outputs:
            tokens[output.request_id] += output.new_token_ids

    def step_until(count: int, request_id: str) -> None:
        for _ in range(max_steps):
            if len(tokens[request_id]) >= count:
                return
            step()
        raise AssertionError(f"{request_id} has {tokens[request_id]} after {max_steps} steps")

    engine.play([Ask("first", cached, 2)])
    if engine.offload is not None:
        engine.reset_device()
    add("session", inputs[0], resumable=True)
    step_until(2, "session")
    add("cached", cached, resumable=False)
    step()
    if engine.offload is not None:
        assert integrity.num_parked(engine.offload), "no request is parked"
    add("session", inputs[1], resumable=True)
    step_until(4, "session")
    add("session", (0,), resumable=False)  # its end
    step_until(2, "cached")
    _end(engine)
    return tokens


def write_until_killed(spec: EngineSpec) -> None:
    """Play the rounds of ``spec`` to their end, and go on with other prompts. After a while this
    process dies at once, whatever it is doing."""
    engine = LiveEngine(spec)
    for each in spec.rounds:
        engine.play(each.asks)
    engine.drain()
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGKILL)).start()
    for seed in count(100):
        engine.play(shared_prefix_asks("more", seed=seed))


def _end(engine: LiveEngine) -> None:
    engine.drain()
    assert not engine.left(), engine.left()
    engine.shut_down()
    clean_up_process()
