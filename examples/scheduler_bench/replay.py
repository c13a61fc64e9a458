"""Replay of a trace: hit rates, where hits are lost, and what the memory would allow.

All sizes are divided by ``TracePlan.scale``, so that a block of the device stands for as many
blocks of the trace's tokens. Loads, chunks, prompts and memory keep their ratios. Hit rates depend
on the speed of the engine and of the bus, which the plan states.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

from examples.bench.traces import Trace, Turn, token_ids
from examples.scheduler_bench.contenders import Contender
from examples.scheduler_bench.engine import Engine, Shape
from examples.scheduler_bench.plan import BLOCK_SIZE, CHUNK_TOKENS, TracePlan
from examples.scheduler_bench.results import Outcome
from examples.scheduler_bench.watch import Watch


def replay(
    contender: Contender, trace: Trace, plan: TracePlan, memory: tuple[float, float], seed: int
) -> Outcome:
    """Play ``trace`` with ``memory`` (device and host, in millions of the trace's tokens)."""
    block_tokens = BLOCK_SIZE * plan.scale
    device_blocks, host_blocks = (int(each * 1e6 / block_tokens) for each in memory)
    shape = Shape(
        device_blocks=device_blocks + 1,
        host_blocks=host_blocks + 1,
        max_running=plan.running,
        bus_blocks=plan.bus_tokens / block_tokens,
        chunk_tokens=CHUNK_TOKENS // plan.scale,
        step_seconds=plan.step_seconds,
        tokens_per_second=plan.tokens_per_second / plan.scale,
    )
    engine = Engine(contender, shape)
    try:
        player = _Player(engine, trace, plan, seed)
        player.play()
    finally:
        engine.close()
    return player.outcome()


@dataclass(frozen=True)
class _Due:
    """A request that is to come."""

    session: Sequence[Turn]
    index: int

    @property
    def turn(self) -> Turn:
        return self.session[self.index]


class _Player:
    """Requests of agents in a closed loop, or at the times of the trace."""

    def __init__(self, engine: Engine, trace: Trace, plan: TracePlan, seed: int) -> None:
        self._engine = engine
        self._plan = plan
        self._tokens_per_id = trace.block_tokens // plan.scale
        self._longest = plan.max_prompt // trace.block_tokens
        self._order = count()
        self._due: list[tuple[float, int, _Due]] = []
        self._waiting: list[Sequence[Turn]] = []
        self._watch = Watch(engine)
        self._num_warm_up = int(plan.warm_up * plan.requests)
        if trace.has_sessions:
            self._waiting = trace.shuffled(seed)[::-1]
            for agent in range(plan.agents):
                self._start_session(agent * plan.max_pause / plan.agents)
        else:
            for session in trace.sessions:
                self._add_due(session[0].at, _Due(session, 0))

    def play(self) -> None:
        """Until the plan's number of requests, or the trace's, has ended."""
        running: dict[str, _Due] = {}
        num_added = 0
        engine = self._engine
        counts = False
        while running or (self._due and num_added < self._plan.requests):
            if not counts and len(engine.hits) >= self._num_warm_up:
                counts = True
                self._watch.begin()
            may_add = num_added < self._plan.requests
            if engine.at_rest and not running and may_add:
                engine.now = max(engine.now, self._due[0][0])
            while self._due and may_add and self._due[0][0] <= engine.now:
                came, _, due = heapq.heappop(self._due)
                request_id = f"{num_added}"
                self._add(request_id, due.turn, came)
                running[request_id] = due
                num_added += 1
                may_add = num_added < self._plan.requests
            engine.step()
            for request_id in [each for each in running if not engine.is_running(each)]:
                self._go_on(running.pop(request_id))
        engine.drain()

    def outcome(self) -> Outcome:
        """Of the requests after the warm-up."""
        return self._watch.outcome()

    def _add(self, request_id: str, turn: Turn, came: float) -> None:
        """The prompt ends with a token of its own, and no token of the answer comes again: the
        trace does not show them."""
        place = 2 * int(request_id)
        prompt = [*token_ids(turn.ids, self._tokens_per_id), -1 - place]
        length = max(1, turn.output_tokens // self._plan.scale)
        self._engine.add(request_id, prompt, [-2 - place] * length, came)

    def _go_on(self, ended: _Due) -> None:
        """The session's next request follows, or the agent's next session."""
        following = _Due(ended.session, ended.index + 1)
        if following.index < len(ended.session) and self._fits(following.turn):
            pause = min(following.turn.pause, self._plan.max_pause)
            self._add_due(self._engine.now + pause, following)
        else:
            self._start_session(self._engine.now)

    def _start_session(self, at: float) -> None:
        while self._waiting:
            session = self._waiting.pop()
            if self._fits(session[0]):
                self._add_due(at, _Due(session, 0))
                return

    def _add_due(self, at: float, due: _Due) -> None:
        if self._fits(due.turn):
            heapq.heappush(self._due, (at, next(self._order), due))

    def _fits(self, turn: Turn) -> bool:
        return len(turn.ids) <= self._longest
