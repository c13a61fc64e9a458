"""The workloads: which requests they send when, over any transport.

Each is a coroutine that leaves its replies with the client, and returns further numbers. Times are
in seconds. Those that return the ``seconds`` of their measurement have a throughput.
"""

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import cache, partial

from examples.bench.tables import percentile
from examples.serve_bench.agents import Request, requests_by_agent, working_set
from examples.serve_bench.client import Client, Reply
from examples.serve_bench.conversations import Conversation
from examples.serve_bench.plan import Plan, Workload

Numbers = dict[str, float]
Play = Callable[[Client], Awaitable[Numbers]]

COLD, HOST_HIT, DEVICE_HIT = "cold", "hit in the host tier", "hit on the device"
FIRST_TURN, LATER_TURNS = "turn 1", "later turns"
AGAIN = ", restarted"


async def ttft(client: Client) -> Numbers:
    """Prompts that are new, that the device has evicted, and that it holds; then all evicted ones
    at once."""
    plan = client.plan
    prompts = [client.text(plan.prompt_tokens, "ttft", i) for i in range(plan.num_hits)]

    async def ask(kind: str | None, number: int, *, compared: bool = True) -> Reply:
        name = f"ttft {number}"
        return await client.ask(kind, name, prompts[number], plan.first_tokens, compared=compared)

    for number in range(len(prompts)):
        await ask(COLD if number else None, number)
    await client.settle()
    for number in range(len(prompts)):
        await ask(HOST_HIT, number)
        await ask(DEVICE_HIT, number)
    await client.settle()
    # The device holds the last prompts, and evicts them for the first before their turn comes:
    # every one is a hit in the host tier. Chance decides which requests share a step.
    before = client.elapsed()
    every = range(len(prompts))
    await asyncio.gather(*(ask("all at once", i, compared=plan.exact) for i in every))
    return {"at_once_seconds": client.elapsed() - before}


async def grown(client: Client) -> Numbers:
    """Evicted prompts that come back with new tokens behind them, alone and while other requests
    decode."""
    plan = client.plan
    prompts = await _asked_once(client, "grown")

    async def ask(kind: str, number: int, num_new: int, *place: object) -> None:
        prompt = [*prompts[number], *client.text(num_new, "grown", number, *place)]
        await client.ask(kind, f"grown {number}", prompt, plan.first_tokens)

    for num_new in plan.new_tokens:
        await client.settle()
        for number in range(len(prompts)):
            await ask(f"hit and {num_new} new", number, num_new, num_new)
    num_new = plan.new_tokens[-2]

    async def hit() -> None:
        for number in range(min(plan.mix_hits, len(prompts))):
            await ask(f"hit and {num_new} new, beside decodes", number, num_new, "beside")

    await client.settle()
    return await _gaps_beside(client, "grown", hit)


async def idle(client: Client) -> Numbers:
    """New prompts at once: the cost of a connector that never helps."""
    plan = client.plan
    prompts = [client.text(plan.idle_prompt_tokens, "idle", i) for i in range(plan.idle_prompts)]
    client.begin()
    await asyncio.gather(
        *(
            client.ask(COLD, f"idle {number}", prompt, plan.idle_answer_tokens)
            for number, prompt in enumerate(prompts)
        )
    )
    return {"seconds": client.elapsed()}


