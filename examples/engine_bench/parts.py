"""The work: a client that measures its requests to one engine, and the requests of each part.

Each part is a coroutine that returns its numbers, times in seconds.
"""

import asyncio
import itertools
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from examples.bench.agents import Request, requests_by_agent
from examples.bench.tables import percentile
from examples.engine_bench.plan import Part, Plan

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
    arrivals: list[float]
    """When each of its tokens came."""
    tokens: list[int]
    cached_tokens: int
    """Prompt tokens that were not computed."""

    def gaps(self, since: float = -math.inf) -> list[float]:
        """Seconds between each two tokens, from the first one that came at ``since`` or later."""
        return [after - before for before, after in pairwise(self.arrivals) if before >= since]


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
        sent = self.now()
        reason = None
        async for output in self._engine.generate(
            TokensPrompt(prompt_token_ids=list(prompt)), sampling, request
        ):
            reply.arrivals.append(self.now())
            completion = output.outputs[0]
            if not reply.tokens:
                reply.ttft = reply.arrivals[0] - sent
            reply.tokens = list(completion.token_ids)
            reply.cached_tokens = output.num_cached_tokens or 0
            reason = completion.finish_reason
            if started is not None:
                started.set()
        return reason


Numbers = dict[str, float]


async def ttft(client: Client, plan: Plan) -> Numbers:
    """Time to the first token of a new prompt, of one whose KV the device has evicted, of one
    whose KV it holds; and the time to serve all evicted ones at once."""
    prompts = [plan.text(plan.prompt_tokens, "ttft", i) for i in range(plan.num_hits)]

    async def ask(number: int, *, compared: bool = True) -> Reply:
        name = f"ttft {number}"
        return await client.ask(name, prompts[number], plan.first_tokens, compared=compared)

    cold = [await ask(number) for number in range(len(prompts))]
    await client.settle()
    evicted, held = [], []
    for number in range(len(prompts)):
        evicted.append(await ask(number))
        held.append(await ask(number))
    await client.settle()
    # The device holds the last prompts, and evicts them for the first before their turn comes:
    # every one is a hit in the host tier. Chance decides which requests share a step.
    before = client.now()
    at_once = await asyncio.gather(
        *(ask(number, compared=plan.compare_shapes) for number in range(len(prompts)))
    )
    seconds = client.now() - before
    return {
        "cold": _median_ttft(cold[1:]),
        "host_hit": _median_ttft(evicted),
        "device_hit": _median_ttft(held),
        "at_once": seconds,
        "at_once_ttft": _median_ttft(at_once),
        "at_once_cached": _median_cached(at_once),
        "host_hit_cached": _median_cached(evicted),
        "device_hit_cached": _median_cached(held),
    }


async def idle(client: Client, plan: Plan) -> Numbers:
    """Throughput of new prompts: the cost of a connector that never helps."""
    prompts = [
        plan.text(plan.idle_prompt_tokens, "idle", number) for number in range(plan.idle_prompts)
    ]
    before = client.now()
    await asyncio.gather(
        *(
            client.ask(f"idle {number}", prompt, plan.idle_answer_tokens, compared=False)
            for number, prompt in enumerate(prompts)
        )
    )
    seconds = client.now() - before
    tokens = plan.idle_prompts * (plan.idle_prompt_tokens + plan.idle_answer_tokens)
    return {"tokens_per_second": tokens / seconds}


