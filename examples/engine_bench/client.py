"""Client: sends requests to one engine and measures their times."""

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

REQUEST_DEADLINE = 300.0
"""Seconds. A request that takes longer is lost."""


@dataclass
class Reply:
    """One request, as its client saw it. Times in seconds."""

    id: str
    """The same for the same prompt."""
    compared: bool
    """True if its tokens have to be the same for every contender."""
    ttft: float
    gaps: list[float]
    """From token to token."""
    tokens: list[int]
    cached_tokens: int
    """Prompt tokens that were not computed."""


class RequestLost(Exception):
    """A request did not end in time, or did not end by its length."""


class Client:
    """Numbers its requests and collects their replies."""

    def __init__(
        self, engine: "AsyncLLM", settle_seconds: float, on_reply: Callable[[], None]
    ) -> None:
        self.replies: list[Reply] = []
        self._engine = engine
        self._settle_seconds = settle_seconds
        self._on_reply = on_reply
        self._numbers = itertools.count()

    now = staticmethod(time.perf_counter)

    async def settle(self) -> None:
        """Wait for stores, whose end no connector reports."""
        await asyncio.sleep(self._settle_seconds)

    async def ask(
        self,
        id: str,
        prompt: Sequence[int],
        num_tokens: int,
        *,
        compared: bool = True,
        started: asyncio.Event | None = None,
    ) -> Reply:
        """Request ``num_tokens`` after ``prompt``; set ``started`` at the first of them, or
        when there will be none.

        Raises RequestLost.
        """
        reply = Reply(id, compared, 0.0, [], [], 0)
        try:
            async with asyncio.timeout(REQUEST_DEADLINE):
                reason = await self._listen(reply, prompt, num_tokens, started)
        except TimeoutError:
            raise RequestLost(f"{id!r} had no end within {REQUEST_DEADLINE:.0f} s") from None
        finally:
            if started is not None:
                started.set()  # so that no task waits for a lost request
        if reason != "length" or len(reply.tokens) != num_tokens:
            raise RequestLost(
                f"{id!r} ended by {reason} after {len(reply.tokens)} of {num_tokens} tokens"
            )
        self.replies.append(reply)
        self._on_reply()
        return reply

    async def _listen(
        self, reply: Reply, prompt: Sequence[int], num_tokens: int, started: asyncio.Event | None
    ) -> str | None:
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        sampling = SamplingParams(
            temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False
        )
        request = f"{next(self._numbers)} {reply.id}"
        last = self.now()
        reason = None
        async for output in self._engine.generate(
            TokensPrompt(prompt_token_ids=list(prompt)), sampling, request
        ):
            now = self.now()
            completion = output.outputs[0]
            if reply.tokens:
                reply.gaps.append(now - last)
            else:
                reply.ttft = now - last
            last = now
            reply.tokens = list(completion.token_ids)
            reply.cached_tokens = output.num_cached_tokens or 0
            reason = completion.finish_reason
            if started is not None:
                started.set()
        return reason
