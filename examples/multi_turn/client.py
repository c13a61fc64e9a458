"""Clients: take turns at their conversations, over HTTP, and measure the times of requests."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import aiohttp

from examples.bench.client import RequestLost, Target, ask, client_session
from examples.bench.replies import Reply
from examples.bench.served import MODEL
from examples.multi_turn.conversations import Conversation


@dataclass
class Replayed:
    """The results of a replay."""

    replies: list[Reply] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    """One line for each lost request, with the number of turns after it."""
    seconds: float = 0.0
    """From the first question to the last answer."""


async def replay(
    url: str,
    conversations: Sequence[Conversation],
    *,
    clients: int,
    active: int,
    on_reply: Callable[[], None],
) -> Replayed:
    """Play all ``conversations`` to their end.

    As vLLM's benchmark does, each of the ``clients`` holds its share of the ``active``
    conversations and goes round them, one question at a time; one that ends makes room for the
    next that waits. Unlike there, every client stays until all conversations have ended. The
    history has the recorded answers, not the server's: all servers get the same prompts.
    """
    waiting = deque(conversations)
    result = Replayed()
    target = Target(url, MODEL)

    async def client(session: aiohttp.ClientSession, places: int) -> None:
        held: deque[tuple[Conversation, int]] = deque()
        while waiting or held:
            while waiting and len(held) < places:
                held.append((waiting.popleft(), 0))
                if len(held) < places:
                    await asyncio.sleep(0)  # so that the other clients get their share
            conversation, turn = held.popleft()
            length = len(conversation.turns[turn].answer)
            prompt = conversation.prompt(turn)
            try:
                reply = await ask(session, target, conversation.id, turn, prompt, length)
            except RequestLost as error:
                unasked = len(conversation.turns) - turn - 1
                result.lost.append(f"{error} ({unasked} more turns were not asked)")
                continue
            result.replies.append(reply)
            on_reply()
            if turn + 1 < len(conversation.turns):
                held.append((conversation, turn + 1))

    began = time.perf_counter()
    async with client_session() as session:
        async with asyncio.TaskGroup() as group:
            for number in range(clients):
                places = active // clients + (number < active % clients)
                group.create_task(client(session, places))
        result.seconds = time.perf_counter() - began
    return result
