"""The workloads: which requests they send when, over any transport.

Each is a coroutine that leaves its replies with the client, and returns further numbers. Times are
in seconds. Those that return the ``seconds`` of their measurement have a throughput.
"""

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import cache, partial
from itertools import pairwise

from examples.bench.tables import spread
from examples.serve_bench.agents import Request, new_tokens, requests_by_agent
from examples.serve_bench.client import SOURCES, Client, Reply
from examples.serve_bench.conversations import Conversation
from examples.serve_bench.plan import Plan, Workload

Numbers = dict[str, float]
Play = Callable[[Client], Awaitable[Numbers]]

COLD, HOST_HIT, DEVICE_HIT = "cold", "hit in the host tier", "hit on the device"
FIRST_TURN, LATER_TURNS = "turn 1", "later turns"


async def ttft(client: Client) -> Numbers:
    """Prompts that are new, that the device has evicted, and that it holds; then all evicted ones
    at once."""
    plan, prompts = client.plan, _prompts(client, "ttft")

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
    """Evicted prompts that come back with new tokens behind them, and again with other ones while
    the device holds them; then evicted ones while other requests decode."""
    plan = client.plan
    prompts = await _asked_once(client, "grown")
    for num_new in plan.new_tokens:
        await client.settle()
        for number, prompt in enumerate(prompts):
            for kind in ("hit", "hit on the device,"):
                asked = prompt + client.text(num_new, "grown", number, num_new, kind)
                name = f"{kind} and {num_new} new"
                await client.ask(name, f"grown {number}", asked, plan.first_tokens)
    num_new = plan.new_tokens[-2]
    kind = f"hit and {num_new} new, beside decodes"
    longer = [
        prompt + client.text(num_new, "grown", number, "beside")
        for number, prompt in enumerate(prompts[: plan.num_mix_hits])
    ]
    return await _beside_decodes(client, "grown", kind, longer)


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
    prompts = await _asked_once(client, "mix")
    hits = prompts[: client.plan.num_mix_hits]
    return await _beside_decodes(client, "mix", "hit beside decodes", hits)


async def stores(client: Client) -> Numbers:
    """New prompts, one after another, while other requests decode: the cost of stores to each step.
    Without a connector the same steps have no stores. Repeats fill both tiers."""
    plan = client.plan
    prompts = [client.text(plan.idle_prompt_tokens, "stores", i) for i in range(plan.idle_prompts)]
    return await _beside_decodes(client, "stores", COLD, prompts)


async def turns(client: Client) -> Numbers:
    """All conversations to their end, from empty caches.

    As in vLLM's benchmark, each client holds its share of the active conversations and goes round
    them, one question at a time; one that ends makes room for the next that waits. Unlike there,
    every client stays until all conversations have ended. The history has the recorded answers,
    not the server's: all contenders get the same prompts.
    """
    plan = client.plan
    waiting = deque(plan.conversations(client.vocabulary, client.repeat))
    if client.start.folder is None:
        await client.reset(external=True)
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
            before = client.counted() if plan.own_answers else {}
            reply = await client.ask(kind, name, prompt, length, compared=plan.exact)
            if plan.own_answers:
                after = client.counted()
                sources = {each: after.get(each, 0) for each in SOURCES.values()}
                reply.sources = {each: sources[each] - before.get(each, 0) for each in sources}
                conversation.turns[turn].answer[:] = reply.tokens
            if turn + 1 < len(conversation.turns):
                held.append((conversation, turn + 1))

    share, more = divmod(plan.active, plan.clients)
    async with asyncio.TaskGroup() as users:
        for number in range(plan.clients):
            users.create_task(user(share + (number < more)))
    return {"seconds": client.elapsed()}


