"""Plays a trace's prompts through a MissRatioCurve."""

import heapq
import math
from collections.abc import Iterator
from hashlib import blake2b

from simple_offload.sizing.curve import MissRatioCurve
from simple_offload.sizing.traces import Request, Trace

_MOVES = 5e10
"""Entries of the curve's list that move, because blocks are used again: seconds of work. It bounds
the sample where a trace has many blocks and uses them often. Others are played exactly."""


class _Hashes(dict[int, bytes]):
    """Hashes of ids, distributed as those of vLLM."""

    def __missing__(self, block_id: int) -> bytes:
        self[block_id] = found = blake2b(b"%d" % block_id, digest_size=16).digest()
        return found


def play(trace: Trace, num_agents: int) -> MissRatioCurve:
    """The curve of all prompts of ``trace``. ``num_agents`` take turns at its sessions, each at its
    recorded pace; requests without sessions come at their times. Answers have no identities in a
    trace, so they take no room."""
    samples_squared = _MOVES * trace.num_blocks / max(1, trace.num_references)
    curve = MissRatioCurve(max_samples=1 + int(math.sqrt(samples_squared)), window=math.inf)
    hash_of = _Hashes().__getitem__
    for request in in_order(trace, num_agents):
        found = list(map(hash_of, request.ids))
        curve.on_prompt(found, trace.block_tokens, request.prompt_tokens)
    return curve


def in_order(trace: Trace, num_agents: int) -> Iterator[Request]:
    """The requests as they come. An agent that has ended a session begins the file's next one."""
    if not trace.has_sessions:
        yield from sorted((each for (each,) in trace.sessions), key=lambda each: each.at)
        return
    at_work, waiting = list(trace.sessions[:num_agents]), iter(trace.sessions[num_agents:])
    due: list[tuple[float, int, int]] = []
    """When, whose, and the place in the session."""
    begun = [0.0] * len(at_work)
    for agent in range(len(at_work)):
        heapq.heappush(due, (0.0, agent, 0))
    while due:
        now, agent, place = heapq.heappop(due)
        session = at_work[agent]
        yield session[place]
        if place + 1 < len(session):
            step = session[place + 1].at - session[0].at
            heapq.heappush(due, (max(now, begun[agent] + step), agent, place + 1))
        elif following := next(waiting, ()):
            at_work[agent], begun[agent] = following, now
            heapq.heappush(due, (now, agent, 0))