async def mix(client: Client) -> Numbers:
    """Hits while other requests decode."""
    plan = client.plan
    prompts = await _asked_once(client, "mix")
    await client.settle()

    async def hit() -> None:
        for number in range(min(plan.mix_hits, plan.num_hits // 2)):
            await client.ask(
                "hit beside decodes", f"mix {number}", prompts[number], plan.first_tokens
            )

    return await _gaps_beside(client, "mix", hit)


async def turns(client: Client) -> Numbers:
    """All conversations to their end, from empty caches.

    As in vLLM's benchmark, each client holds its share of the active conversations and goes round
    them, one question at a time; one that ends makes room for the next that waits. Unlike there,
    every client stays until all conversations have ended. The history has the recorded answers,
    not the server's: all contenders get the same prompts.
    """
    plan = client.plan
    waiting = deque(plan.conversations(client.vocabulary, client.repeat))
    await client.empty_caches()
    client.begin()

    async def user(places: int) -> None:
        held: deque[tuple[Conversation, int]] = deque()
        while waiting or held:
            while waiting and len(held) < places:
                held.append((waiting.popleft(), 0))
                if len(held) < places:
                    await asyncio.sleep(0)  # so that the other clients get their share
            conversation, turn = held.popleft()
            kind, length = f"turn {turn + 1}", len(conversation.turns[turn].answer)
            name, prompt = f"conversation {conversation.id!r}, {kind}", conversation.prompt(turn)
            asking = client.ask(kind, name, prompt, length, compared=plan.exact)
            reply = await client.reply_or_loss(asking)
            if reply is not None and turn + 1 < len(conversation.turns):
                held.append((conversation, turn + 1))

    share, more = divmod(plan.active, plan.clients)
    await asyncio.gather(*(user(share + (number < more)) for number in range(plan.clients)))
    return {"seconds": client.elapsed()}


async def traces(client: Client, agents: int) -> Numbers:
    """Recorded agents in a closed loop. Each sends a request, waits for its answer, pauses, and
    sends the next one. The measurement begins when all have their first answer. Requests that are
    under way at its end are answered."""
    plan = client.plan
    by_agent = requests_by_agent(plan.replay(agents))
    limit = math.inf if plan.seconds is None else plan.seconds
    asked: list[Request] = []

    @cache
    def text(length: int, *what: object) -> list[int]:
        # For another number of agents the same ids become other tokens, which no cache has.
        return client.text(length, agents, *what)

    async def send(kind: str | None, request: Request, prompt: Sequence[int]) -> Reply | None:
        agent, number = request.place
        name = f"agent {agent}, request {number + 1}"
        return await client.reply_or_loss(client.ask(kind, name, prompt, request.answer_tokens))

    async def go_on(requests: Sequence[Request]) -> None:
        for request in requests:
            prompt = request.prompt(text)
            left = limit - client.elapsed()
            await asyncio.sleep(max(0.0, min(request.pause, left)))
            if request.pause >= left:
                return
            kind = FIRST_TURN if request.opens else LATER_TURNS
            if await send(kind, request, prompt) is None:
                return
            asked.append(request)

    first = [requests[0] for requests in by_agent]
    prompts = [request.prompt(text) for request in first]
    answers = await asyncio.gather(
        *(send(None, *each) for each in zip(first, prompts, strict=True))
    )
    client.begin()
    await asyncio.gather(
        *(
            go_on(requests[1:])
            for requests, answer in zip(by_agent, answers, strict=True)
            if answer is not None
        )
    )
    return {"seconds": min(limit, client.elapsed())} | _needed(plan, first, asked)


def _needed(plan: Plan, first: Sequence[Request], asked: Sequence[Request]) -> Numbers:
    """The working set of ``asked`` and of those ``first``, and the share of the prompt tokens of
    ``asked`` that an endless cache computes."""
    prompt_before, new_before = working_set(first)
    prompt_tokens, new_tokens = working_set([*first, *asked])
    numbers = {"device_multiple": new_tokens / plan.device_tokens}
    if plan.kv_bytes_per_token is not None:
        numbers["host_multiple"] = new_tokens * plan.kv_bytes_per_token / plan.host_bytes
    if asked:
        numbers["endless_share"] = (new_tokens - new_before) / (prompt_tokens - prompt_before)
    return numbers


async def restart(client: Client) -> Numbers:
    """The prompts of ``ttft``, in an engine over the files of one that has had them."""
    plan = client.plan
    for number in range(plan.num_hits):
        prompt = client.text(plan.prompt_tokens, "ttft", number)
        name = f"ttft {number}"
        await client.ask("hit in the files", name, prompt, plan.first_tokens, compared=True)
    return {}


async def _asked_once(client: Client, workload: Workload) -> list[list[int]]:
    """Prompts that fill the device one and a half times."""
    plan = client.plan
    prompts = [client.text(plan.prompt_tokens, workload, i) for i in range(plan.num_hits)]
    for number, prompt in enumerate(prompts):
        await client.ask(None, f"{workload} {number}", prompt, plan.first_tokens)
    return prompts


async def _gaps_beside(
    client: Client, workload: Workload, work: Callable[[], Awaitable[None]]
) -> Numbers:
    """Times from token to token of requests that decode beside ``work``. Tokens before all of them
    decode do not count: they wait for the prompts of the others."""
    plan = client.plan
    all_decode = [asyncio.Event() for _ in range(plan.mix_decodes)]
    decodes = [
        asyncio.create_task(
            client.ask(
                None,
                f"{workload}, decode {number}",
                client.text(plan.mix_prompt_tokens, workload, "decode", number),
                plan.mix_answer_tokens,
                started=event,
            )
        )
        for number, event in enumerate(all_decode)
    ]
    for event in all_decode:
        await event.wait()
    since = client.elapsed()
    await work()
    gaps = sorted(gap for decode in await asyncio.gather(*decodes) for gap in decode.gaps(since))
    if not gaps:  # all had ended before
        return {}
    return {
        f"gap_{name}": percentile(gaps, share)
        for name, share in (("p50", 0.5), ("p99", 0.99), ("worst", 1.0))
    }


_PLAYS: Mapping[Workload, Play] = {
    "ttft": ttft,
    "grown": grown,
    "idle": idle,
    "mix": mix,
    "turns": turns,
}


def plays(plan: Plan) -> dict[str, Play]:
    """The measurements of an engine by name, one for each number of agents, in their order."""
    found: dict[str, Play] = {}
    for workload in plan.workloads:
        if workload == "traces":
            found |= {
                f"traces, {count} agents": partial(traces, agents=count) for count in plan.agents
            }
        elif workload != "restart":
            found[workload] = _PLAYS[workload]
    return found


def plays_again(plan: Plan) -> dict[str, Play]:
    """Those of an engine over the files of the first."""
    again: dict[str, Play] = {"restart": restart}
    return again | ({f"turns{AGAIN}": turns} if "turns" in plan.workloads else {})