async def traces(client: Client, agents: int) -> Numbers:
    """Recorded agents in a closed loop. Each sends a request, waits for its answer, pauses, and
    sends the next one. The measurement begins when all have their first answer. Requests that are
    under way at its end are answered."""
    plan = client.plan
    by_agent = requests_by_agent(plan, agents)
    limit = math.inf if plan.seconds is None else plan.seconds
    asked: list[Request] = []
    dry: list[int] = []
    """Agents without requests before the time is over: the others have the engine to themselves."""

    @cache
    def text(length: int, *what: object) -> list[int]:
        # For another number of agents the same ids become other tokens, which no cache has.
        return client.text(length, agents, *what)

    async def send(kind: str | None, request: Request, prompt: Sequence[int]) -> None:
        agent, number = request.place
        name = f"agent {agent}, request {number + 1}"
        await client.ask(kind, name, prompt, request.answer_tokens)

    async def go_on(agent: int) -> None:
        for request in by_agent[agent][1:]:
            prompt = request.prompt(text)
            left = limit - client.elapsed()
            await asyncio.sleep(max(0.0, min(request.pause, left)))
            if request.pause >= left:
                return
            await send(FIRST_TURN if request.opens else LATER_TURNS, request, prompt)
            asked.append(request)
        if plan.requests is None and client.elapsed() < limit:
            dry.append(agent)

    first = [requests[0] for requests in by_agent]
    prompts = [request.prompt(text) for request in first]
    async with asyncio.TaskGroup() as tasks:
        for request, prompt in zip(first, prompts, strict=True):
            tasks.create_task(send(None, request, prompt))
    client.begin()
    async with asyncio.TaskGroup() as tasks:
        for agent in range(agents):
            tasks.create_task(go_on(agent))
    found: Numbers = {"seconds": min(limit, client.elapsed()), "dry_agents": len(dry)}
    return found | _needed(plan, first, asked)


def _needed(plan: Plan, first: Sequence[Request], asked: Sequence[Request]) -> Numbers:
    """The working set of ``asked`` and of those ``first``, and the share of the prompt tokens of
    ``asked`` that an endless cache computes."""
    new = new_tokens([*first, *asked])
    numbers = {"device_multiple": sum(new) / plan.device_tokens}
    if plan.kv_bytes_per_token is not None:
        numbers["host_multiple"] = sum(new) * plan.kv_bytes_per_token / plan.host_bytes
    if asked:
        prompt_tokens = sum(request.prompt_tokens for request in asked)
        numbers["endless_share"] = sum(new[len(first) :]) / prompt_tokens
    return numbers


async def restart(client: Client) -> Numbers:
    """The prompts of ``ttft``, in an engine over the files of one that has had them."""
    kind, length = "hit in the files", client.plan.first_tokens
    for number, prompt in enumerate(_prompts(client, "ttft")):
        await client.ask(kind, f"ttft {number}", prompt, length, compared=True)
    return {}


def _prompts(client: Client, workload: Workload) -> list[list[int]]:
    """Those that fill the device one and a half times."""
    plan = client.plan
    return [client.text(plan.prompt_tokens, workload, i) for i in range(plan.num_hits)]


async def _asked_once(client: Client, workload: Workload) -> list[list[int]]:
    prompts = _prompts(client, workload)
    for number, prompt in enumerate(prompts):
        await client.ask(None, f"{workload} {number}", prompt, client.plan.first_tokens)
    return prompts


async def _beside_decodes(
    client: Client, workload: Workload, kind: str, prompts: Sequence[Sequence[int]]
) -> Numbers:
    """Ask ``prompts`` while other requests decode. Returns the times from token to token of
    these. Tokens before all of them decode do not count: they wait for the prompts of the others.
    """
    plan = client.plan
    await client.settle()
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
    for number, prompt in enumerate(prompts):
        await client.ask(kind, f"{workload} {number}", prompt, plan.first_tokens)
    gaps = [
        after - before
        for reply in await asyncio.gather(*decodes)
        for before, after in pairwise(reply.arrivals)
        if reply.at + before >= since
    ]
    if not gaps:  # all had ended before
        return {}
    return {f"gap_{name}": value for name, value in spread(gaps, 50, 99).items()}


_PLAYS: Mapping[str, Play] = {
    play.__name__: play for play in (ttft, grown, idle, mix, stores, turns)
}


def plays(plan: Plan, *, again: bool = False) -> dict[str, Play]:
    """The measurements of an engine by name, one for each number of agents, in their order.
    ``again``: those of an engine over the files of the first."""
    found: dict[str, Play] = {}
    if again:
        if "ttft" in plan.workloads:
            found["restart"] = restart
        if "turns" in plan.workloads:
            found["turns, restarted"] = turns
        return found
    for workload in plan.workloads:
        if workload == "traces":
            found |= {
                f"traces, {count} agents": partial(traces, agents=count) for count in plan.agents
            }
        elif workload != "restart":
            found[workload] = _PLAYS[workload]
    return found
