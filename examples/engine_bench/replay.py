"""Replay: the requests of the part ``traces``, made from recorded sessions at the plan's scale."""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from examples.bench.command import CannotStart
from examples.engine_bench.plan import Plan
from examples.scheduler_bench.traces import Trace, Turn, read_trace

ANSWER_TOKEN_SECONDS = 0.02
"""Supposed time of an answer's token. It only decides which agent sends how many requests."""


@dataclass(frozen=True)
class Request:
    """One request of an agent."""

    pause: float
    """Seconds from the agent's answer before, or from the start."""
    opens: bool
    """True for the first one of a session, whose KV no contender can have."""
    prompt: Sequence[int]
    answer_tokens: int


@dataclass(frozen=True)
class WorkingSet:
    """How much KV the requests need, beside the memory that there is."""

    requests: int
    prompt_tokens: int
    answer_tokens: int
    new_tokens: int
    """Prompt tokens whose prefix no earlier request had: an endless cache computes these."""
    device_multiple: float
    """New tokens for one token of the device's KV space."""
    host_multiple: float

    def __str__(self) -> str:
        return (
            f"Agents: {self.requests} requests, {self.prompt_tokens:,} prompt tokens. "
            f"{self.new_tokens:,} of them are new: {self.device_multiple:.2f} times the device's "
            f"KV space, {self.host_multiple:.2f} times the host tier"
        )


def requests_by_agent(plan: Plan) -> list[list[Request]]:
    """The same for every contender, however fast it is.

    An agent that ends a session begins the next one of the file's shuffled order. A session ends
    before a request that is too long for the plan. Raises CannotStart if the file does not fit.
    """
    trace = _sessions(plan)
    tokens_per_id = trace.block_tokens // plan.trace_scale

    @cache
    def tokens(id: int) -> list[int]:
        return plan.text(tokens_per_id, "trace", id)

    sessions = iter(trace.shuffled(plan.trace_seed))
    turns = [_turns(sessions, tokens_per_id, plan) for _ in range(plan.agents)]
    found: list[list[Request]] = [[] for _ in turns]
    # Agents take turns by supposed times, so that all end at about the same time.
    due = [(agent * plan.trace_pause / plan.agents, agent) for agent in range(plan.agents)]
    num_found = 0
    while due and num_found < plan.trace_requests:
        now, agent = heapq.heappop(due)
        turn, opens = next(turns[agent], (None, False))
        if turn is None:
            continue
        mine = found[agent]
        pause = min(turn.pause / plan.trace_scale, plan.trace_pause) if mine else now
        # The last token belongs to no complete id, as in the recorded prompt.
        prompt = [token for id in turn.ids for token in tokens(id)]
        prompt += plan.text(1, "trace", "end", agent, len(mine))
        answer_tokens = _answer_tokens(turn, plan)
        mine.append(Request(pause, opens, prompt, answer_tokens))
        num_found += 1
        waited = pause if len(mine) > 1 else 0.0
        heapq.heappush(due, (now + waited + answer_tokens * ANSWER_TOKEN_SECONDS, agent))
    if num_found < plan.trace_requests or all(each.opens for mine in found for each in mine):
        raise CannotStart(
            f"--traces: {plan.trace} has too few requests of at most {plan.max_trace_tokens} "
            f"tokens: {num_found} for {plan.agents} agents. Wanted: {plan.trace_requests}, and "
            "one or more that continue a session"
        )
    return found


def working_set(plan: Plan) -> WorkingSet:
    """Of the plan's requests. Raises CannotStart as they do."""
    requests = [request for mine in requests_by_agent(plan) for request in mine]
    prefixes: set[int] = set()
    for request in requests:
        prefix = 0
        for token in request.prompt:
            prefix = hash((prefix, token))
            prefixes.add(prefix)
    host_tokens = plan.host_bytes / plan.model.kv_bytes_per_token
    return WorkingSet(
        requests=len(requests),
        prompt_tokens=sum(len(request.prompt) for request in requests),
        answer_tokens=sum(request.answer_tokens for request in requests),
        new_tokens=len(prefixes),
        device_multiple=len(prefixes) / plan.device_tokens,
        host_multiple=len(prefixes) / host_tokens,
    )


def _sessions(plan: Plan) -> Trace:
    if plan.trace is None:
        raise CannotStart("--traces: the part traces needs a file")
    trace = read_trace(Path(plan.trace))
    if not trace.has_sessions:
        raise CannotStart(f"--traces: {plan.trace} has no sessions for agents")
    if trace.block_tokens % plan.trace_scale:
        raise CannotStart(
            f"--trace-scale: {plan.trace_scale} does not divide the {trace.block_tokens} tokens "
            f"of an id in {plan.trace}"
        )
    return trace


def _turns(
    sessions: Iterator[Sequence[Turn]], tokens_per_id: int, plan: Plan
) -> Iterator[tuple[Turn, bool]]:
    """One session after another. True marks the first turn of each."""
    for session in sessions:
        for index, turn in enumerate(session):
            prompt_tokens = len(turn.ids) * tokens_per_id + 1
            if prompt_tokens + _answer_tokens(turn, plan) > plan.max_trace_tokens:
                break
            yield turn, index == 0


def _answer_tokens(turn: Turn, plan: Plan) -> int:
    return max(1, turn.output_tokens // plan.trace_scale)
