"""Clients: take turns at their conversations, over HTTP, and measure the times of requests."""

import asyncio
import json
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import aiohttp

from examples.multi_turn.conversations import Conversation

MODEL = "bench"
"""The name under which models are served."""
REQUEST_DEADLINE = 300.0
"""Seconds. A request that takes longer is lost."""


@dataclass
class Reply:
    """One request, as its client saw it. Times in seconds."""

    conversation: str
    turn: int
    """From 0."""
    prompt_tokens: int
    answer_tokens: int
    cached_tokens: int
    """Prompt tokens that were not computed, from any source."""
    ttft: float
    latency: float
    """To the last token."""
    answer: str

    @property
    def tpot(self) -> float | None:
        """From token to token, after the first."""
        if self.answer_tokens < 2:
            return None
        return (self.latency - self.ttft) / (self.answer_tokens - 1)


class RequestLost(Exception):
    """A request that was refused, was cut off, did not end in time, or got an answer of the wrong
    length."""


async def ask(
    session: aiohttp.ClientSession,
    url: str,
    conversation: str,
    turn: int,
    prompt: Sequence[int],
    num_tokens: int,
) -> Reply:
    """Request ``num_tokens`` after ``prompt``. The prompt goes as token ids, so that no tokenizer
    changes its length.

    Raises RequestLost.
    """
    reply = Reply(conversation, turn, len(prompt), num_tokens, 0, 0.0, 0.0, "")
    body = {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    who = f"conversation {conversation!r}, turn {turn + 1}"
    try:
        async with asyncio.timeout(REQUEST_DEADLINE):
            answered = await _listen(session, f"{url}/v1/completions", body, reply)
    except TimeoutError:
        raise RequestLost(f"{who}: no end within {REQUEST_DEADLINE:.0f} s") from None
    except (aiohttp.ClientError, ValueError) as error:
        raise RequestLost(f"{who}: {type(error).__name__}: {error}") from None
    if answered != num_tokens:
        raise RequestLost(f"{who}: {answered} of {num_tokens} tokens")
    return reply


async def _listen(
    session: aiohttp.ClientSession, url: str, body: dict[str, object], reply: Reply
) -> int:
    """Fill in ``reply``; return the number of answer tokens, as the server counts."""
    answered = 0
    began = time.perf_counter()
    async with session.post(url, json=body, raise_for_status=True) as response:
        async for line in response.content:
            event = line.strip().removeprefix(b"data: ")
            if not event or event == b"[DONE]":
                continue
            now = time.perf_counter() - began
            data = json.loads(event)
            if "error" in data:
                raise ValueError(data["error"])
            for choice in data["choices"]:
                # vLLM sends nothing before there is a token; its text may still be withheld.
                reply.ttft = reply.ttft or now
                reply.latency = now
                reply.answer += choice["text"]
            if data.get("usage"):
                answered = data["usage"]["completion_tokens"]
                details = data["usage"].get("prompt_tokens_details") or {}
                reply.cached_tokens = details.get("cached_tokens") or 0
    return answered


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
                reply = await ask(session, url, conversation.id, turn, prompt, length)
            except RequestLost as error:
                unasked = len(conversation.turns) - turn - 1
                result.lost.append(f"{error} ({unasked} more turns were not asked)")
                continue
            result.replies.append(reply)
            on_reply()
            if turn + 1 < len(conversation.turns):
                held.append((conversation, turn + 1))

    # One connection a client, kept open, without aiohttp's own limits.
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    began = time.perf_counter()
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        async with asyncio.TaskGroup() as group:
            for number in range(clients):
                places = active // clients + (number < active % clients)
                group.create_task(client(session, places))
        result.seconds = time.perf_counter() - began
    return result
