"""Requests over HTTP, as their client sees them."""

import asyncio
import json
import time
from collections.abc import Sequence
from typing import NamedTuple

import aiohttp

from examples.bench.replies import Reply

REQUEST_DEADLINE = 300.0
"""Seconds. A request that takes longer is lost."""


class Target(NamedTuple):
    """Where requests go."""

    url: str
    """Without ``/v1``."""
    model: str
    """The name under which it is served."""


class RequestLost(Exception):
    """A request that was refused, was cut off, did not end in time, or got an answer of the wrong
    length."""


def client_session() -> aiohttp.ClientSession:
    """Connections without aiohttp's own limits. One that was idle is closed before the server
    closes it, after 5 seconds (VLLM_HTTP_TIMEOUT_KEEP_ALIVE): a request on it would be lost."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=2),
        timeout=aiohttp.ClientTimeout(total=None),
    )


async def ask(
    session: aiohttp.ClientSession,
    target: Target,
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
        "model": target.model,
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
            answered = await _listen(session, f"{target.url}/v1/completions", body, reply)
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
