"""Agents that replay a trace in a closed loop: each sends a request, waits for its answer, pauses,
and goes on. The requests are the same for all contenders, however fast they are."""

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from examples.bench.command import CannotStart
from examples.bench.traces import read_trace, sessions_in_order
from examples.serve_bench.plan import Plan
from simple_offload.sizing.traces import Request as Turn
from simple_offload.sizing.traces import Trace

ANSWER_TOKEN_SECONDS = 0.02
"""Supposed time of an answer's token. It only decides which agent sends how many requests."""

Text = Callable[..., list[int]]
"""Gets a number of tokens, and what they are for; the same tokens for the same arguments."""


@dataclass(frozen=True)
class Request:
    """One request of an agent."""

    pause: float
    """Seconds from the agent's answer before, or from the start."""
    opens: bool
    """True for the first one of a session, whose KV no contender can have."""
    ids: Sequence[int]
    tokens_per_id: int
    place: tuple[int, int]
    """Its agent, and its number among the requests of that agent."""
    answer_tokens: int

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.ids) * self.tokens_per_id + 1

    def prompt(self, text: Text) -> list[int]:
        """The last token belongs to no complete id, as in the recorded prompt."""
        tokens = [token for id in self.ids for token in text(self.tokens_per_id, "trace", id)]
        return tokens + text(1, "trace", "end", *self.place)


def requests_by_agent(plan: Plan, num_agents: int) -> list[list[Request]]:
    """The requests of each of ``num_agents`` agents, in their order.

    An agent that ends a session begins the next one of the file's shuffled order. A session ends
    before a request that is too long for the plan. Requests without sessions are dealt in the
    file's order, without pauses. Raises CannotStart if the file does not fit.
    """
    assert plan.traces is not None
    trace = read_trace(Path(plan.traces))
    if trace.block_tokens % plan.scale:
        raise CannotStart(
            f"scale: {plan.scale} does not divide the {trace.block_tokens} tokens of an id in "
            f"{plan.traces}"
        )
    tokens_per_id = trace.block_tokens // plan.scale
    sessions = iter(sessions_in_order(trace, plan.seed))
    turns = [_turns(sessions, trace, plan) for _ in range(num_agents)]
    found: list[list[Request]] = [[] for _ in turns]
    # Agents take turns by supposed times, so that all end at about the same time.
    spread = plan.max_pause / num_agents if trace.has_sessions else 0.0
    due = [(agent * spread, agent) for agent in range(num_agents)]
    num_found = 0
    while due and (plan.requests is None or num_found < plan.requests):
        now, agent = heapq.heappop(due)
        turn, opens = next(turns[agent], (None, False))
        if turn is None:
            continue
        mine = found[agent]
        pause = min(turn.pause / plan.pause_scale, plan.max_pause) if mine else now
        answer_tokens = _answer_tokens(turn, plan)
        place = (agent, len(mine))
        mine.append(Request(pause, opens, turn.ids, tokens_per_id, place, answer_tokens))
        num_found += 1
        waited = pause if len(mine) > 1 else 0.0
        heapq.heappush(due, (now + waited + answer_tokens * ANSWER_TOKEN_SECONDS, agent))
    if (
        num_found < (plan.requests or 0)
        or not all(found)
        or all(each.opens for mine in found for each in mine)
    ):
        wanted = "one or more for each" if plan.requests is None else f"{plan.requests}"
        raise CannotStart(
            f"--traces: {plan.traces} has too few requests of at most {plan.max_trace_tokens} "
            f"tokens: {num_found} for {num_agents} agents. Wanted: {wanted}, and one or more that "
            "continue a session"
        )
    return found


def new_tokens(requests: Iterable[Request]) -> list[int]:
    """Of each request, the prompt tokens whose prefix no earlier one had: an endless cache computes
    these."""
    prefixes: set[int] = set()
    found = []
    for request in requests:
        prefix, known = 0, len(prefixes)
        for id in request.ids:
            prefix = hash((prefix, id))
            prefixes.add(prefix)
        found.append((len(prefixes) - known) * request.tokens_per_id + 1)
    return found


def _turns(
    sessions: Iterator[Sequence[Turn]], trace: Trace, plan: Plan
) -> Iterator[tuple[Turn, bool]]:
    """One session after another. True marks the first turn of each."""
    for session in sessions:
        for index, turn in enumerate(session):
            prompt_tokens = len(turn.ids) * (trace.block_tokens // plan.scale) + 1
            if prompt_tokens + _answer_tokens(turn, plan) > plan.max_trace_tokens:
                break
            yield turn, trace.has_sessions and index == 0


def _answer_tokens(turn: Turn, plan: Plan) -> int:
    return max(1, turn.output_tokens // plan.scale)
