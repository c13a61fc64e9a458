"""What users do beyond requests of one round: new weights, resets, streaming input, a process that
is killed. Each function runs in a child process, with engines of its own."""

import os
import signal
from collections.abc import Iterable
from typing import Any

import torch
from vllm import SamplingParams
from vllm.v1.engine import EngineCoreRequest

from tests.engine.live import LiveEngine, clean_up_process
from tests.engine.spec import Answer, Ask, EngineSpec
from tests.simulation.integrity import second_tier_of


def play_new_weights(
    specs: Iterable[EngineSpec], prompt: tuple[int, ...]
) -> list[tuple[Answer, Answer, int]]:
    """By engine, the answers before and after the weights change in place, and the caches are reset
    with vLLM's defaults, as trainers do; and the number of host blocks that the reset has left."""
    return [_play_new_weights(spec, prompt) for spec in specs]


def _play_new_weights(spec: EngineSpec, prompt: tuple[int, ...]) -> tuple[Answer, Answer, int]:
    engine = LiveEngine(spec)
    engine.play([Ask("before", prompt, 8)])
    engine.core.collective_rpc(_change_weights)
    while not engine.reset():  # stores are under way that the tier keeps
        engine.step()
    left = engine.offload.tier.num_used if engine.offload is not None else 0
    engine.play([Ask("after", prompt, 8)])
    engine.drain()
    engine.shut_down()
    clean_up_process()
    return engine.answers["before"], engine.answers["after"], left


def _change_weights(worker: Any) -> None:
    generator = torch.Generator().manual_seed(5)
    for name, weight in worker.get_model().named_parameters():
        if weight.dim() == 1 and "layers" in name:  # vLLM's CPU build has packed the matrices
            weight.data.mul_(torch.empty_like(weight).uniform_(0.2, 2.0, generator=generator))


def play_resets(spec: EngineSpec, prompts: list[tuple[int, ...]]) -> list[bool]:
    """Whether a reset right behind each answer succeeds: alone, and with running requests and both
    tiers in turn."""
    engine = LiveEngine(spec)
    were_reset = []
    for number, prompt in enumerate(prompts):
        engine.play([Ask(str(number), prompt, 2)])
        both = number % 2 == 1
        were_reset.append(engine.reset(both=both, running=both))
    engine.drain()
    assert not engine.left(), engine.left()
    engine.shut_down()
    clean_up_process()
    return were_reset


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
        for output in engine.llm.engine_core.get_output().outputs:
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
        assert engine.offload._parked._requests, "no request is parked"
    add("session", inputs[1], resumable=True)
    step_until(4, "session")
    add("session", (0,), resumable=False)  # its end
    step_until(2, "cached")
    while engine.scheduler.has_requests():
        step()
    assert not engine.left(), engine.left()
    engine.shut_down()
    clean_up_process()
    return tokens


def play_without_helper(spec: EngineSpec, prompt: tuple[int, ...]) -> tuple[Answer, Answer, bool]:
    """The answers to a prompt before and after the second tier's process is killed while the engine
    is idle; and whether the tier is on at the end. All of the prompt is in host memory."""
    engine = LiveEngine(spec)
    engine.play([Ask("before", prompt, 4)])
    engine.drain()
    assert engine.offload is not None
    second_tier = second_tier_of(engine.offload)
    assert second_tier is not None
    connection: Any = second_tier._helper._connection
    os.kill(connection._process.pid, signal.SIGKILL)
    connection._process.wait()
    engine.play([Ask("after", prompt, 4)])
    engine.drain()
    assert not engine.left(), engine.left()
    engine.shut_down()
    clean_up_process()
    return engine.answers["before"], engine.answers["after"], second_tier.is_on
