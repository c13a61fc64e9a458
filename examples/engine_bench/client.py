"""Client: asks one engine and takes the times."""

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
    """Of what was asked; the same for the same prompt."""
    compared: bool
    """Whether its tokens have to be the same for every contender."""
    ttft: float
    gaps: list[float]
    """From token to token."""
    tokens: list[int]
    cached_tokens: int
    """Prompt tokens that were not computed."""


class RequestLost(Exception):
    """A request came to no end, or to another one than that of its length."""


class Client:
    """Counts what it asks; collects the replies to compare and the requests that were lost."""

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
        """Let stores come to their end, of which a connector tells nobody."""
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
        """Have ``num_tokens`` said after ``prompt``; set ``started`` at the first of them, or
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
                started.set()  # nobody is to wait for a request that is lost
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
