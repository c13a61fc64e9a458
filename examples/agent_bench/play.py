"""Agents in a closed loop, over HTTP, for a limited time."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from examples.bench.agents import Request, Text
from examples.bench.client import RequestLost, Target, ask, client_session
from examples.bench.replies import Reply


@dataclass(frozen=True)
class Answered:
    """A request of an agent, with its reply."""

    request: Request
    at: float
    """Seconds from the start of the measurement until it was sent."""
    reply: Reply


@dataclass
class Played:
    """The results of a replay."""

    first: list[Request] = field(default_factory=list)
    """The agents' first requests, which are not measured."""
    answered: list[Answered] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    """One line for each lost request."""
    seconds: float = 0.0
    """Length of the measurement: until its time was over, or until nothing was left to ask."""
    client_busy: float = 0.0
    """Processor time of this process for each second of the measurement."""


async def play(
    target: Target,
    by_agent: Sequence[Sequence[Request]],
    text: Text,
    seconds: float,
    *,
    on_start: Callable[[], None],
    on_reply: Callable[[], None],
) -> Played:
    """Let every agent get its first answer, then measure for ``seconds``.

    An agent sends a request, waits for its answer, pauses, and sends the next one; one whose
    request is lost stops. ``on_start`` is called when the measurement begins, ``on_reply`` after
    each of its answers. Requests that are under way at the end are answered.
    """
    played = Played(first=[requests[0] for requests in by_agent])
    prompts = [request.prompt(text) for request in played.first]
    began = 0.0

    async def send(request: Request, prompt: list[int]) -> Answered | None:
        agent, number = request.place
        at = time.perf_counter() - began
        try:
            reply = await ask(
                session, target, f"agent {agent}", number, prompt, request.answer_tokens
            )
        except RequestLost as error:
            played.lost.append(str(error))
            return None
        return Answered(request, at, reply)

    async def go_on(requests: Sequence[Request]) -> None:
        for request in requests:
            prompt = request.prompt(text)
            left = began + seconds - time.perf_counter()
            await asyncio.sleep(max(0.0, min(request.pause, left)))
            if request.pause >= left:
                return
            answered = await send(request, prompt)
            if answered is None:
                return
            played.answered.append(answered)
            on_reply()

    async with client_session() as session:
        firsts = await asyncio.gather(*map(send, played.first, prompts))
        on_start()
        busy, began = time.process_time(), time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for requests, first in zip(by_agent, firsts, strict=True):
                if first is not None:
                    group.create_task(go_on(requests[1:]))
        spent = time.perf_counter() - began
        played.client_busy = (time.process_time() - busy) / spent
        played.seconds = min(seconds, spent)
    return played
