"""Replay of a trace: hit rates, where hits are lost, and what the memory would allow.

All sizes are divided by ``TracePlan.scale``, so that a block of the device stands for as many
blocks of the trace's tokens. Loads, chunks, prompts and memory keep their ratios. Hit rates depend
on the speed of the engine and of the bus, which the plan states.
"""

import heapq
from collections.abc import Callable, Sequence
from contextlib import closing
from itertools import count

from examples.bench.traces import sessions_in_order
from examples.scheduler_bench.contenders import Contender
from examples.scheduler_bench.engine import Engine, Shape
from examples.scheduler_bench.plan import BLOCK_SIZE, CHUNK_TOKENS, TracePlan
from examples.scheduler_bench.results import Outcome
from examples.scheduler_bench.watch import Watch
from simple_offload.sizing.traces import Request as Turn
from simple_offload.sizing.traces import Trace


def replay(
    contender: Contender,
    trace: Trace,
    plan: TracePlan,
    memory: tuple[float, float],
    seed: int,
    on_start: Callable[[Engine], None] = lambda _: None,
) -> Outcome:
    """Play ``trace`` with ``memory`` (device and host, in millions of the trace's tokens).
    ``on_start`` gets the engine before its first request."""
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
    with closing(Engine(contender, shape)) as engine:
        player = _Player(engine, trace, plan, seed)
        on_start(engine)
        return player.play()


class _Player:
    """Requests of agents in a closed loop, or at the times of the trace."""

    def __init__(self, engine: Engine, trace: Trace, plan: TracePlan, seed: int) -> None:
        self._engine = engine
        self._plan = plan
        self._tokens_per_id = trace.block_tokens // plan.scale
        self._longest = plan.max_prompt // trace.block_tokens
        self._order = count()
        self._due: list[tuple[float, int, Sequence[Turn]]] = []
        """Requests that are to come, each with the rest of its session."""
        self._watch = Watch(engine)
        sessions = sessions_in_order(trace, seed)
        self._waiting = [session for session in sessions if self._fits(session)][::-1]
        if trace.has_sessions:
            for agent in range(plan.agents):
                self._start_session(agent * plan.max_pause / plan.agents)
        else:
            while self._waiting:
                self._start_session(self._waiting[-1][0].at)

    def play(self) -> Outcome:
        """Until the plan's number of requests, or the trace's, has ended. Counts those after the
        warm-up."""
        engine, plan = self._engine, self._plan
        num_warm_up = int(plan.warm_up * plan.requests)
        running: dict[str, Sequence[Turn]] = {}
        """By request, the rest of its session."""
        num_added = 0
        counts = False
        while running or (self._due and num_added < plan.requests):
            if not counts and len(engine.hits) >= num_warm_up:
                counts = True
                self._watch.begin()
            if engine.at_rest and not running:
                engine.now = max(engine.now, self._due[0][0])
            while self._due and num_added < plan.requests and self._due[0][0] <= engine.now:
                came, _, turns = heapq.heappop(self._due)
                self._add(num_added, turns[0], came)
                running[f"{num_added}"] = turns[1:]
                num_added += 1
            engine.step()
            for request_id in [each for each in running if not engine.is_running(each)]:
                following = running.pop(request_id)
                if following and self._fits(following):
                    pause = min(following[0].pause, plan.max_pause)
                    self._add_due(engine.now + pause, following)
                else:
                    self._start_session(engine.now)
        engine.drain()
        return self._watch.outcome()

    def _add(self, number: int, turn: Turn, came: float) -> None:
        """The prompt ends with a token of its own, and no token of the answer comes again: the
        trace does not show them."""
        size = self._tokens_per_id
        prompt = [each * size + place for each in turn.ids for place in range(size)]
        length = max(1, turn.output_tokens // self._plan.scale)
        self._engine.add(f"{number}", [*prompt, -1 - 2 * number], [-2 - 2 * number] * length, came)

    def _start_session(self, at: float) -> None:
        if self._waiting:
            self._add_due(at, self._waiting.pop())

    def _add_due(self, at: float, turns: Sequence[Turn]) -> None:
        heapq.heappush(self._due, (at, next(self._order), turns))

    def _fits(self, turns: Sequence[Turn]) -> bool:
        return len(turns[0].ids) <= self._longest