async def mix(client: Client, plan: Plan) -> Numbers:
    """Time to the first token of hits while other requests decode, and the time from token to
    token of those others."""
    prompts = [plan.text(plan.prompt_tokens, "mix", i) for i in range(plan.num_hits)]
    for number, prompt in enumerate(prompts):
        await client.ask(f"mix {number}", prompt, plan.first_tokens, compared=False)
    await client.settle()
    hits: list[Reply] = []

    async def hit() -> None:
        for number in range(min(plan.mix_hits, plan.num_hits // 2)):
            name = f"mix {number}"
            hits.append(await client.ask(name, prompts[number], plan.first_tokens, compared=False))

    gaps = await _gaps_beside(client, plan, "mix", hit)
    return {
        "ttft": _median_ttft(hits),
        "gap_p50": percentile(gaps, 0.5),
        "gap_p99": percentile(gaps, 0.99),
        "gap_max": percentile(gaps, 1.0),
    }


async def _gaps_beside(
    client: Client, plan: Plan, part: Part, work: Callable[[], Awaitable[None]]
) -> list[float]:
    """Times from token to token, ascending, of requests that decode beside ``work``. Tokens before
    all of them decode do not count: they wait for the prompts of the others."""
    all_decode = [asyncio.Event() for _ in range(plan.mix_decodes)]
    decodes = [
        asyncio.create_task(
            client.ask(
                f"{part} decode {number}",
                plan.text(plan.mix_prompt_tokens, part, "decode", number),
                plan.mix_answer_tokens,
                compared=False,
                started=event,
            )
        )
        for number, event in enumerate(all_decode)
    ]
    for event in all_decode:
        await event.wait()
    since = client.now()
    await work()
    return sorted(gap for decode in await asyncio.gather(*decodes) for gap in decode.gaps(since))


async def grown(client: Client, plan: Plan) -> Numbers:
    """Time to the first token of evicted prompts that come back with new tokens behind them, alone
    and while other requests decode; and the time from token to token of those others."""
    prompts = [plan.text(plan.prompt_tokens, "grown", i) for i in range(plan.num_hits)]
    for number, prompt in enumerate(prompts):
        await client.ask(f"grown {number}", prompt, plan.first_tokens, compared=False)

    async def ask(number: int, num_new: int, *place: object) -> Reply:
        prompt = [*prompts[number], *plan.text(num_new, "grown", number, *place)]
        return await client.ask(f"grown {number}", prompt, plan.first_tokens, compared=False)

    numbers: Numbers = {}
    for num_new in plan.new_tokens:
        await client.settle()
        replies = [await ask(number, num_new, num_new) for number in range(len(prompts))]
        numbers[f"ttft_{num_new}"] = _median_ttft(replies)
    num_new = plan.new_tokens[-2]
    beside: list[Reply] = []

    async def hit() -> None:
        numbers = range(min(plan.mix_hits, len(prompts)))
        beside.extend([await ask(number, num_new, "beside") for number in numbers])

    await client.settle()
    gaps = await _gaps_beside(client, plan, "grown", hit)
    numbers["ttft_beside"] = _median_ttft(beside)
    numbers["gap_p99"] = percentile(gaps, 0.99)
    numbers["gap_max"] = percentile(gaps, 1.0)
    return numbers


async def turns(client: Client, plan: Plan) -> Numbers:
    """Conversations that the device cannot hold all: time to the first token of first and of
    later turns, requests a second, and time a token."""
    system = plan.text(plan.system_tokens, "system")
    first: list[Reply] = []
    later: list[Reply] = []
    places = asyncio.Semaphore(plan.users_at_once)

    async def user(number: int) -> None:
        async with places:
            history = [*system, *plan.text(plan.history_length(number), "user", number)]
            for turn in range(plan.turns):
                if turn > 0:
                    await asyncio.sleep(plan.think_seconds)
                    history += plan.text(plan.message_tokens, "user", number, turn)
                reply = await client.ask(
                    f"turn {number} {turn}", history, plan.turn_answer_tokens, compared=False
                )
                history += reply.tokens
                (first if turn == 0 else later).append(reply)

    before = client.now()
    await asyncio.gather(*(user(number) for number in range(plan.users)))
    seconds = client.now() - before
    return {
        "first_ttft": fmean(reply.ttft for reply in first),
        "later_ttft": fmean(reply.ttft for reply in later),
        "later_ttft_p99": percentile(sorted(reply.ttft for reply in later), 0.99),
        "token_time": fmean(gap for reply in (*first, *later) for gap in reply.gaps()),
        "requests_per_second": (len(first) + len(later)) / seconds,
    }


async def traces(client: Client, plan: Plan) -> Numbers:
    """Agents that replay recorded sessions: throughput, time to the first token of requests that
    continue a session, and the share of all prompt tokens that were not computed."""
    text = cache(plan.text)
    work = [
        [(request, request.prompt(text)) for request in requests]
        for requests in requests_by_agent(plan.replay)
    ]
    replies: list[Reply] = []
    later: list[float] = []

    async def agent(number: int, requests: Sequence[tuple[Request, list[int]]]) -> None:
        for index, (request, prompt) in enumerate(requests):
            await asyncio.sleep(request.pause)
            name = f"trace {number} {index}"
            reply = await client.ask(name, prompt, request.answer_tokens, compared=False)
            replies.append(reply)
            if not request.opens:
                later.append(reply.ttft)

    before = client.now()
    await asyncio.gather(*(agent(number, requests) for number, requests in enumerate(work)))
    seconds = client.now() - before
    later.sort()
    prompt_tokens = sum(len(prompt) for requests in work for _, prompt in requests)
    answer_tokens = sum(request.answer_tokens for requests in work for request, _ in requests)
    return {
        "tokens_per_second": (prompt_tokens + answer_tokens) / seconds,
        "requests_per_second": len(replies) / seconds,
        "ttft_p50": percentile(later, 0.5),
        "ttft_p99": percentile(later, 0.99),
        "share_cached": sum(reply.cached_tokens for reply in replies) / prompt_tokens,
        "seconds": seconds,
    }


async def restart(client: Client, plan: Plan) -> Numbers:
    """In another engine, over the files of one that has done the part ``ttft``: time to the first
    token of its prompts, and the share of their tokens that was not computed."""
    found = []
    for number in range(plan.num_hits):
        prompt = plan.text(plan.prompt_tokens, "ttft", number)
        found.append(await client.ask(f"ttft {number}", prompt, plan.first_tokens))
    return {"hit": _median_ttft(found), "found": _median_cached(found) / plan.prompt_tokens}


def _median_ttft(replies: Sequence[Reply]) -> float:
    return median(reply.ttft for reply in replies)


def _median_cached(replies: Sequence[Reply]) -> float:
    return median(reply.cached_tokens for reply in replies)


RUN: Mapping[Part, Callable[[Client, Plan], Awaitable[Numbers]]] = {
    "ttft": ttft,
    "grown": grown,
    "idle": idle,
    "mix": mix,
    "turns": turns,
    "traces": traces,
    "restart": restart,
}


def num_requests(part: Part, plan: Plan) -> int:
    """Number of requests of a part."""
    return {
        "ttft": 4 * plan.num_hits,
        "grown": (1 + len(plan.new_tokens)) * plan.num_hits
        + plan.mix_decodes
        + min(plan.mix_hits, plan.num_hits),
        "idle": plan.idle_prompts,
        "mix": plan.num_hits + plan.mix_decodes + min(plan.mix_hits, plan.num_hits // 2),
        "turns": plan.users * plan.turns,
        "traces": plan.trace_requests,
        "restart": plan.num_hits,
    }[part]


def to_json(replies: Sequence[Reply]) -> list[dict[str, Any]]:
    """Replies whose tokens have to be the same for all contenders; the parent compares them."""
    return [
        {"id": reply.id, "cached": reply.cached_tokens, "tokens": reply.tokens}
        for reply in replies
        if reply.compared
    ]
