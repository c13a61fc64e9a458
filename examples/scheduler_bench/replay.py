"""Replay of a trace: hit rates, where hits are lost, and what the memory would allow.

All sizes are divided by ``TracePlan.scale``, so that a block of the device stands for as many
blocks of the trace's tokens. Loads, chunks, prompts and memory keep their ratios. Hit rates depend
on the speed of the engine and of the bus, which the plan states.
"""

import heapq
from collections.abc import Callable, Sequence
from contextlib import closing
from itertools import count

from examples.bench.connectors import Contender
from examples.bench.traces import sessions_in_order
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

    Requests of agents come in a closed loop, others at the times of the trace, until the plan's
    number of them, or the trace's, has ended. Then other agents take their place. Counts those of
    the last working set after the warm-up. ``on_start`` gets the engine before its first
    request."""
    tokens_per_id, longest = trace.block_tokens // plan.scale, plan.max_prompt // trace.block_tokens

    def fits(turns: Sequence[Turn]) -> bool:
        return len(turns[0].ids) <= longest

    waiting = [session for session in sessions_in_order(trace, seed) if fits(session)][::-1]
    order = count()
    due: list[tuple[float, int, Sequence[Turn]]] = []
    """Requests that are to come, each with the rest of its session."""
    running: dict[str, Sequence[Turn]] = {}
    """By request, the rest of its session."""

    def start_session(at: float) -> None:
        if waiting:
            heapq.heappush(due, (at, next(order), waiting.pop()))

    def start_all(now: float) -> None:
        due.clear()
        if trace.has_sessions:
            for agent in range(plan.agents):
                start_session(now + agent * plan.max_pause / plan.agents)
        else:
            while waiting:
                start_session(waiting[-1][0].at)

    num_requests = plan.working_sets * plan.requests
    num_warm_up = num_requests - plan.requests + int(plan.warm_up * plan.requests)
    with closing(Engine(contender, _shape(plan, memory))) as engine:
        watch = Watch(engine)
        on_start(engine)
        start_all(engine.now)
        num_added, limit, counts = 0, plan.requests, False
        while running or (due and num_added < limit):
            if not counts and len(engine.hits) >= num_warm_up:
                counts = True
                watch.begin()
            if engine.at_rest and not running:
                engine.now = max(engine.now, due[0][0])
            while due and num_added < limit and due[0][0] <= engine.now:
                came, _, (turn, *rest) = heapq.heappop(due)
                running[f"{num_added}"] = rest
                # The prompt ends with a token of its own, and no token of the answer comes again:
                # the trace does not show them.
                prompt = [
                    id * tokens_per_id + place for id in turn.ids for place in range(tokens_per_id)
                ]
                answer = [-2 - 2 * num_added] * max(1, turn.output_tokens // plan.scale)
                engine.add(f"{num_added}", [*prompt, -1 - 2 * num_added], answer, came)
                num_added += 1
            engine.step()
            for request_id in [each for each in running if not engine.is_running(each)]:
                following = running.pop(request_id)
                if following and fits(following):
                    pause = min(following[0].pause, plan.max_pause)
                    heapq.heappush(due, (engine.now + pause, next(order), following))
                else:
                    start_session(engine.now)
            if not running and num_added == limit < num_requests:
                limit += plan.requests
                start_all(engine.now)
        engine.drain()
        return watch.outcome()


def _shape(plan: TracePlan, memory: tuple[float, float]) -> Shape:
    block_tokens = BLOCK_SIZE * plan.scale
    device_blocks, host_blocks = (int(each * 1e6 / block_tokens) for each in memory)
    return Shape(
        device_blocks=device_blocks + 1,
        host_blocks=host_blocks + 1,
        max_running=plan.running,
        bus_blocks=plan.bus_tokens / block_tokens,
        chunk_tokens=CHUNK_TOKENS // plan.scale,
        step_seconds=plan.step_ms / 1000,
        tokens_per_second=plan.tokens_per_second / plan.scale,
    )
