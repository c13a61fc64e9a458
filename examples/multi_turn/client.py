"""Client: sends requests to a server over HTTP and measures their times."""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass

import aiohttp

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
